"""File names of images and schemas: whatever an id is, it leads nowhere else."""

import pytest

from prefixcached.actors.storage_format import (
    DamagedFile,
    file_name,
    parse_file_name,
    schema_name,
)
from prefixcached.protocol.image import ImageKind

OUTSIDE = (
    "/etc/passwd", "../x", "a/b", "..", ".", "", "a\0b", "x" * 32, "A" * 32, "0" * 31, "0" * 33,
    "0" * 32 + "\n", "0" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_no_id_names_no_file(name: str) -> None:
    """D9: the last gate before a name becomes part of a path, whoever chose the name."""
    with pytest.raises(ValueError, match="names no file"):
        file_name(name, ImageKind.OBJECT)
    with pytest.raises(DamagedFile, match="is no digest"):
        schema_name(name)


def test_an_id_names_the_file_that_is_read_back_as_it() -> None:
    """The ids that the daemon makes are those that it reads."""
    found = parse_file_name(file_name("0f" * 16, ImageKind.SEGMENT))
    assert found == ("0f" * 16, ImageKind.SEGMENT)
    assert schema_name("0f" * 16) == "0f" * 16 + ".schema"

"""What many tests of the client begin with."""

from collections.abc import Iterator

import pytest

from tests.support.descriptors import none_leaked


@pytest.fixture
def no_descriptor_stays() -> Iterator[None]:
    """Fail the test if it leaves a descriptor open: ``usefixtures``, before the daemon's."""
    with none_leaked():
        yield

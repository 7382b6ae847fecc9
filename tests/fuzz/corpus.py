"""The kept inputs: one packed file of each target's corpus, and every past finding by its name.

    corpus/<target>.zip        what reaches all that was ever reached, minimised
    findings/<target>/<name>   an input that failed once; its name says what it showed

Whoever changes how a target reads its input (its choices) packs its corpus anew: `make fuzz`.
"""

import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
MOST_INPUTS: Final = 100
"""Of one target: all are replayed by every `make test`."""

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""One time for all members, so that the same inputs are the same file."""


def packed_inputs(target: str) -> list[bytes]:
    """The inputs of a target's corpus."""
    with zipfile.ZipFile(HERE / "corpus" / f"{target}.zip") as archive:
        return [archive.read(name) for name in sorted(archive.namelist())]


def findings(target: str) -> dict[str, bytes]:
    """The inputs that failed once, by name."""
    return {path.name: path.read_bytes() for path in sorted((HERE / "findings" / target).glob("*"))}


def pack(target: str, inputs: Iterable[bytes]) -> int:
    """Keep the smallest ``inputs`` as the corpus of a target, and return how many."""
    kept = sorted(set(inputs), key=lambda data: (len(data), data))[:MOST_INPUTS]
    assert kept, f"nothing to keep for {target}; the merge's log says why"
    path = HERE / "corpus" / f"{target}.zip"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, data in enumerate(kept):
            archive.writestr(zipfile.ZipInfo(f"{number:03d}", _EPOCH), data)
    return len(kept)

"""ReadDesk: files that must be verified before somebody is answered. Part of RamTier, pure.

The Prefetcher makes one read per image however many ask; here each asker waits for all of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prefixcached.actors.desk import Shared
from prefixcached.actors.entries import Entry
from prefixcached.protocol.actor_messages import CancelRead, ImageRead, Promoted, ReadImage


class OpenFile(Protocol):
    """A verified file (`store.VerifiedFile`)."""

    @property
    def descriptor(self) -> int:
        """Read-only descriptor."""
        ...

    @property
    def data_offset(self) -> int:
        """Where the image begins."""
        ...

    def close(self) -> None:
        """Close the descriptor."""


Done = Callable[[dict[int, OpenFile] | None, float], None]
"""Called once with the open files by key, or None if any could not be read; and the time."""


@dataclass(slots=True, eq=False)
class Asker:
    """Somebody who waits for several files."""

    session: int
    entries: Mapping[int, Entry]
    done: Done
    outstanding: dict[int, int] = field(default_factory=dict)
    files: dict[int, OpenFile] = field(default_factory=dict)
    failed: bool = False
    abandoned: Callable[[], None] | None = None


class ReadDesk:
    """Owns the reads that somebody waits for."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._askers: dict[int, Asker] = {}
        self.damaged = 0
        self.missing = 0
        self.failed = 0
        self.read_bytes = 0
        self.read_seconds = 0.0

    @property
    def outstanding(self) -> int:
        """Reads that have not been answered yet."""
        return len(self._askers)

    def read(
        self, session: int, entries: Mapping[int, Entry], done: Done,
        abandoned: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Have the files of ``entries`` verified, then call ``done``. There is at least one.

        ``abandoned`` is called instead if the session ends before that.
        """
        asker = Asker(session, entries, done, abandoned=abandoned)
        for key, entry in entries.items():
            assert entry.file is not None
            number = next(self._shared.numbers)
            asker.outstanding[number] = key
            self._askers[number] = asker
            self._shared.orders.prefetcher(ReadImage(number, entry.file))

    def image_read(self, outcome: ImageRead, file: OpenFile | None, now: float) -> None:
        """One file was verified, or could not be."""
        self.read_bytes += outcome.read_bytes
        self.read_seconds += outcome.seconds
        asker = self._askers.pop(outcome.read, None)
        if file is None:
            self.note_failure(outcome)
        if asker is None:  # the asker is gone
            if file is not None:
                file.close()
            return
        key = asker.outstanding.pop(outcome.read)
        if file is not None:
            asker.files[key] = file
        else:
            asker.failed = True
        if asker.outstanding:
            return
        if asker.failed:
            for open_file in asker.files.values():
                open_file.close()
            asker.done(None, now)
        else:
            asker.done(asker.files, now)

    def note_failure(self, outcome: ImageRead | Promoted) -> None:
        """A file could not be read; where it is gone or in quarantine its entry has none."""
        self.failed += 1
        self.damaged += outcome.damaged
        self.missing += outcome.missing
        entry = self._shared.index.entries.get(outcome.id)
        if entry is not None and (outcome.damaged or outcome.missing):
            self._shared.index.lose_file(entry)

    def client_gone(self, session: int) -> None:
        """Stop waiting for a connection; the last asker of an image cancels its read."""
        for number, asker in list(self._askers.items()):
            if asker.session != session:
                continue
            del self._askers[number]
            entry = asker.entries[asker.outstanding.pop(number)]
            self._shared.orders.prefetcher(CancelRead(number, entry.id))
            if not asker.outstanding:
                for open_file in asker.files.values():
                    open_file.close()
                if asker.abandoned is not None:
                    asker.abandoned()

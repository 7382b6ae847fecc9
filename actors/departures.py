"""Departures: what is on its way off the SSD, and what cannot leave. Part of Index; pure.

Files that are being deleted, those that could not be, and what cleared namespaces left in the
trash. Rules D5, D11: no write may wait for the bytes of what stays for now.
"""

import math
from typing import Final

from prefixcached.actors.ledger import Ledger
from prefixcached.actors.write_policy import CLEARED, MOST_FAILED_DELETIONS

OTHERS_RETRY_SECONDS: Final = 300.0
"""Between attempts to drop what could not be dropped: a volume that was read-only for a moment."""


class Departures:
    """Owns the deletions that failed, and what the disk has yet to say of its trash."""

    def __init__(self, ssd: Ledger) -> None:
        self._ssd = ssd
        self._clears = 0
        self._trash_elsewhere_bytes = 0
        self._is_trash_stuck = False
        self._undeletable: set[tuple[str, int]] = set()
        self._failed_in_a_row: set[tuple[str, int]] = set()
        self.is_trash_expected = False
        """Whether the disk will tell when its trash is empty."""
        self.is_drop_awaited = False
        """Whether the disk has yet to say what became of a `DropOthers`."""
        self._other_bytes = 0
        self._other_wanted_bytes = 0
        self._other_kept_bytes = 0
        self._other_retry_at = -math.inf

    @property
    def leaving_bytes(self) -> int:
        """What will be room once it is gone."""
        trash = 0 if self._is_trash_stuck else self._ssd.bytes_by_state["trash"]
        return self._ssd.bytes_by_state["deleting"] + trash

    @property
    def staying_bytes(self) -> int:
        """What cannot be deleted for now, files beside entries included."""
        trash = self._ssd.bytes_by_state["trash"] if self._is_trash_stuck else 0
        return self._ssd.bytes_by_state["undeletable"] + trash + self._other_kept_bytes

    @property
    def most_deletions(self) -> float:
        """How many files may be deleted for room: one at a time once one failed, then none.

        Else the index would go entry by entry, and the files, once they can be deleted, after it.
        """
        if not self._failed_in_a_row:
            return math.inf
        return 1 if len(self._failed_in_a_row) < MOST_FAILED_DELETIONS else 0

    @property
    def is_outcome_awaited(self) -> bool:
        """Whether a deletion after one that failed is still under way: its outcome tells more."""
        return bool(self._failed_in_a_row and self._ssd.images_by_state["deleting"])

    def deleted(self, file_id: str, nbytes: int, error: str, *, is_anew: bool) -> None:
        """A file that was being deleted is gone, or stays for now where there is an ``error``.

        One that stays makes no room: others have to. It is told once more when it is gone at last,
        is written anew (``is_anew``), or went into the trash.
        """
        file = file_id, nbytes
        state = "undeletable" if file in self._undeletable else "deleting"
        if error and error != CLEARED:
            if state == "deleting":
                self._undeletable.add(file)
                self._failed_in_a_row.add(file)
                self._ssd.move("deleting", "undeletable", nbytes)
            return
        self._undeletable.discard(file)
        self._failed_in_a_row.discard(file)
        if error:
            self._ssd.move(state, "trash", nbytes)
            return
        self._ssd.remove(state, nbytes)
        if state == "deleting" or not is_anew:  # it was deleted, so others can be
            self._failed_in_a_row.clear()

    # -- files beside entries -------------------------------------------------------------------

    def others_to_drop(self, over_bytes: int) -> int:
        """How much of the files that are no entries is to be dropped now for so much room.

        One request at a time: what entries have to give is known once its outcome is.
        """
        wanted = min(over_bytes, self._other_bytes - self._other_kept_bytes)
        if self.is_drop_awaited or wanted <= 0:
            return 0
        self.is_drop_awaited = True
        self._other_wanted_bytes = wanted
        return wanted

    def set_other_bytes(self, nbytes: int, dropped_bytes: int | None = None) -> None:
        """The disk says what it holds beside entries; what it could not drop stays for now."""
        self._other_bytes = nbytes
        self._other_kept_bytes = min(self._other_kept_bytes, nbytes)
        if dropped_bytes is not None:
            self.is_drop_awaited = False
            if dropped_bytes < self._other_wanted_bytes:
                self._other_kept_bytes = nbytes

    def forget_kept(self, now: float) -> None:
        """Once in a while what could not be dropped may be tried again (rule D4)."""
        if now >= self._other_retry_at:
            self._other_retry_at = now + OTHERS_RETRY_SECONDS
            self._other_kept_bytes = 0

    # -- clears ---------------------------------------------------------------------------------

    def expect_trash(self) -> None:
        """The disk will be told to clear a namespace, or all.

        The disk will report every file of it as trash, also those that are charged elsewhere, since
        somebody read them when they left, or they were being written or deleted.
        """
        self._clears += 1
        self.is_trash_expected = True
        states = ("lingering", "writing", "deleting")
        self._trash_elsewhere_bytes += sum(self._ssd.bytes_by_state[s] for s in states)

    def lent_at_clear(self, nbytes: int) -> None:
        """Somebody reads a file that a clear takes: the disk will report it as trash as well."""
        if self.is_trash_expected:
            self._trash_elsewhere_bytes += nbytes

    def cleared(self, state: str, nbytes: int) -> None:
        """A file charged in ``state`` is on its way out, with the rest of its directory."""
        if self.is_trash_expected:
            self._ssd.move(state, "trash", nbytes)
        else:
            self._ssd.remove(state, nbytes)

    def namespace_cleared(self) -> None:
        """The disk has carried out one clear."""
        self._clears -= 1

    def trash_emptied(self, nbytes: int, *, done: bool, is_stuck: bool = False) -> None:
        """Cleared files are gone; ``done`` when none is left of what the disk has cleared.

        ``is_stuck`` where the rest cannot be deleted for now.
        """
        self._is_trash_stuck = is_stuck
        trash = self._ssd.bytes_by_state["trash"]
        if done and not self._clears:
            self.is_trash_expected = False
            self._trash_elsewhere_bytes = 0
            self._ssd.remove("trash", trash, self._ssd.images_by_state["trash"])
            return
        elsewhere = min(nbytes, self._trash_elsewhere_bytes)
        self._trash_elsewhere_bytes -= elsewhere
        self._ssd.remove("trash", min(nbytes - elsewhere, trash), 0)

"""Guide: keeps a daemon to the turns of a record, and notices where it decides otherwise. Pure.

RamTier decides by what it hears, in which order and when. A daemon that hears the same as the
record's at the same times of the record's clock decides the same, take by take. The guide says what
comes next; each decision is compared with the record's, and the first one that differs ends the
following: from there on the two daemons are two different ones.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from prefixcached.daemon.trace.trace_file import Record
from prefixcached.daemon.trace.tracer import OWN, REQUESTS
from prefixcached.daemon.trace.turns import Name, Turn

MAX_LOOKAHEAD: Final = 4096
"""Turns in which the next request is looked for: half a day in which nothing happens."""

LOOK_TURNS: Final = 256
"""After so many turns the next request is looked for again, which may have come into sight."""

NO_TURNS: Final = "the record has no turns: it is of an older version, or ends at once"

Key = tuple[object, ...]


class Followed(msgspec.Struct, frozen=True):
    """How far the record was followed; ``reason`` is empty where that was to its end.

    ``turns`` were followed; ``seconds`` and ``flow`` say where that ended.
    """

    turns: int
    seconds: float
    flow: str
    reason: str


class Guide:
    """Owns the place in the record.

    Args:
        turns: As `turns.turns_of` gives them.
        outcomes: As `turns.outcomes_of` gives them; used up.
        ended: Called once, when the following ends.
    """

    def __init__(
        self,
        turns: Iterator[Turn],
        outcomes: dict[Name, deque[bool]],
        ended: Callable[[Followed], None],
    ) -> None:
        self._turns = turns
        self._outcomes = outcomes
        self._ended = ended
        self._ahead: deque[Turn] = deque()
        self._request: Key | None = None
        self.is_following = True
        self.followed = 0
        first = next(turns, None)
        self._turn = first or Turn(0.0, 0.0, None, (), is_repeated=False)
        self._decided = deque(self._turn.decided)
        if first is None:
            self.end(NO_TURNS)

    @property
    def now(self) -> float:
        """The time of the present turn, in the seconds of the record's clock."""
        return self._turn.now

    def upcoming(self) -> Turn | None:
        """Return the turn that comes next; None where the following has ended."""
        if self._decided and self._turn.is_whole:
            self.end(f"the record goes on with {_text(self._decided[0])}, and this daemon does not")
        if not self.is_following or self._look_ahead(0) is None:
            self.end("")
            return None
        return self._ahead[0]

    def begin(self) -> None:
        """The upcoming turn begins."""
        self._turn = self._ahead.popleft()
        self._decided = deque(self._turn.decided)
        self.followed += 1
        # Looked for again only where it may be another one: the way there may be long.
        if self._turn.is_repeated or self._turn.has_reply or self.followed % LOOK_TURNS == 0:
            self._request = None

    def awaited_request(self) -> Key | None:
        """Return the key of the next request if nothing before it is heard or answered.

        A client sends it meanwhile; while it does, time must not leap, or its deadlines pass.
        """
        if self._request is None:
            self._request = ()
            for index in range(MAX_LOOKAHEAD):
                turn = self._look_ahead(index)
                if turn is None or (turn.has_reply and not turn.is_repeated):
                    break
                if turn.is_repeated and turn.heard is not None:
                    self._request = key_of(turn.heard) if turn.heard.channel == REQUESTS else ()
                    break
        return self._request or None

    def decide(self, name: Name) -> None:
        """RamTier says something: is it what the record's said?"""
        if not self.is_following:
            return
        if not self._decided:
            self.end(f"this daemon goes on with {_text(name)}, and the record does not")
        elif self._decided[0] != name:
            self.end(f"the record goes on with {_text(self._decided[0])}, here with {_text(name)}")
        else:
            self._decided.popleft()

    def image_id(self) -> str | None:
        """Return what the record's daemon called the image that is published now."""
        if not self.is_following or not self._decided or self._decided[0][:2] != _NEW_IMAGE:
            return None
        return str(self._decided[0][2])

    def succeeds(self, order: Name) -> bool:
        """Whether the record's daemon did what is ordered now: else it is not even tried."""
        outcomes = self._outcomes.get(order)
        return outcomes.popleft() if outcomes else False

    def stall(self, seconds: float) -> None:
        """What comes next in the record has not come for ``seconds``: follow no longer."""
        if (turn := self.upcoming()) is not None:
            heard = "a deadline" if turn.heard is None else f"{turn.heard.type} ({turn.heard.flow})"
            self.end(f"the record goes on with {heard}, which has not come for {seconds:g} s")

    def end(self, reason: str) -> None:
        """Follow no longer. A second call does nothing."""
        if self.is_following:
            self.is_following = False
            heard = self._turn.heard
            flow = heard.flow if heard is not None else ""
            self._ended(Followed(self.followed, self._turn.seconds, flow, reason))

    def _look_ahead(self, index: int) -> Turn | None:
        missing = index + 1 - len(self._ahead)
        self._ahead.extend(itertools.islice(self._turns, max(0, missing)))
        return self._ahead[index] if index < len(self._ahead) else None


_NEW_IMAGE: Final = (OWN, "new-image")


def key_of(record: Record) -> Key:
    """Return what a message to RamTier is recognised by; a session's come one after the other."""
    if record.channel == REQUESTS:
        return ("session", record.facts.session)
    return heard_key(record.message)


def heard_key(plain: dict[str, object]) -> Key:
    """Return what another actor's message to RamTier is recognised by, from its plain form."""
    return (plain.get("type"), *(plain.get(name) for name in _IN_KEY))


_IN_KEY: Final = ("id", "read", "put", "sync", "epoch", "allocated_bytes")


def _text(name: Name) -> str:
    """A decision in words: its type, and what it is about."""
    return " ".join(str(part) for part in name[1:] if part is not None)

"""Turns: what RamTier heard in a trace, when, and what it decided. Pure.

A turn is one message that RamTier handles, or a deadline of its own that wakes it up, with the time
that it was given; all that it says until its next turn it decided then. Messages are handled in the
order in which they were sent, so the n-th turn with a message is of the n-th message sent to it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from prefixcached.daemon.trace.replay_steps import LEFT_OUT
from prefixcached.daemon.trace.trace_file import Plain, Record
from prefixcached.daemon.trace.tracer import OWN, REPLIES
from prefixcached.protocol.actor_messages import ActorMessage
from prefixcached.protocol.framing import tag_of
from prefixcached.protocol.messages import Reply

Name = tuple[object, ...]
"""What tells a message from others: its type and numbers."""

_IN_NAME: Final = (
    "read", "sync", "epoch", "lease", "put", "pin", "claim", "length", "tier", "reason", "matched",
    "base", "new_bytes", "allocated_bytes",
)  # fmt: skip

_OUTCOMES: Final = {"written", "image-read", "promoted"}
"""Of orders that a disk may fail at, that are cancelled, or that the record ends before."""

_SURROUNDINGS: Final = {
    "pressure-changed", "ram-cap-changed", "disk-changed", "trash-emptied", "files-lost"
}  # fmt: skip
"""What the record's machine and disk did of their own accord: another one does not repeat it."""

UNFOLLOWED: Final = frozenset(tag_of(kind) for kind in LEFT_OUT)
"""Requests that a replay leaves out, or may need more or fewer of."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn; ``heard`` is None where it was a deadline.

    ``now`` is in the seconds of the record's clock; ``seconds`` since the record's start.
    ``is_repeated`` says that a daemon that follows hears the same by itself, and is not told.
    ``is_whole`` says that the record goes on behind it, so that ``decided`` is complete.
    """

    now: float
    seconds: float
    heard: Record | None
    decided: tuple[Name, ...]
    is_repeated: bool
    is_whole: bool = True

    @property
    def has_reply(self) -> bool:
        """Whether a client was answered, and may have gone on because of it."""
        return any(name[0] == REPLIES for name in self.decided)


def turns_of(records: Iterable[Record]) -> Iterator[Turn]:
    """Return the turns in order; the first one is what RamTier decided before it heard anything.

    They end where the daemon was told to stop, or where the record lacks messages.
    """
    heard: deque[tuple[Record, bool]] = deque()
    asked: dict[int, str] = {}
    sessions: set[int] = set()
    turn: tuple[Record, Record | None, bool] | None = None
    decided: list[Name] = []
    for record in records:
        match record.channel, record.type:
            case ("tracer", "gap") | ("ram_tier->ram_tier", "sync-all"):
                break
            case "tracer", "turn":
                yield _turn(turn, record, decided)
                if not record.facts.wake and not heard:
                    return  # no record of ours
                of, is_repeated = (None, False) if record.facts.wake else heard.popleft()
                turn, decided = (record, of, is_repeated), []
            case "tracer", "new-image":
                decided.append((OWN, record.type, record.facts.id))
            case ("ram_tier->session" | "ram_tier->ssd_tier" | "ram_tier->prefetcher") as way, kind:
                if way != REPLIES or asked.pop(record.session, kind) not in UNFOLLOWED:
                    decided.append((way, *name_of(record.message)))
            case "session->ram_tier", "client-gone":
                # Who asked nothing that is repeated has no session in a replay.
                heard.append((record, record.facts.session in sessions))
                sessions.discard(record.facts.session)
            case "session->ram_tier", kind:
                asked[record.session] = kind
                if kind not in UNFOLLOWED:
                    sessions.add(record.facts.session)
                heard.append((record, kind not in UNFOLLOWED))
            case channel, _ if channel.endswith("->ram_tier"):
                heard.append((record, not is_told(record)))
            case _:
                pass
    if turn is not None:
        yield replace(_turn(turn, turn[0], decided), is_whole=False)


def _turn(
    turn: tuple[Record, Record | None, bool] | None, next_one: Record, decided: list[Name]
) -> Turn:
    if turn is None:
        return Turn(next_one.facts.now, 0.0, None, tuple(decided), is_repeated=False)
    begun, heard, is_repeated = turn
    return Turn(begun.facts.now, begun.seconds, heard, tuple(decided), is_repeated)


def outcomes_of(records: Iterable[Record]) -> dict[Name, deque[bool]]:
    """By what was ordered, whether it succeeded, each time that it ended in the record."""
    outcomes: dict[Name, deque[bool]] = {}
    for record in records:
        if record.type in _OUTCOMES and record.channel.endswith("->ram_tier"):
            key = outcome_key(record.message)
            outcomes.setdefault(key, deque()).append(not is_told(record))
    return outcomes


def is_told(record: Record) -> bool:
    """Whether another actor's message is told from the record: it does not happen by itself."""
    kind = record.type
    return (
        kind in _SURROUNDINGS
        or bool(record.facts.error)
        or (kind == "loaded" and not record.message.get("done"))
    )


def name_of(plain: Plain) -> Name:
    """Return what tells a message from others, from its plain form."""
    return (plain.get("type"), id_of(plain), *(plain.get(name) for name in _IN_NAME))


def outcome_key(plain: Plain) -> Name:
    """Return what an outcome and its order have in common, from the outcome's plain form."""
    number = plain.get("read")
    return (plain.get("type"), id_of(plain) if number is None else number)


def id_of(plain: Plain) -> str | None:
    """The image that a message is about: its own field, or that of the header in it."""
    found = plain.get("id")
    for name in ("header", "entry"):
        inner = plain.get(name)
        if found is None and isinstance(inner, dict):
            found = id_of(inner)
    return found if isinstance(found, str) else None


def plain_of(message: ActorMessage | Reply) -> Plain:
    """Return the plain form of a message, as far as its name goes."""
    plain: Plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    return plain

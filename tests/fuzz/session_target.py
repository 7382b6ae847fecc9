"""Target `session`: hostile clients against RamTier, the tiers below it and real sessions.

Up to three connections do what the input says, over real sockets with real descriptors. After each
input: every answer was legal and every byte that was lent right; nothing is held of anybody; no
descriptor is left; and a client that behaves stores a prompt and gets it back (C3, C5, L1, P4).
"""

import os
import socket
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog.testing
import trio
import trio.testing

from prefixcached.actors import memory
from prefixcached.protocol import limits
from prefixcached.protocol import messages as m
from prefixcached.protocol.connection import CAPABILITIES
from prefixcached.protocol.framing import FORMAT, HEADER, MAGIC, encode
from prefixcached.protocol.messages import AnyRequest
from prefixcached.protocol.tokens import pack_tokens
from tests.fuzz.choices import Choices, packed
from tests.fuzz.peer import Known, Peer, Place
from tests.fuzz.requests import NAMES, good_offer, offer, prompt, request
from tests.fuzz.world import made_repeatable, running
from tests.support.core_client import sequence
from tests.support.descriptors import open_descriptors
from tests.support.filesystems import scratch_directory
from tests.support.schedules import schedule

MOST_STEPS: Final = 30
HELLO: Final = m.Hello(version=limits.PROTOCOL_VERSION, capabilities=CAPABILITIES, client="fuzz")

_PAUSES: Final = (0.1, 1.0, 6.0, 31.0, 400.0, 4000.0)
"""Beyond the waits of offers, the deadlines of sessions, the age of idle images and of labels."""


def run(data: bytes) -> None:
    """Let clients do what ``data`` chooses, and check what is left of it."""
    choices = Choices(data)
    seed, has_ssd, has_threads = choices.byte(), choices.one_in(3), choices.one_in(8)
    clock = None if has_threads else trio.testing.MockClock(autojump_threshold=0)
    before = open_descriptors()
    with (
        schedule(seed),
        nullcontext() if has_threads else made_repeatable(seed),
        structlog.testing.capture_logs() as logs,
        scratch_directory() if has_ssd else nullcontext() as state_dir,
    ):
        state = state_dir / "state" if state_dir is not None else None
        trio.run(_play, choices, state, has_threads, clock=clock)
    errors = [entry for entry in logs if entry["log_level"] in ("error", "critical")]
    assert not errors, errors
    # What earlier tests left to the collector may be closed meanwhile.
    assert not open_descriptors() - before, "a descriptor was left"


async def _play(choices: Choices, state_dir: Path | None, is_real_time: bool) -> None:
    known = Known((choices.pick(NAMES), choices.pick(NAMES)))
    async with running(state_dir, is_real_time=is_real_time) as world:
        await act(choices, world, known, is_real_time=is_real_time)
        await world.quiet()
        await behave(world)
        await world.quiet()


async def act(choices: Choices, place: Place, known: Known, *, is_real_time: bool) -> None:
    """Let up to three clients do what is chosen, and give all of them up."""
    peers: list[Peer | None] = [None, None, None]
    try:
        for _ in range(MOST_STEPS):
            if not choices.left:
                break
            number = choices.below(3)
            peer = peers[number]
            if peer is None or peer.is_over:
                if peer is not None:
                    peer.close()
                peer = peers[number] = Peer(place, known)
                if not choices.one_in(8):
                    await peer.ask(HELLO)
                continue
            if choices.one_in(24) and not is_real_time:
                await trio.sleep(choices.pick(_PAUSES))
            if await _step(choices, place, peer):
                peers[number] = None
    finally:
        for peer in peers:
            if peer is not None:
                peer.close()


async def behave(place: Place) -> None:
    """A client that knows nothing of all this is served."""
    name, tokens = "ring/served", sequence(20, salt=77)
    peer = Peer(place, Known((name,)))
    await peer.ask(HELLO)
    await peer.ask(offer(name, tokens))
    for number in list(peer.puts):
        peer.fill(number)
        await peer.ask(m.Commit(number))
    await peer.ask(m.Take(name, pack_tokens((*tokens, 7))))
    assert [lent.hit.length for lent in peer.lent.values()] == [20], "a good client is refused"
    peer.close()


# -- one step --------------------------------------------------------------------------------------


async def _step(choices: Choices, place: Place, peer: Peer) -> bool:
    """Do one thing; return whether the connection was given up."""
    match choices.below(24):
        case 0:
            await peer.send(_odd_frame(choices, request(choices, peer)))
        case 1:
            await _send_descriptors(choices, peer)
        case 2:
            first, second = request(choices, peer), request(choices, peer)
            await peer.send(encode(first) + encode(second)[: choices.integer() & 0xFFF])
        case 3:
            data = encode(request(choices, peer))
            await peer.send(data[: choices.below(len(data)) + 1])
        case 4:
            _misuse(choices, peer)
        case 5:
            if choices.one_in(2):
                await peer.finish_sending()
            peer.close()
            return True
        case 6:
            if choices.one_in(2) and place.state_dir is not None:
                peer.note_edit()
                _damage_a_file(choices, place.state_dir)
            if choices.one_in(2):
                await place.squeeze()
        case 7 | 8 | 9 | 10 | 11:
            await _finish_a_put(choices, peer)
        case 12 | 13 | 14 | 15:
            await peer.ask(m.Take(*prompt(choices, peer)))
            if peer.lent and choices.one_in(6):
                peer.attack(choices.pick(list(peer.lent)))
        case _:
            await peer.send(encode(request(choices, peer)))
    if not choices.one_in(6):
        await peer.hear()
    return False


async def _finish_a_put(choices: Choices, peer: Peer) -> None:
    """Offer what is in order, fill all of it and commit."""
    if not peer.puts or choices.one_in(2):
        await peer.ask(good_offer(choices, peer))
    for number, put in list(peer.puts.items()):
        while len(put.descriptors) < len(put.specs) and not peer.is_over and not peer.pending:
            held = len(put.descriptors)
            await peer.ask(m.Fetch(of=number, first=held))
            if len(put.descriptors) == held:
                return
        if choices.one_in(8):
            peer.abuse(number, choices.below(6), choices.below(1 << 16))
        peer.fill(number)
        await peer.send(encode(m.Commit(number)))
        await peer.hear()


def _misuse(choices: Choices, peer: Peer) -> None:
    if peer.puts and choices.one_in(2):
        peer.abuse(choices.pick(list(peer.puts)), choices.below(6), choices.below(1 << 16))
    elif peer.lent:
        peer.attack(choices.pick(list(peer.lent)))


def _damage_a_file(choices: Choices, state_dir: Path) -> None:
    """D3: what happens to a file outside the daemon is never served."""
    files = sorted(state_dir.glob("segments.noindex/*/*"))
    if not files:
        return
    path = choices.pick(files)
    # The writer may take it away meanwhile.
    with suppress(FileNotFoundError):
        match choices.below(4):
            case 0:
                path.unlink()
            case 1:
                os.truncate(path, choices.below(1 << 16))
            case _:
                with path.open("r+b") as file:
                    file.seek(choices.below(1 << 15))
                    file.write(choices.blob(8) or b"x")


async def _send_descriptors(choices: Choices, peer: Peer) -> None:
    """C3: descriptors where none belong, of every kind, with or without a declaration."""
    made = [_descriptor(choices) for _ in range(choices.below(16) + 1)]
    body = encode(request(choices, peer))[HEADER.size :]
    declared = choices.pick((0, len(made), 1, 16, 17, 255))
    data = HEADER.pack(MAGIC, FORMAT, declared, len(body)) + body
    try:
        await peer.send(data if choices.one_in(2) else data[: choices.below(12) + 1], made)
    finally:
        for descriptor in made:
            os.close(descriptor)


def _descriptor(choices: Choices) -> int:
    match choices.below(5):
        case 0:
            read, write = os.pipe()
            os.close(choices.pick((read, write)))
            return write if _is_closed(read) else read
        case 1:
            return os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        case 2:
            left, right = socket.socketpair()
            right.close()
            return left.detach()
        case 3:
            return os.open("/dev/null", os.O_RDWR)
        case _:
            image = memory.create(choices.below(1 << 16))
            descriptor = os.dup(image.writable_descriptor)
            image.free()
            return descriptor


def _is_closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def _odd_frame(choices: Choices, request: AnyRequest) -> bytes:
    """A frame that is wrong in a field, a byte, or its header."""
    plain: Any = msgspec.to_builtins(request, builtin_types=(bytes,))
    match choices.below(4):
        case 0 | 1:
            for _ in range(choices.below(3) + 1):
                plain = choices.changed(plain)
            body = packed(plain)
            return HEADER.pack(MAGIC, FORMAT, 0, len(body)) + body
        case 2:
            return choices.damaged(encode(request))
        case _:
            return choices.blob(64)

"""Synthetic traffic of agents, seeded, and its replay over the real core with hollow memory.

A turn is what `generate` does: take the prompt, store it at L-1, store it again with the answer.
Used by tests of retention and by benchmarks/retention.py.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from prefixcached.actors.entries import Memory
from prefixcached.protocol import messages as wire
from prefixcached.protocol.schema import Kind, Schema, TensorSpec, encode_schema
from prefixcached.protocol.tokens import TokenArray
from tests.support.core import Core

TOKEN_BYTES = 1024
"""Bytes of KV for each token: small beside a real model's 50 to 200 KiB, and so are the caps."""

SCHEMA = encode_schema(Schema((TensorSpec("kv", Kind.APPEND, "U8", (TOKEN_BYTES,), 0),)))


class Turn(NamedTuple):
    """One request of one agent. ``kind`` is what its hits are counted under."""

    kind: str
    namespace: str
    prompt: TokenArray
    answer: TokenArray


class HollowMemory:
    """Memory that is charged and holds nothing: the core moves no bytes."""

    writable_descriptor = descriptor = 0

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def seal(self) -> None:
        pass

    def free(self) -> None:
        pass


class HollowCore(Core):
    """The real core; nothing is written anywhere, whatever it orders."""

    def create_memory(self, nbytes: int) -> Memory:
        return HollowMemory(nbytes)


class Score:
    """Tokens asked for and tokens reused, by kind of traffic."""

    def __init__(self) -> None:
        self.requested: dict[str, int] = {}
        self.reused: dict[str, int] = {}

    def add(self, kind: str, requested: int, reused: int) -> None:
        self.requested[kind] = self.requested.get(kind, 0) + requested
        self.reused[kind] = self.reused.get(kind, 0) + reused

    def ratio(self, kind: str | None = None) -> float:
        """Hit ratio by tokens, over all kinds when None."""
        kinds = [kind] if kind is not None else list(self.requested)
        requested = sum(self.requested.get(k, 0) for k in kinds)
        return sum(self.reused.get(k, 0) for k in kinds) / requested if requested else 0.0


def replay(core: Core, turns: Iterator[Turn], score: Score) -> None:
    """Let one client after the other make its turn."""
    for number, turn in enumerate(turns):
        session = number % 64 + 1
        packed = turn.prompt.tobytes()
        reply = core.reply(session, wire.Take(turn.namespace, packed))
        length = 0
        if isinstance(reply, wire.Hit):
            length = reply.length
            core.call(session, wire.Release(reply.lease))
        score.add(turn.kind, int(turn.prompt.size) - 1, length)
        _store(core, session, turn.namespace, turn.prompt[:-1])
        _store(core, session, turn.namespace, np.concatenate((turn.prompt, turn.answer)))
        core.clock += 1.0


def _store(core: Core, session: int, namespace: str, tokens: TokenArray) -> None:
    offer = wire.Offer(namespace, tokens.tobytes(), SCHEMA)
    reply = core.reply(session, offer)
    if isinstance(reply, wire.Grant):
        slot = core.call(session, wire.Commit(reply.put))
        assert isinstance(slot.reply, wire.Stored)


# -- traffic -----------------------------------------------------------------------------------


class Traffic:
    """Makes tokens and turns from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def tokens(self, low: int, high: int) -> TokenArray:
        """Between ``low`` and ``high`` tokens that nobody else has."""
        size = self.random.randint(low, high)
        return np.frombuffer(self.random.randbytes(4 * size), dtype="<u4")

    def conversation(self, kind: str, system: TokenArray, turns: int) -> Iterator[Turn]:
        """One agent's conversation: each turn's prompt is all that was said, and a little more."""
        history = system
        for _ in range(turns):
            prompt = np.concatenate((history, self.tokens(60, 600)))
            answer = self.tokens(40, 400)
            yield Turn(kind, "model", prompt, answer)
            history = np.concatenate((prompt, answer))

    def conversations(self, live: int, turns: int, systems: Sequence[TokenArray]) -> Iterator[Turn]:
        """``live`` conversations at a time for ``turns`` turns; some speak more often than others.

        Each ends after some 12 turns on average and a new one takes its place.
        """

        def start() -> Iterator[Turn]:
            length = min(60, 2 + int(self.random.expovariate(1 / 10)))
            return self.conversation("live", self.random.choice(systems), length)

        going = [start() for _ in range(live)]
        weights = [1 / (rank + 1) ** 0.7 for rank in range(live)]
        for _ in range(turns):
            index = self.random.choices(range(live), weights)[0]
            turn = next(going[index], None)
            if turn is None:
                going[index] = start()
                turn = next(going[index])
            yield turn

    def sweep(self, prompts: int, low: int = 400, high: int = 1600) -> Iterator[Turn]:
        """A batch job: one instruction, ``prompts`` documents, each read once and never again."""
        instruction = self.tokens(150, 300)
        for _ in range(prompts):
            prompt = np.concatenate((instruction, self.tokens(low, high)))
            yield Turn("sweep", "model", prompt, self.tokens(20, 120))

    def tasks(self, count: int, systems: Sequence[TokenArray]) -> Iterator[Turn]:
        """Short tasks that share long system prompts and end after one or two turns."""
        for _ in range(count):
            system = self.random.choices(systems, [1 / (n + 1) for n in range(len(systems))])[0]
            yield from self.conversation("task", system, self.random.choice((1, 1, 2)))

    def branches(self, count: int, width: int) -> Iterator[Turn]:
        """An agent that tries ``width`` continuations of one history, then goes on with one."""
        history = self.tokens(1500, 3000)
        for _ in range(count):
            ways = [
                list(self.conversation("branch", history, self.random.randint(1, 3)))
                for _ in range(width)
            ]
            yield from self.mix([iter(way) for way in ways])
            best = self.random.choice(ways)[-1]
            history = np.concatenate((best.prompt, best.answer))
            if history.size > 12_000:
                history = self.tokens(1500, 3000)

    def mix(self, sources: Sequence[Iterator[Turn]]) -> Iterator[Turn]:
        """Interleave sources at random, each in its own order."""
        going = list(sources)
        while going:
            source = self.random.choice(going)
            turn = next(source, None)
            if turn is None:
                going.remove(source)
            else:
                yield turn

    def bursts(self, steady: Iterator[Turn], other: Callable[[], Iterator[Turn]], every: int,
               length: int) -> Iterator[Turn]:  # fmt: skip
        """``steady`` traffic, and after each ``every`` turns ``length`` turns of another kind."""
        for number, turn in enumerate(steady, 1):
            yield turn
            if number % every == 0:
                for _, extra in zip(range(length), other(), strict=False):
                    yield extra


def chat(seed: int) -> Iterator[Turn]:
    """Conversations alone: 30 at a time, three system prompts."""
    traffic = Traffic(seed)
    systems = [traffic.tokens(800, 3000) for _ in range(3)]
    return traffic.conversations(30, 1000, systems)


def chat_and_sweeps(seed: int) -> Iterator[Turn]:
    """The same with a batch sweep of 250 prompts after every 150 turns."""
    traffic = Traffic(seed)
    systems = [traffic.tokens(800, 3000) for _ in range(3)]
    steady = traffic.conversations(30, 800, systems)
    return traffic.bursts(steady, lambda: traffic.sweep(250), 150, 250)


def shared_prompts(seed: int) -> Iterator[Turn]:
    """Short tasks behind 12 long system prompts."""
    traffic = Traffic(seed)
    return traffic.tasks(700, [traffic.tokens(2000, 8000) for _ in range(12)])


def branching(seed: int) -> Iterator[Turn]:
    """Five agents that branch four ways at each step."""
    traffic = Traffic(seed)
    return traffic.mix([traffic.branches(12, 4) for _ in range(5)])


def everything(seed: int) -> Iterator[Turn]:
    """All of it at once."""
    traffic = Traffic(seed)
    systems = [traffic.tokens(800, 3000) for _ in range(3)]
    steady = traffic.mix([
        traffic.conversations(20, 500, systems),
        traffic.tasks(150, [traffic.tokens(2000, 8000) for _ in range(6)]),
        *(traffic.branches(5, 4) for _ in range(3)),
    ])  # fmt: skip
    return traffic.bursts(steady, lambda: traffic.sweep(200), 200, 200)


TRACES: dict[str, Callable[[int], Iterator[Turn]]] = {
    "chat": chat,
    "chat-and-sweeps": chat_and_sweeps,
    "shared-prompts": shared_prompts,
    "branching": branching,
    "everything": everything,
}

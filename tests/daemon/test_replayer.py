"""The replayer against a real daemon, step by step, where the two daemons differ."""

from typing import Any

import trio

from prefixcached.client import connect
from prefixcached.daemon.trace.replay_player import Comparison
from prefixcached.daemon.trace.replay_steps import Answered, Effect, Gone, Send, Settle, Step
from prefixcached.daemon.trace.replayer import Replayer
from prefixcached.daemon.trace.trace_file import Facts
from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor
from prefixcached.protocol.messages import AnyRequest
from prefixcached.protocol.schema import Kind, Schema, TensorSpec, encode_schema
from prefixcached.protocol.tokens import pack_tokens
from tests.support.daemon_process import DaemonProcess
from tests.support.until import ram_tier

PROMPT = pack_tokens(range(400))
SCHEMA = encode_schema(Schema((TensorSpec("k", Kind.APPEND, "F16", (2, 8), axis=1),)))
TAKE = wire.Take("n", PROMPT)
OFFER = wire.Offer("n", PROMPT, SCHEMA)
OBJECT = wire.OfferObject(
    "n", "k", ImageSpec(ImageKind.OBJECT, tensors=(StateTensor("x", "U8", (100_000,)),))
)


def send(session: int, request: AnyRequest) -> Step:
    return Send(session, request, 0.0)


def reply(session: int, tag: str, **fields: Any) -> Step:
    return Answered(session, Facts(type=tag, **fields), 0.0)


def done(daemon: DaemonProcess, *steps: Step) -> tuple[Comparison, dict[str, Any]]:
    """Do the steps; return how that compared, and RamTier's statistics."""
    replayer = Replayer(daemon.socket)
    trio.run(replayer.run, steps)
    with connect(socket=daemon.socket) as cache:
        return replayer.comparison, ram_tier(cache)


def test_what_the_record_did_not_grant_is_filled_and_committed(daemon: DaemonProcess) -> None:
    """The client behind a declined offer had the KV: here its put succeeds, and is found."""
    comparison, state = done(
        daemon,
        send(1, OFFER), reply(1, "declined", reason="no-space"),
        send(2, OBJECT), reply(2, "stored", length=0),
        send(1, TAKE), reply(1, "miss", reason="empty"),
        send(2, wire.TakeObject("n", "k")), reply(2, "miss", reason="empty"),
    )  # fmt: skip
    assert (state["puts"]["stored"], state["puts_in_flight"], state["leases"]) == (2, 0, 0)
    assert (comparison.longer_takes, state["objects"]["object_hits"]) == (1, 1)
    assert state["takes"]["tokens_reused"] == 399


def test_what_this_daemon_does_not_grant_is_left_out(daemon: DaemonProcess) -> None:
    """Commit, release, unpin and fetch of what was never given would end the session."""
    comparison, state = done(
        daemon,
        send(1, OFFER), reply(1, "grant", put=7),
        send(1, wire.Abandon(7)),
        send(1, TAKE), reply(1, "hit", lease=9, length=300, claim=None),
        send(1, wire.Release(9)), send(1, wire.Commit(99)), Effect(1), reply(1, "stored"),
        send(1, wire.Prefetch("n", PROMPT)), reply(1, "pinned", pin=10, length=300),
        send(1, wire.Unpin(10)), Gone(1),
    )  # fmt: skip
    assert (comparison.shorter_takes, comparison.left_out) == (1, 3)
    assert (state["puts"]["abandoned"], state["puts"]["stored"]) == (1, 0)
    assert state["claim_outcomes"]["dropped"] == 1, "the record's client claimed nothing"


def test_numbers_are_those_of_this_daemon(daemon: DaemonProcess) -> None:
    """Leases, pins and puts of the record are ended under the numbers that they have here."""
    comparison, state = done(
        daemon,
        send(1, OFFER), reply(1, "grant", put=70), send(1, wire.Commit(70, "boot-of-the-record")),
        Effect(1), reply(1, "stored", length=400),
        send(1, TAKE), reply(1, "hit", lease=71, length=399),
        send(2, wire.Prefetch("n", PROMPT)), reply(2, "pinned", pin=72, length=399),
        send(1, wire.Release(71)), send(2, wire.Unpin(72)),
        send(3, wire.Clear()), reply(3, "cleared"),
    )  # fmt: skip
    assert (comparison.equal_takes, comparison.left_out) == (1, 0)
    assert state["puts"]["stored"] == 1
    assert (state["ram_bytes"], state["ram_bytes_by_state"]["lingering"]) == (0, 0)


def test_a_client_that_ended_holds_nothing(daemon: DaemonProcess) -> None:
    """L1: what a client of the record held when it ended ends here as well, before what follows."""
    comparison, state = done(
        daemon,
        send(1, OFFER), reply(1, "grant", put=70), Gone(1),
        send(2, OFFER), reply(2, "grant", put=71),
        send(2, wire.Commit(71)), Effect(2), reply(2, "stored"),
    )  # fmt: skip
    assert comparison.requests == 3
    assert (state["puts"]["abandoned"], state["puts"]["stored"]) == (1, 1)


def test_the_disk_is_not_waited_for_in_vain(daemon: DaemonProcess) -> None:
    """A daemon that writes less than the record's, here nothing, has nothing to wait for."""
    _, state = done(daemon, Settle(5, 5), send(1, TAKE), reply(1, "miss", reason="empty"))
    assert state["takes"]["takes"] == 1


def test_a_request_that_waits_for_a_later_one_is_given_up(daemon: DaemonProcess) -> None:
    """Q3: a take that waits for a claim that only a later step ends must not stop the replay."""
    comparison, state = done(
        daemon,
        send(1, TAKE), reply(1, "miss", reason="empty", claim=5),
        send(2, wire.Take("n", PROMPT, wait=600.0)), reply(2, "hit", lease=6, length=399),
        send(2, TAKE), reply(2, "hit", lease=7, length=399),
        send(1, wire.DropClaim(5)),
    )  # fmt: skip
    assert (comparison.late, comparison.given_up) == (1, 1)
    assert (state["takes"]["takes"], state["takes"]["waits"]) == (3, 1)
    assert (comparison.equal_takes, comparison.shorter_takes) == (1, 1)

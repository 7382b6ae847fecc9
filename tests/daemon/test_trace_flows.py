"""Which request of which session a message belongs to."""

from prefixcached.daemon.trace.flows import MAX_REMEMBERED, Flows
from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec

IMAGE = "a" * 32
HEADER = inner.FileHeader(1, IMAGE, ImageKind.SEGMENT, "n", ImageSpec(ImageKind.SEGMENT, 0, 4))
ENTRY = inner.FileEntry(HEADER, "n/x", b"", 0, 1, 1)
TAKE = wire.Take("n", b"")
OFFER = wire.Offer("n", b"", b"")


def test_requests_of_a_session_are_counted() -> None:
    """The greeting is its own flow; each session counts for itself."""
    flows = Flows()
    assert flows.of_request(3, wire.Hello((1, 0))) == "3.0"
    assert [flows.of_request(3, TAKE) for _ in range(2)] == ["3.1", "3.2"]
    assert flows.of_request(4, TAKE) == "4.1"
    assert flows.of_outcome(inner.ClientGone(3)) == "3.end"


def test_what_names_a_number_belongs_to_whoever_got_it() -> None:
    """Commit and abandon follow their offer; fetch, release, unpin and dropping a claim as well."""
    flows = Flows()
    flows.replied("3.1", wire.Hit(lease=7, length=1, tier="ram", parts=(), claim=8))
    flows.replied("3.2", wire.Grant(put=9, base=0, images=()))
    flows.replied("3.3", wire.Pinned(pin=10, length=1))
    flows.replied("3.4", wire.Miss(reason="empty", claim=11))
    for request, flow in (
        (wire.Fetch(7, 16), "3.1"), (wire.Release(7), "3.1"), (wire.DropClaim(8), "3.1"),
        (wire.Fetch(9, 0), "3.2"), (wire.Commit(9), "3.2"), (wire.Abandon(9), "3.2"),
        (wire.Unpin(10), "3.3"), (wire.DropClaim(11), "3.4"),
    ):  # fmt: skip
        assert flows.of_request(3, request) == flow
        assert flows.of_outcome(inner.Call(3, request)) == flow
    assert flows.of_outcome(inner.Sealed(9)) == "3.2"


def test_a_number_of_another_session_is_a_request_of_its_own() -> None:
    """L1: ids belong to their session, and so do flows."""
    flows = Flows()
    flows.replied("3.1", wire.Grant(put=9, base=0, images=()))
    assert flows.of_request(33, wire.Commit(9)) == "33.1"


def test_what_becomes_of_an_image_belongs_to_its_put() -> None:
    """Written, deleted: in the flow that published it, whoever caused that."""
    flows = Flows()
    flows.current = "3.1"
    flows.new_image(IMAGE)
    flows.current = "4.4"
    assert flows.of_order(inner.WriteImage(HEADER, b"", b"")) == "3.1"
    assert flows.of_outcome(inner.Written(IMAGE)) == "3.1"
    assert flows.of_order(inner.CancelWrite(IMAGE)) == "3.1"
    assert flows.of_order(inner.DeleteFile(IMAGE, "x", 1)) == "3.1"
    assert flows.of_outcome(inner.Deleted(IMAGE, 1)) == "3.1"


def test_an_image_from_before_belongs_to_who_touches_it() -> None:
    """A file of an earlier run has no put here: its deletion belongs to who needed the room."""
    flows = Flows()
    flows.current = "4.4"
    assert flows.of_order(inner.DeleteFile(IMAGE, "x", 1)) == "4.4"
    flows.current = ""
    assert flows.of_outcome(inner.Deleted(IMAGE, 1)) == "4.4"


def test_orders_and_their_outcomes_belong_to_what_is_handled() -> None:
    """Reads, promotions, clears and syncs come back to the request that asked."""
    flows = Flows()
    flows.current = "5.2"
    for order in (
        inner.ReadImage(77, ENTRY), inner.PromoteImage(ENTRY), inner.TouchFile(ENTRY),
        inner.ClearNamespace("n", 1), inner.SyncAll(6), inner.CancelRead(77, IMAGE),
    ):  # fmt: skip
        assert flows.of_order(order) == "5.2"
    flows.current = "6.1"
    for outcome in (
        inner.ImageRead(77, IMAGE), inner.Promoted(IMAGE), inner.NamespaceCleared("n", 1),
        inner.Synced(6),
    ):  # fmt: skip
        assert flows.of_outcome(outcome) == "5.2"
    assert flows.of_outcome(inner.PressureChanged("warn")) == ""


def test_the_second_order_of_a_flush_belongs_to_it() -> None:
    """The drain is ordered while RamTier hears of somebody else's last image."""
    flows = Flows()
    flows.current = "5.2"
    flows.of_order(inner.SyncAll(6))
    flows.current = "1.1"
    assert flows.of_order(inner.SyncAll(6, drain=True)) == "5.2"
    assert flows.of_outcome(inner.Synced(6)) == "5.2"


def test_the_maps_are_bounded() -> None:
    """A daemon that runs for months remembers the newest."""
    flows = Flows()
    for number in range(1, MAX_REMEMBERED + 2):
        flows.replied("1.500", wire.Pinned(pin=number, length=1))
    assert flows.of_request(1, wire.Unpin(1)) == "1.1"
    assert flows.of_request(1, wire.Unpin(2)) == "1.500"

"""What no file can hold is declined, or stays in RAM; it never ends the daemon (P1, C3)."""

import pytest

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor
from prefixcached.protocol.schema import Kind, Schema, TensorSpec
from tests.support.core import Core, small_config
from tests.support.core_disk import FakeDisk
from tests.support.core_prompts import offer, tokens


def core_with_disk() -> tuple[Core, FakeDisk]:
    """Both tiers, writes at once."""
    core = Core(small_config(ssd_bytes=1 << 30, write_delay_seconds=0.0))
    return core, FakeDisk(core)


def put_object(core: Core, spec: ImageSpec) -> wire.Reply:
    """Offer an object and commit it."""
    reply = core.reply(1, wire.OfferObject("o", "k", spec))
    if isinstance(reply, wire.Grant):
        reply = core.reply(1, wire.Commit(reply.put))
    assert isinstance(reply, wire.Reply)
    return reply


@pytest.mark.parametrize("name", ["__metadata__", "prefixcached.tokens"])
def test_a_reserved_tensor_name_is_declined(name: str) -> None:
    """P1: names that the file format reserves are refused before anything is reserved."""
    core, _ = core_with_disk()
    tensor = StateTensor(name, "U8", (4,))
    declined = wire.Declined(reason="invalid")
    assert put_object(core, ImageSpec(ImageKind.OBJECT, tensors=(tensor,))) == declined
    schema = Schema((TensorSpec(name, Kind.APPEND, "U8", (4,), 0),))
    assert offer(core, tokens(20), schema=schema) == declined
    assert core.index.ram.bytes == 0


def test_an_image_that_no_header_can_describe_stays_in_ram() -> None:
    """C3: more and longer names than a file's header may have refuse that write alone."""
    core, disk = core_with_disk()
    names = (StateTensor("\0" * 250 + str(n), "U8", (4,)) for n in range(8192))
    stored = put_object(core, ImageSpec(ImageKind.OBJECT, tensors=tuple(names)))
    assert isinstance(stored, wire.Stored)
    core.advance(1.0)
    disk.settle()
    assert (core.writes.written, core.writes.refused) == (0, 1)
    assert isinstance(core.reply(1, wire.TakeObject("o", "k")), wire.Hit)

"""The option to write only what was hit twice (rule D6)."""

import pytest

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import Core, small_config
from tests.support.core_disk import FakeDisk
from tests.support.core_prompts import put, take, tokens


def test_only_what_was_hit_twice_is_written() -> None:
    """D6: with `second-hit` a put writes nothing; its second hit does, its whole chain."""
    core = Core(small_config(ssd_bytes=1 << 30, write_policy="second-hit", write_delay_seconds=0.0))
    disk = FakeDisk(core)
    put(core, tokens(40))
    put(core, tokens(80))
    for expected in (0, 2):
        assert take(core, tokens(81)).length == 80
        core.advance(1.0)
        disk.settle()
        assert core.writes.written == expected


@pytest.mark.parametrize("how", ["object", "prefetch"])
def test_a_hit_is_a_hit_however_it_is_asked_for(how: str) -> None:
    """D6, O1, F1: objects that are taken and prompts that are prefetched twice are written too."""
    core = Core(small_config(ssd_bytes=1 << 30, write_policy="second-hit", write_delay_seconds=0.0))
    disk = FakeDisk(core)
    if how == "object":
        grant = core.reply(1, wire.OfferObject("n", "key", ImageSpec(ImageKind.OBJECT)))
        core.reply(1, wire.Commit(grant.put))
    else:
        put(core, tokens(40))
    for expected in (0, 1):
        if how == "object":
            assert isinstance(core.reply(1, wire.TakeObject("n", "key")), wire.Hit)
        else:
            assert core.reply(1, wire.Prefetch("n", pack_tokens(tokens(41)))).length == 40
        core.advance(1.0)
        disk.settle()
        assert core.writes.written == expected


def test_what_files_hang_on_is_written_whatever_its_hits() -> None:
    """D6, P8: a file that was lost under others is written again, or they would go with it."""
    core = Core(small_config(ssd_bytes=1 << 30, write_policy="second-hit", write_delay_seconds=0.0))
    disk = FakeDisk(core)
    put(core, tokens(40))
    put(core, tokens(80), minimum=1)
    for _ in range(2):
        take(core, tokens(81))
    disk.settle()
    assert len(disk.files) == 2
    top = next(e for e in core.index.entries.values() if e.spec.start == 0)
    assert top.file is not None
    top.uses = 0  # as after a restart
    disk.lose(top.file.path)
    core.index.lose_file(top)
    core.call(1, wire.CloseLabel("none"))
    disk.settle()
    assert len(disk.files) == 2
    assert top.file is not None

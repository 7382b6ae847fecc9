"""The option to write only what was hit twice (rule D6)."""

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

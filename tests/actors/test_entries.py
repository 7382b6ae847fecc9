"""The index's entries: how they show themselves to whoever looks for a fault."""

import random

from tests.support.core import Core, small_config
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk


def shown(core: Core) -> str:
    """The one entry of ``core``, as an assertion or a debugger prints it."""
    (entry,) = core.index.entries.values()
    return repr(entry).replace(entry.id[:8], "ID").replace(entry.id, "the whole id")


def test_an_entry_shows_what_it_is_and_which_tiers_hold_it() -> None:
    """A failed assertion about an entry says which one, its tokens, and where its bytes are."""
    core = Core(small_config(ssd_bytes=1 << 20))
    disk = FakeDisk(core)
    Client(core).store(sequence(20))
    assert shown(core) == "<Segment ID 0..20 ram>"
    core.advance(60.0)
    disk.settle()
    assert shown(core) == "<Segment ID 0..20 ram ssd>"
    restarted = Core(small_config(ssd_bytes=1 << 20), is_loaded=False)
    disk.restart(restarted, random.Random(0))
    assert shown(restarted) == "<Segment ID 0..20  ssd>"

"""Publishing a committed put: what is attached, and what that says of what is there (E11)."""

from prefixcached.actors.checkpoint_policy import KEPT_PER_CHAIN
from prefixcached.actors.entries import Checkpoint
from tests.support.core import Core
from tests.support.core_client import Client, sequence


def test_a_new_snapshot_marks_the_oldest_of_its_chain() -> None:
    """E11: the newest four of a chain are worth keeping; one more makes a surplus of the first."""
    core = Core()
    lengths = [10 * turn for turn in range(1, KEPT_PER_CHAIN + 2)]
    for length in lengths:
        Client(core).store(sequence(lengths[-1])[:length], "hybrid/a", state=True)
    snapshots = {e.position: e for e in core.index.entries.values() if isinstance(e, Checkpoint)}
    assert [at for at, snapshot in sorted(snapshots.items()) if snapshot.is_surplus] == [10]

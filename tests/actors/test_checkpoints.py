"""E11: which snapshots are stored, and which leave first."""

from prefixcached.actors.checkpoint_policy import KEPT_PER_CHAIN
from prefixcached.actors.entries import Checkpoint
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core
from tests.support.core_client import Client, sequence

TURN = 10
TURNS = KEPT_PER_CHAIN + 2
TALK = sequence(TURN * TURNS)


def snapshots(core: Core) -> list[int]:
    """The positions of the snapshots held."""
    return sorted(
        checkpoint.position
        for entry in core.index.entries.values()
        for checkpoint in getattr(entry, "checkpoints", {}).values()
    )


def conversation(pages: int) -> tuple[Core, Client]:
    """One of TURNS turns, each an image for its tokens and one for its snapshot."""
    core = Core(small_config(ram_bytes=pages * PAGE))
    client = Client(core)
    for turn in range(1, TURNS + 1):
        client.store(TALK[: turn * TURN], "hybrid/a", state=True)
    return core, client


def test_snapshots_that_their_conversation_has_passed_leave_before_any_segment() -> None:
    """E11: the newest few of a chain are kept; older ones go before segments, however old those."""
    core, client = conversation(2 * TURNS + 1)
    others = [sequence(20, salt) for salt in (1, 2, 3)]
    for tokens in others:
        client.store(tokens)
    assert snapshots(core) == [turn * TURN for turn in range(3, TURNS + 1)]
    assert client.peek((*TALK, 1), "hybrid/a") == len(TALK)
    assert all(client.contains(tokens) for tokens in others)
    check_core(core)


def test_the_newest_four_of_a_chain_are_kept() -> None:
    """E11: two turns, with one at the end of the prompt and one at the end of the answer."""
    core, _ = conversation(4 * TURNS)
    assert snapshots(core) == [turn * TURN for turn in range(1, TURNS + 1)]
    kept = [one for one in core.index.entries.values() if isinstance(one, Checkpoint)]
    assert sum(not one.is_surplus for one in kept) == 4


def test_a_segment_outlives_the_old_snapshots_of_a_conversation_that_came_after_it() -> None:
    """E11: old snapshots go before a segment that nobody used since, but the newest few do not."""
    core = Core(small_config(ram_bytes=(2 * TURNS + 1) * PAGE))
    client = Client(core)
    before = sequence(20, 1)
    client.store(before)
    for turn in range(1, TURNS + 1):
        client.store(TALK[: turn * TURN], "hybrid/a", state=True)
    for salt, oldest in ((2, 2), (3, 3)):
        client.store(sequence(20, salt))
        assert snapshots(core)[0] == oldest * TURN
        assert client.contains(before)
    client.store(sequence(20, 4))
    assert snapshots(core)[0] == 3 * TURN
    assert not client.contains(before)
    check_core(core)


def test_once_the_old_ones_are_gone_the_policy_decides() -> None:
    """E11: the newest few have no privilege over what was used more recently."""
    core, client = conversation(2 * TURNS)
    for salt in (1, 2, 3):
        client.store(sequence(20, salt))
    assert snapshots(core) == [turn * TURN for turn in range(4, TURNS + 1)]
    assert client.contains(sequence(20, 1))


def test_a_snapshot_that_was_hit_is_kept_as_long_as_segments_are() -> None:
    """E11: a shared system prompt's snapshot stays, however far its conversations have gone."""
    core, client = conversation(2 * TURNS)
    assert client.reuse((*TALK[:TURN], 1, 2), "hybrid/a") == TURN
    client.store(sequence(20, 1))
    assert snapshots(core) == [TURN, *(turn * TURN for turn in range(3, TURNS + 1))]


def test_a_branch_of_its_own_brings_an_old_snapshot_back_into_the_newest_few() -> None:
    """E11: the count is per chain, and the chain that grew last decides."""
    core, client = conversation(2 * TURNS + 2)
    branch = (*TALK[: 2 * TURN], *sequence(TURN, 9))
    client.store(branch, "hybrid/a", state=True)
    client.store(sequence(20, 1))
    assert 2 * TURN in snapshots(core)
    assert client.contains(branch, "hybrid/a")


def test_a_snapshot_close_behind_another_is_not_stored() -> None:
    """E11: it would weigh as much as thousands of tokens and save less than a few dozen."""
    core = Core(small_config(checkpoint_min_tokens=8))
    client = Client(core)
    client.store(TALK[:20], "hybrid/a", state=True)
    client.store(TALK[:27], "hybrid/a", state=True)
    assert snapshots(core) == [20]
    assert core.puts.counters.snapshots_left_out == 1
    assert client.reuse((*TALK[:27], 1), "hybrid/a") == 20
    client.store(TALK[:28], "hybrid/a", state=True)
    assert snapshots(core) == [20, 28]
    check_core(core)


def test_the_first_snapshot_of_a_short_prompt_is_stored() -> None:
    """E11: the beginning is no position that can be resumed, however near it is."""
    core = Core(small_config(checkpoint_min_tokens=8))
    client = Client(core)
    client.store(TALK[:5], "hybrid/a", state=True)
    assert snapshots(core) == [5]
    assert client.reuse((*TALK[:5], 1), "hybrid/a") == 5


def test_storing_only_a_snapshot_that_is_left_out_moves_no_bytes() -> None:
    """E11, P3: with its tokens held already there is nothing to grant."""
    core = Core(small_config(checkpoint_min_tokens=8))
    client = Client(core)
    client.store(TALK[:20], "hybrid/a", state=True)
    client.store(TALK[:27], "hybrid/a", state=True)
    assert client.store(TALK[:27], "hybrid/a", state=True) == 0
    assert core.puts.counters.snapshots_left_out == 2


def test_an_attachment_is_stored_wherever_it_stands() -> None:
    """E11, A1: what a caller attached cannot be computed from the tokens."""
    core = Core(small_config(checkpoint_min_tokens=8))
    client = Client(core)
    client.store(TALK[:20], "hybrid/a", state=True)
    client.store(TALK[:22], "hybrid/a", attachments=b"{}")
    assert snapshots(core) == [20, 22]


def test_a_snapshot_that_nobody_can_use_does_not_count_as_close() -> None:
    """E11, T6: below a minimum reusable length there is nothing to fall back to."""
    core = Core(small_config(checkpoint_min_tokens=8))
    client = Client(core)
    client.store(TALK[:20], "hybrid/a", state=True, minimum=24)
    client.store(TALK[:26], "hybrid/a", state=True, minimum=24)
    assert snapshots(core) == [20, 26]


def test_one_token_behind_a_snapshot_is_close_too() -> None:
    """E11: nearness is counted from the last token that a resumption there would leave."""
    core = Core(small_config(checkpoint_min_tokens=2))
    client = Client(core)
    client.store(TALK[:19], "hybrid/a", state=True)
    client.store(TALK[:20], "hybrid/a", state=True)
    assert snapshots(core) == [19]
    client.store(TALK[:21], "hybrid/a", state=True)
    assert snapshots(core) == [19, 21]

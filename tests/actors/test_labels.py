"""Labels on the core: rules S1 to S4, and P3, D11, E2 where they concern a label."""

from typing import Any

from prefixcached.protocol import messages as wire
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import PAGE, Core, small_config
from tests.support.core_checks import check_core
from tests.support.core_client import Client, sequence
from tests.support.core_disk import FakeDisk
from tests.support.core_payload import Tokens

TALK = sequence(12)


def small_ram(pages: int, **changes: Any) -> Core:
    """A core that holds so many small images, least used out first."""
    return Core(small_config(**{"ram_bytes": pages * PAGE, "retention": "lru", **changes}))


def prefetch(core: Core, tokens: Tokens, label: str) -> None:
    core.call(1, wire.Prefetch("plain/a", pack_tokens(tokens), label))


def fill_up(client: Client, count: int, first: int = 50) -> None:
    """Store so many other prompts."""
    for salt in range(first, first + count):
        client.store(sequence(12, salt))


def counters(core: Core) -> tuple[int, int]:
    found = core.statistics().label_takes
    return found["label_hits"], found["label_misses"]


# -- S1: affinity, never the answer --------------------------------------------------------------


def test_a_label_never_changes_which_prefix_is_returned() -> None:
    """S1: T1 decides; a label on a shorter, longer or other entry does not."""
    core = Core()
    client = Client(core)
    client.store(TALK, label="talk")
    client.store(sequence(12, 1), label="other")
    longer = (*TALK, 1, 2, 3)
    client.store(longer)
    for label in ("talk", "other", "unknown", None):
        slot = client.ask((*longer, 9), label=label)
        assert client.verify(slot, (*longer, 9)).length == len(longer)


def test_a_label_marks_what_was_put_taken_or_prefetched_last() -> None:
    """S1: each of the three moves the mark, in its own namespace."""
    core = small_ram(2)
    client = Client(core)
    one, two = TALK, sequence(12, 1)
    client.store(one, label="talk")
    client.store(two)
    fill_up(client, 1)
    assert (client.peek((*one, 1)), client.peek((*two, 1))) == (12, 0)
    client.store(two)
    client.release(client.verify(client.ask((*two, 1), label="talk"), (*two, 1)))
    fill_up(client, 1, first=60)
    assert (client.peek((*one, 1)), client.peek((*two, 1))) == (0, 12)
    client.store(one)
    prefetch(core, (*one, 1), "talk")
    core.gone(1)
    fill_up(client, 1, first=70)
    assert (client.peek((*one, 1)), client.peek((*two, 1))) == (12, 0)
    assert core.statistics().labels == 1


# -- S2: counted ---------------------------------------------------------------------------------


def test_a_take_at_or_beyond_the_labels_entry_is_a_label_hit() -> None:
    """S2: at or beyond what the conversation left is a hit, anything shorter is a miss."""
    core = Core()
    client = Client(core)
    client.ask(TALK, label="talk")
    assert counters(core) == (0, 0)
    client.store(TALK, label="talk")
    client.ask((*TALK, 1), label="talk")
    assert counters(core) == (1, 0)
    client.store((*TALK, 1, 2), label="other")
    client.ask((*TALK, 1, 2, 3), label="talk")
    assert counters(core) == (2, 0)
    client.ask((*TALK, 7), label="talk")
    assert counters(core) == (2, 1)
    client.ask(sequence(12, 9), label="talk")
    assert counters(core) == (2, 2)
    client.ask(TALK, "plain/b", label="talk")
    assert counters(core) == (2, 2)


def test_an_evicted_entry_is_a_label_miss() -> None:
    """S2: a label remembers how long its entry was, also when it is gone."""
    core = small_ram(1)
    client = Client(core)
    client.store(TALK, label="talk")
    fill_up(client, 1)
    client.ask((*TALK, 1), label="talk")
    assert counters(core) == (0, 1)


# -- S3: evicted last ----------------------------------------------------------------------------


def test_labelled_entries_are_evicted_last() -> None:
    """S3, E2: unlabelled entries go first, however recently they were used."""
    core = small_ram(4)
    client = Client(core)
    client.store(TALK, label="talk")
    fill_up(client, 20)
    assert client.contains(TALK)
    other = [sequence(12, salt) for salt in range(80, 84)]
    for salt, tokens in enumerate(other):
        client.store(tokens, label=f"label {salt}")
    assert not client.contains(TALK)
    assert all(client.contains(tokens) for tokens in other)
    check_core(core)


def test_the_path_below_a_label_stays_with_it() -> None:
    """S3, E2: leaves go before their ancestors, so a labelled leaf keeps its whole path."""
    core = small_ram(4, segment_min_tokens=1)
    client = Client(core)
    client.store(TALK)
    client.store((*TALK, 1, 2))
    client.store((*TALK, 1, 2, 3, 4), label="talk")
    fill_up(client, 10)
    assert client.contains((*TALK, 1, 2, 3, 4))


def test_a_label_keeps_the_snapshot_that_its_conversation_resumes_at() -> None:
    """S3: for a hybrid model it is the checkpoint that must stay, not its segment alone."""
    core = small_ram(4)
    client = Client(core)
    client.store(TALK, "hybrid/a", state=True, label="talk")
    for salt in range(20, 30):
        client.store(sequence(12, salt), "hybrid/a", state=True)
    assert client.reuse((*TALK, 1), "hybrid/a") == len(TALK)
    slot = client.ask((*TALK, 1), "hybrid/a", label="again")
    client.release(client.verify(slot, (*TALK, 1), "hybrid/a"))
    core.reply(1, wire.CloseLabel("talk"))
    for salt in range(30, 40):
        client.store(sequence(12, salt), "hybrid/a", state=True)
    assert client.reuse((*TALK, 1), "hybrid/a") == len(TALK)


def test_a_label_follows_an_entry_that_absorbs_its_own() -> None:
    """S3, P11: the tail that takes its segment's place takes its labels."""
    core = small_ram(3)
    client = Client(core)
    client.store(TALK[:3], label="talk")
    client.store(TALK)
    assert core.index.counters["superseded"] == 1
    fill_up(client, 5)
    assert client.contains(TALK)


def test_a_label_follows_a_replaced_snapshot() -> None:
    """S3, P3: new attachments at the same position take over the old ones' labels."""
    core = small_ram(4)
    client = Client(core)
    client.store(TALK, attachments=b"1", label="talk")
    client.store(TALK, attachments=b"2")
    fill_up(client, 10)
    hit = client.hit((*TALK, 1))
    assert any(part.spec.metadata == b"2" for part in hit.parts)


def test_on_ssd_labelled_entries_are_evicted_last_too() -> None:
    """S3, E2: the mark counts in both tiers."""
    core = Core(small_config(ssd_bytes=8 * PAGE, ram_bytes=8 * PAGE, retention="lru"))
    disk = FakeDisk(core)
    client = Client(core)
    client.store(TALK, label="talk")
    for salt in range(50, 60):
        client.store(sequence(12, salt))
        core.advance(core.config.write_delay_seconds)
        disk.settle()
    assert core.index.counters["ssd_evictions"] > 0
    (entry,) = (e for e in core.index.entries.values() if e.is_labelled)
    assert entry.file is not None
    check_core(core)


# -- S4: their end -------------------------------------------------------------------------------


def test_closing_a_label_makes_its_entry_like_any_other() -> None:
    """S4: the affinity is dropped, in one namespace or in all; the entry stays."""
    core = small_ram(2)
    client = Client(core)
    client.store(TALK, label="talk")
    client.store(TALK, "plain/b", label="talk")
    assert core.reply(1, wire.CloseLabel("nothing")).labels == 0
    assert core.reply(1, wire.CloseLabel("talk", "plain/b")).labels == 1
    assert client.contains(TALK, "plain/b")
    fill_up(client, 1)
    assert (client.contains(TALK), client.contains(TALK, "plain/b")) == (True, False)
    client.store(TALK, "plain/b", label="talk")
    assert core.reply(1, wire.CloseLabel("talk")).labels == 2
    fill_up(client, 2, first=60)
    assert (client.contains(TALK), client.contains(TALK, "plain/b")) == (False, False)
    assert core.statistics().labels == 0


def test_a_label_that_nobody_uses_expires() -> None:
    """S4: after its time to live without use it marks nothing; each use begins it anew."""
    core = small_ram(2, label_ttl_seconds=100.0)
    client = Client(core)
    client.store(TALK, label="talk")
    core.advance(80)
    client.release(client.verify(client.ask((*TALK, 1), label="talk"), (*TALK, 1)))
    core.advance(80)
    assert core.statistics().labels == 1
    core.advance(60)
    assert core.statistics().labels == 0
    fill_up(client, 2)
    assert not client.contains(TALK)


def test_a_clear_drops_the_labels_of_its_namespace() -> None:
    """D11: what was cleared is marked by nothing and counted against nobody."""
    core = Core()
    client = Client(core)
    client.store(TALK, label="talk")
    client.store(TALK, "plain/b", label="talk")
    client.clear("plain/a")
    assert core.statistics().labels == 1
    client.ask((*TALK, 1), label="talk")
    assert counters(core) == (0, 0)
    client.clear()
    assert core.statistics().labels == 0


def test_a_declined_put_marks_nothing() -> None:
    """S1: only what was stored, taken or prefetched is marked."""
    core = Core()
    client = Client(core)
    core.memories_left = 0
    client.refusal(TALK, label="talk")
    assert core.statistics().labels == 0


def test_the_mark_is_at_the_end_of_what_was_used() -> None:
    """S1: of a path of several images the last one is marked, and with it all that it hangs on."""
    core = Core(small_config(segment_min_tokens=1))
    client = Client(core)
    client.store(TALK[:6])
    client.store(TALK)
    slot = client.ask((*TALK, 1), label="talk")
    client.release(client.verify(slot, (*TALK, 1)))
    marked = [entry for entry in core.index.entries.values() if entry.is_labelled]
    assert [(entry.spec.start, entry.spec.end) for entry in marked] == [(6, 12)]


def test_a_declined_put_moves_no_label() -> None:
    """S1, P10: a label marks what was stored, and a declined put loses nothing but the chance."""
    core = small_ram(2)
    client = Client(core)
    client.store(TALK)
    assert client.refusal((*TALK, *sequence(100, 1)), label="talk") == "too-large"
    assert core.statistics().labels == 0
    assert not [entry for entry in core.index.entries.values() if entry.is_labelled]


def test_a_label_expires_by_the_time_since_its_use() -> None:
    """S4: also where the clock has just begun, as that of a machine that has just started."""
    core = small_ram(2, label_ttl_seconds=100.0)
    core.clock = 10.0
    Client(core).store(TALK, label="talk")
    core.advance(200)
    assert core.statistics().labels == 0


def test_a_label_marks_nothing_that_has_left_meanwhile() -> None:
    """S1: a put that waited beside this one evicted it before its label was set."""
    core = Core(small_config(ram_bytes=2 * PAGE, segment_min_tokens=1), auto_seal=False)
    client, other = Client(core), Client(core, session=2)
    twin, leaf = sequence(20), sequence(20, 1)
    grant = client.grant(twin)
    other.grant(leaf)
    labelled = Client(core, session=3).offer(twin, label="talk")
    Client(core, session=4).offer((*leaf[:18], 7, 8))
    core.call(1, wire.Commit(grant.put))
    core.clock += 2.5
    core.finish_seal()
    assert isinstance(labelled.reply, wire.Stored)
    assert all(label.entry is None or label.entry.attached for label in core.labels.labels.values())

"""RamTier: the one owner of what exists in either tier. A thin actor around synchronous desks.

It receives envelopes, lets the desks decide, and carries out what they order: workers seal and free
memory, SsdTier and Prefetcher get messages on channels that never block (their bytes are charged
already). It never awaits another actor, so no cycle of blocking sends can exist (DESIGN 4).
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count
from typing import Any, Final, assert_never, cast

import msgspec
import structlog
import trio

from prefixcached.actors import memory
from prefixcached.actors.claims import ClaimDesk
from prefixcached.actors.desk import Answer, RamConfig, Shared
from prefixcached.actors.entries import Entry, Memory
from prefixcached.actors.eviction import Eviction
from prefixcached.actors.holdings import Holdings, collect_holdings
from prefixcached.actors.index import Index
from prefixcached.actors.inspection import InspectionDesk
from prefixcached.actors.labels import LabelDesk
from prefixcached.actors.loading import LoadDesk
from prefixcached.actors.mailbox import DirectMailbox, Mailbox, Outbox
from prefixcached.actors.objects import ObjectDesk
from prefixcached.actors.pins import PinDesk
from prefixcached.actors.pressure_policy import Level
from prefixcached.actors.pressure_response import PressureDesk
from prefixcached.actors.promotions import PromotionDesk
from prefixcached.actors.puts import FinishedPut, PutDesk
from prefixcached.actors.ram_samples import sample
from prefixcached.actors.ram_statistics import RamStatistics, collect
from prefixcached.actors.reads import OpenFile, ReadDesk
from prefixcached.actors.retention_policy import policy_named
from prefixcached.actors.takes import TakeDesk
from prefixcached.actors.write_behind import WriteDesk
from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import ActorMessage, Envelope, FileEntry

log = structlog.get_logger()

SMALL_BYTES: Final = 1 << 20
"""Memory up to this size is freed at once: it takes less time than a thread's round trip."""

SWEEP_SECONDS: Final = 10.0
"""How often idle images are looked for (rule E8)."""


def random_id() -> str:
    """Return a new image id: 32 hex digits."""
    return secrets.token_hex(16)


class RamTier:
    """The actor. Send `Envelope`s to `mailbox`; run it with ``nursery.start(ram_tier.run)``."""

    def __init__(
        self, config: RamConfig, *, create_memory: Callable[[int], Memory] = memory.create,
        mailbox: Mailbox | None = None, new_id: Callable[[], str] = random_id,
    ) -> None:  # fmt: skip
        self.boot = secrets.token_hex(8)
        self.config = config
        if mailbox is None:
            direct = DirectMailbox(self._turn)
            mailbox = Mailbox(direct, direct)
        self.mailbox, self._inbox = mailbox
        self._ssd: Outbox | None = None
        self._prefetcher: Outbox | None = None
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._failure: Exception | None = None
        self._threads = trio.CapacityLimiter(4)
        self.index = Index(
            self, policy_named(config.retention),
            ram_bytes=config.ram_bytes, max_images=config.max_images, ssd_bytes=config.ssd_bytes,
            namespace_quota=config.namespace_quota,
        )  # fmt: skip
        self.eviction = Eviction(self.index)
        shared = Shared(
            config, self.index, self.eviction, self, self.boot, create_memory, new_id, count(1),
        )  # fmt: skip
        self.reads = ReadDesk(shared)
        self.promotions = PromotionDesk(shared, self.reads)
        self.claims = ClaimDesk(config.claim_min_tokens)
        self.labels = LabelDesk(self.index, config.label_ttl_seconds)
        self.takes = TakeDesk(shared, self.reads, self.promotions, self.claims, self.labels)
        self.pins = PinDesk(shared, self.takes, self.reads, self.promotions, self.labels)
        self.puts = PutDesk(shared)
        self.objects = ObjectDesk(shared, self.takes, self.reads, self.promotions)
        self.writes = WriteDesk(shared)
        self.loads = LoadDesk(shared)
        self.inspection = InspectionDesk(self.index, self.takes)
        self.pressure = PressureDesk(shared, self.writes, self.promotions, self.pins)
        self._loading = config.ssd_bytes > 0
        self.loaded = trio.Event()
        """Set once the index of the files is complete."""
        self._epoch = 0
        self._clears: dict[int, tuple[Answer, wire.Cleared]] = {}
        self._next_sweep = 0.0
        self._drained: trio.Event | None = None
        self.statistics_sources: dict[str, Callable[[], Any]] = {"ram_tier": self.statistics}
        """Merged into the reply to `Status`; the application adds the other actors."""
        self.observers: list[Callable[[str, bytes, int], None]] = []
        """Called with namespace, packed tokens and length after a publication (rule P9)."""

    # -- the loop -------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, or until `drain` has been called and everything is written."""
        # Whoever still reports something goes on: a stop waits for no room in this mailbox.
        with closing(self._inbox):
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._set_loading(self._loading)
                if self._loading:
                    self.ssd(inner.ScanDirectory())
                task_status.started()
                while True:
                    # One scope for many messages: a new one for each costs as much as a look-up.
                    with trio.CancelScope() as self._scope:
                        self._scope.deadline = self._next_deadline()
                        while True:
                            self._turn(await self._inbox.receive())
                    if self._failure is not None:
                        raise self._failure
                    self._after(trio.current_time())

    def _turn(self, envelope: Envelope) -> None:
        """Handle one envelope, and what became possible by it; in RamTier's task or a caller's."""
        if self._failure is not None:
            return  # until its own task ends it, nobody may see what is half changed
        try:
            now = trio.current_time()
            self._handle(envelope.message, envelope.handle, now)
            # A question changes nothing, so nothing has become possible.
            if not _is_question(envelope.message) or now >= self._scope.deadline:
                self._after(now)
                deadline = self._next_deadline()
                if deadline != self._scope.deadline:  # trio takes as long to set the same one again
                    self._scope.deadline = deadline
        except Exception as error:  # noqa: BLE001, `run` raises it
            # It is RamTier that fails, in whatever task this was: what it owns may be half changed.
            self._failure = error
            self._scope.cancel()

    async def drain(self) -> None:
        """Write what is queued now, without its delay; return when that is done (DESIGN 4)."""
        self.writes.is_draining = True
        self._drained = trio.Event()
        await self.mailbox.send(Envelope(inner.SyncAll()))
        await self._drained.wait()

    def _handle(self, message: ActorMessage, handle: Any, now: float) -> None:
        match message:
            case inner.Call(session=session, request=request):
                self._call(session, request, cast(Answer, handle), now)
            case inner.ClientGone(session=session):
                for desk in (
                    self.takes, self.pins, self.puts, self.reads, self.writes, self.claims,
                ):  # fmt: skip
                    desk.client_gone(session)
            case inner.Sealed(put=put, error=error):
                self.puts.sealed(put, error, now)
            case inner.Freed(allocated_bytes=nbytes, images=images):
                self.index.freed(nbytes, images)
            case inner.ImageRead():
                self.reads.image_read(message, cast("OpenFile | None", handle), now)
            case inner.Promoted():
                self.promotions.finished(message, now)
            case inner.Written():
                self.writes.finished(message, now)
            case inner.Deleted(id=file_id, allocated_bytes=nbytes, error=error):
                self.index.deleted(file_id, nbytes, error)
            case inner.Loaded():
                self.loads.loaded_batch(message, time.time())
                if message.done:
                    self._set_loading(False)
            case inner.DiskChanged(healthy=healthy, reason=reason, other_bytes=other):
                self.index.set_other_bytes(other, message.dropped_bytes)
                if message.dropped_bytes is not None:  # what is still over the cap entries give
                    self.eviction.make_room_on_disk(0)
                self.writes.disk_changed(healthy=healthy, reason=reason, now=now)
            case inner.Synced(sync=sync, error=error):
                self.writes.synced(sync, error, now)
            case inner.FilesLost():
                log.warning("files-lost", images=self.index.lose_all_files())
                self.writes.files_lost()
            case inner.TrashEmptied(allocated_bytes=nbytes, done=done, error=error):
                self.index.departures.trash_emptied(nbytes, done=done, is_stuck=bool(error))
            case inner.NamespaceCleared(epoch=epoch, error=error):
                if not error:  # else SsdTier tries again, and tells when it is done
                    self.index.departures.namespace_cleared()
                self._answer_clear(epoch, is_durable=not error)
            case inner.PressureChanged(level=level, reason=reason):
                self.pressure.changed(Level(level), reason, now)
            case inner.RamCapChanged(ram_bytes=ram_bytes):
                self.set_ram_cap(ram_bytes, now)
            case inner.SyncAll():
                pass  # it only wakes the loop up
            case _:
                raise TypeError(f"RamTier does not understand {message!r}")

    def _call(self, session: int, request: wire.AnyRequest, answer: Answer, now: float) -> None:
        match request:
            case wire.Take():
                self.takes.take(session, request, answer, now)
            case wire.Fetch(of=owner, first=first, boot=boot):
                self._fetch(session, owner, first, boot, answer)
            case wire.Release(lease=lease, boot=boot):
                self.takes.release(session, lease, boot)
            case wire.Peek(namespace=namespace, tokens=tokens):
                answer.set(wire.Length(length=self.takes.peek(namespace, tokens)))
            case wire.Contains(namespace=namespace, tokens=tokens):
                answer.set(wire.Length(length=self.takes.contains(namespace, tokens)))
            case wire.DropClaim(claim=claim):
                self.claims.drop(session, claim)
            case wire.CloseLabel(label=label, namespace=namespace):
                answer.set(wire.LabelClosed(labels=self.labels.close(label, namespace)))
            case wire.TakeObject():
                self.objects.take(session, request, answer, now)
            case wire.Offer() | wire.OfferObject():
                self.puts.offer(session, request, answer, now)
            case wire.Commit():
                self.puts.commit(session, request, answer)
            case wire.Abandon(put=put, boot=boot):
                self.puts.abandon(session, put, boot)
            case wire.Prefetch():
                self.pins.prefetch(session, request, answer, now)
            case wire.Unpin(pin=pin, boot=boot):
                self.pins.unpin(session, pin, boot)
            case wire.Flush():
                self.writes.flush(session, request, answer, now)
            case wire.Clear(namespace=namespace):
                self._clear(namespace, answer)
            case wire.Status():
                report = {name: source() for name, source in self.statistics_sources.items()}
                answer.set(wire.StatusReport(report=report))
            case wire.List():
                answer.set(self.inspection.list(request, now))
            case wire.Explain():
                answer.set(self.inspection.explain(request))
            case wire.Hello():
                answer.set(wire.Failed(reason="protocol", detail="Hello was answered before"))
            case wire.Activity() | wire.Latency() | wire.History():
                answer.set(wire.Failed(reason="protocol", detail="the session answers this"))
            case _:
                assert_never(request)

    def _after(self, now: float) -> None:
        """What may have become possible by what was just handled, or by time passing."""
        # What was published is queued before anybody gets room: what is not queued may be evicted.
        finished = self._puts_finished(now)
        lost, self.index.lost = self.index.lost, []
        used, self.takes.used = self.takes.used, []
        self.writes.enqueue([entry for entry in (*lost, *used) if entry.attached], now)
        self.pressure.respond(now)
        self.writes.pump(now)
        self.puts.retry(now)
        self.promotions.is_room_wanted = self.puts.is_room_wanted
        self.promotions.retry(now)
        finished |= self._puts_finished(now)
        if finished or self.claims.changed or self._is_due(self.takes.next_deadline, now):
            self.takes.retry(now)
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self.index.departures.forget_kept(now)
            self.eviction.demote_idle(now - self.config.idle_seconds)
            self.labels.expire(now)
        if self._drained is not None and self.writes.is_idle and not self.puts.puts:
            self._drained.set()

    def _next_deadline(self) -> float:
        least = self._next_sweep
        for deadline in (
            self.puts.next_deadline, self.takes.next_deadline, self.writes.next_deadline,
            self.pressure.next_deadline,
        ):  # fmt: skip
            if deadline is not None and deadline < least:
                least = deadline
        return least

    @staticmethod
    def _is_due(deadline: float | None, now: float) -> bool:
        return deadline is not None and deadline <= now

    def _puts_finished(self, now: float) -> bool:
        finished, self.puts.finished = self.puts.finished, []
        for put in finished:
            self._put_finished(put, now)
        return bool(finished)

    def _put_finished(self, put: FinishedPut, now: float) -> None:
        """A put was published or an offer declined: whoever waited for it, and the writer, hear."""
        if not put.is_stored:
            self.takes.put_declined(put.namespace, put.tokens, now)
            return
        self.claims.published(put.namespace, put.tokens)
        self.labels.mark(put.namespace, put.label, put.last, int(put.tokens.size), now)
        self.writes.enqueue(put.published, now)
        for observe in self.observers:
            try:
                observe(put.namespace, put.tokens.tobytes(), int(put.tokens.size))
            except Exception:
                log.exception("an observer failed", observer=repr(observe))

    # -- requests that concern no desk alone ------------------------------------------------------

    def _fetch(self, session: int, owner: int, first: int, boot: str, answer: Answer) -> None:
        found = self.takes.descriptors(session, owner, first, boot)
        if found is None:
            found = self.puts.descriptors(session, owner, first, boot)
        if not found:
            answer.set(wire.Failed(reason="protocol", detail=f"nothing to fetch from {owner}"))
            return
        answer.set(wire.Descriptors(first=first, count=len(found)), found)

    def _clear(self, name: str | None, answer: Answer) -> None:
        """Forget a namespace at once; the answer follows the rename that makes it last (D11)."""
        chosen = [n for n in self.index.namespaces.values() if name is None or n.name == name]
        images = ram_bytes = 0
        self.claims.clear(name)
        self.labels.clear(name)
        if self.config.ssd_bytes:
            self.index.expect_trash(name)
        for namespace in chosen:
            gone = self.index.clear(namespace)
            images, ram_bytes = images + gone[0], ram_bytes + gone[1]
        self._epoch += 1
        if self.config.ssd_bytes:
            if not self.loads.is_complete:
                self.loads.clear(name)
            self.ssd(inner.ClearNamespace(name, self._epoch))
        self._clears[self._epoch] = answer, wire.Cleared(images=images, ram_bytes=ram_bytes)
        if not self.config.ssd_bytes:
            self._answer_clear(self._epoch, is_durable=True)

    def _answer_clear(self, epoch: int, *, is_durable: bool) -> None:
        answer, reply = self._clears.pop(epoch, (None, None))
        if answer is not None and reply is not None:
            answer.set(msgspec.structs.replace(reply, durable=is_durable))

    def _set_loading(self, loading: bool) -> None:
        self._loading = loading
        self.takes.is_loading = loading
        self.puts.is_loading = loading
        if not loading:
            self.loaded.set()

    def connect(self, *, ssd: Outbox, prefetcher: Outbox) -> None:
        """Say where orders go, before `run`; both channels must be unbounded (DESIGN 4)."""
        self._ssd, self._prefetcher = ssd, prefetcher

    def set_ram_cap(self, ram_bytes: int, now: float) -> None:
        """Let the RAM cap be ``ram_bytes`` from now on; what no longer fits goes (rule M5)."""
        self.pressure.cap_changed(ram_bytes, now)

    def statistics(self) -> RamStatistics:
        """A frozen copy of all counters (rule C5)."""
        return collect(self)

    def sample(self) -> list[float]:
        """Return the present row of the history, in the order of `ram_samples.COLUMNS`."""
        return sample(self)

    def holdings(self) -> Holdings:
        """A frozen copy of what connections hold; call it within the event loop."""
        return collect_holdings(self, trio.current_time())

    # -- orders of the desks: `desk.Orders` and `index.Outlet` ----------------------------------

    def ssd(self, message: ActorMessage, handle: Any = None) -> None:
        """Tell SsdTier."""
        if self._ssd is not None:
            self._ssd.send_nowait(Envelope(message, handle))

    def prefetcher(self, message: ActorMessage, handle: Any = None) -> None:
        """Tell Prefetcher."""
        if self._prefetcher is not None:
            self._prefetcher.send_nowait(Envelope(message, handle))

    def delete_file(self, message: inner.DeleteFile) -> None:
        """Have a file deleted."""
        self.ssd(message)

    def drop_others(self, wanted_bytes: int) -> None:
        """Have files deleted that are no entries."""
        self.ssd(inner.DropOthers(wanted_bytes))

    def touch_file(self, file: FileEntry) -> None:
        """Have a file's recency recorded."""
        self.prefetcher(inner.TouchFile(file))

    def seal(self, put: int, memories: Sequence[Memory]) -> None:
        """Seal a put's images in a thread."""
        self._start(self._seal, put, memories)

    def free(self, memory: Memory, charged_bytes: int) -> None:
        """Free memory: at once where it is small, in a thread where it takes time."""
        if charged_bytes <= SMALL_BYTES:
            memory.free()
            self.index.freed(charged_bytes, 1)
        else:
            self._start(self._free, memory, charged_bytes)

    async def _seal(self, put: int, memories: Sequence[Memory]) -> None:
        def seal_all() -> str:
            try:
                for image in memories:
                    image.seal()
            except OSError as error:
                return str(error)
            return ""

        error = await trio.to_thread.run_sync(seal_all, limiter=self._threads)
        await self.mailbox.send(Envelope(inner.Sealed(put, error)))

    async def _free(self, image: Memory, charged_bytes: int) -> None:
        await trio.to_thread.run_sync(image.free, limiter=self._threads)
        await self.mailbox.send(Envelope(inner.Freed(charged_bytes, 1)))

    def _start(self, function: Callable[..., Any], *arguments: Any) -> None:
        assert self._nursery is not None, "RamTier is not running"
        self._nursery.start_soon(function, *arguments)

    def close(self) -> None:
        """Free all memory; for use after `run` has ended."""
        for entry in list(self.index.entries.values()):
            _free_now(entry)
        for put in self.puts.puts.values():
            for image in put.images:
                image.memory.free()


def _is_question(message: ActorMessage) -> bool:
    return isinstance(message, inner.Call) and isinstance(
        message.request, wire.Peek | wire.Contains
    )


def _free_now(entry: Entry) -> None:
    image, entry.memory = entry.memory, None
    if image is not None:
        image.free()

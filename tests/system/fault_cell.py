"""One cell of the fault matrix: a real client stops at a step, a fault strikes, all is checked.

Whoever lives goes on. Then every value that anybody gets is checked, the daemon or its successor
serves, and once all is cleared everything is as it was before the cell.
"""

import contextlib
from enum import Enum
from typing import Any, Final, assert_never

from prefixcached.client import Cache
from prefixcached.client.errors import PrefixCachedError
from tests.support import derived_numpy
from tests.support.census import HOLDINGS, Census, take_census, thread_count, unfinished_files
from tests.support.daemon_process import DaemonProcess
from tests.support.disk_fault import failing_disk
from tests.support.numpy_kv import NumpyAdapter
from tests.support.stepping_client import HELD, LAST, NAMESPACE, NEW, Order, SteppingClient
from tests.support.until import until, wait_until_loaded
from tests.system.fault_steps import Step, Visible, put

OPTIONS: Final = ("--ram-bytes", "64MiB", "--ssd-bytes", "256MiB")

PATIENT_SECONDS: Final = 30.0
"""A client's timeout where nobody freezes the daemon: it never ends a call."""
BOUNDED_SECONDS: Final = 2.0
"""A client's timeout where the daemon is frozen."""
BOUNDED_WAIT_SECONDS: Final = 0.5
"""What a take waits for another's claim there, beyond the timeout."""
SLACK_SECONDS: Final = 10.0
"""For a machine that runs other tests as well."""
THREADS_MOST: Final = 12
"""More than all limiters of the daemon admit together, and its main thread."""
FALL_BACK: Final = frozenset({"no-daemon", "timeout", "protocol", "restore-failed", ""})
"""Why a call may fail when the daemon does. A status has no reason."""
DISK_PROMPT: Final = derived_numpy.tokens(300, seed=5)


class Fault(Enum):
    """The columns."""

    CLIENT_KILLED = "client killed"
    CLIENT_HUNG = "client stopped, then killed"
    DAEMON_KILLED = "daemon killed"
    DAEMON_FROZEN = "daemon stopped, then continued"
    DAEMON_HUNG = "daemon stopped, then killed"
    DISK = "disk fails"


def applies(step: Step, fault: Fault) -> str:
    """Return why a cell makes no sense, or nothing."""
    if fault is Fault.DISK and step.call == "status":
        return "no disk is asked"
    return ""


class Matrix:
    """One daemon, on which cells are run one after the other; a context manager."""

    def __init__(self) -> None:
        self._context = contextlib.ExitStack()

    def __enter__(self) -> "Matrix":
        self.daemon = self._context.enter_context(DaemonProcess(*OPTIONS))
        self.cache = self._context.enter_context(
            Cache(
                self.daemon.socket, adapter=NumpyAdapter(), timeout=PATIENT_SECONDS, fail_open=False
            )
        )
        wait_until_loaded(self.cache)
        self.threads = thread_count(self.daemon.pid)
        # The write meter's file is there from the first write on.
        put(self.cache, HELD)
        assert self.cache.flush().failed == 0
        self.cache.clear()
        until(self._is_empty, lambda: take_census(self.daemon, self.cache))
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def run(self, step: Step, fault: Fault) -> None:
        """Run one cell; AssertionError or another error says what does not hold."""
        assert self._is_empty()
        before = take_census(self.daemon, self.cache)
        put(self.cache, HELD)
        assert self.cache.flush().failed == 0
        step.prepare(self.daemon, self.cache)
        with contextlib.ExitStack() as context:
            # Whoever is frozen must not stay so.
            context.callback(self._continue)
            peer = contextlib.ExitStack()
            context.enter_context(peer)
            peer.enter_context(step.peer(self.daemon))
            client = context.enter_context(self._client(step, fault))
            self._bring(client, step)
            self._strike(client, step, fault, peer)
        # Before anybody puts or clears: that alone would end a claim.
        self._hold_nothing(*HOLDINGS)
        self._check_values(step)
        self.cache.clear()
        self._check_settled(before)

    def _continue(self) -> None:
        if self.daemon.is_running:
            self.daemon.cont()

    def quiet_threads(self) -> None:
        """Threads that have nothing to do end, after Trio's ten seconds."""
        until(
            lambda: thread_count(self.daemon.pid) <= self.threads,
            lambda: f"{thread_count(self.daemon.pid)} threads, {self.threads} at the start",
        )

    # -- before the fault -------------------------------------------------------------------------

    def _client(self, step: Step, fault: Fault) -> SteppingClient:
        frozen = fault in (Fault.DAEMON_FROZEN, Fault.DAEMON_HUNG)
        timeout = BOUNDED_SECONDS if frozen else PATIENT_SECONDS
        wait = BOUNDED_WAIT_SECONDS if frozen else PATIENT_SECONDS
        return SteppingClient(self.daemon.socket, Order(step.call, step.stops, timeout, wait))

    def _bring(self, client: SteppingClient, step: Step) -> None:
        """Let the client go on to the step at which the fault strikes."""
        client.expect("ready")
        client.tell()
        for stop in step.stops[:-1]:
            client.at(stop)
            if step.is_frozen:
                self.daemon.stop()
            client.tell()
        client.at(step.stops[-1])
        if step.holds:
            until(lambda: self._holds(step), lambda: self.cache.stats()["ram_tier"])

    def _holds(self, step: Step) -> bool:
        found = self.cache.stats()["ram_tier"]
        return all(found[name] == count for name, count in step.holds.items())

    # -- the fault --------------------------------------------------------------------------------

    def _strike(
        self, client: SteppingClient, step: Step, fault: Fault, peer: contextlib.ExitStack
    ) -> None:
        match fault:
            case Fault.CLIENT_KILLED:
                client.kill()
                self._thaw(step)
            case Fault.CLIENT_HUNG:
                client.stop()
                self._thaw(step)
                self._serves_beside(step)
                client.kill()
            case Fault.DAEMON_KILLED:
                self.daemon.kill()
                report = self._finish(client, step, is_bounded=False)
                peer.close()
                self._succeed()
                self._recovers(client, step, report)
            case Fault.DAEMON_FROZEN:
                self._freeze(step)
                report = self._finish(client, step, is_bounded=True)
                self.daemon.cont()
                peer.close()
                self._recovers(client, step, report)
                self._keeps_promise(step, report)
            case Fault.DAEMON_HUNG:
                self._freeze(step)
                report = self._finish(client, step, is_bounded=True)
                self.daemon.kill()
                peer.close()
                self._succeed()
                self._recovers(client, step, report)
            case Fault.DISK:
                with failing_disk(self.daemon, is_frozen=step.is_frozen):
                    if step.call == "take-new":
                        put(self.cache, NEW)  # who waits is served from RAM
                    report = self._finish(client, step, is_bounded=False)
                    self._serves_without_disk(step)
                self._disk_recovers()
                peer.close()
                self._recovers(client, step, report)
                self._keeps_promise(step, report)
            case _:
                assert_never(fault)
        if fault in (Fault.CLIENT_KILLED, Fault.CLIENT_HUNG):
            # Before whom it waited for goes: that alone would end its waiting.
            self._hold_nothing("takes_waiting", "offers_waiting")
            peer.close()
            self._check_visible(step)

    def _freeze(self, step: Step) -> None:
        if not step.is_frozen:
            self.daemon.stop()

    def _thaw(self, step: Step) -> None:
        if step.is_frozen:
            self.daemon.cont()

    def _succeed(self) -> None:
        """Start the successor, and wait until our own client has noticed the change too."""

        def is_reached() -> bool:
            with contextlib.suppress(PrefixCachedError):
                return bool(self.cache.stats())
            return False

        self.daemon.start()
        until(is_reached)
        wait_until_loaded(self.cache)

    def _finish(self, client: SteppingClient, step: Step, *, is_bounded: bool) -> dict[str, Any]:
        """Let the client go on; what became of its call, in bounded time, is right or a miss."""
        if not step.stops[-1].startswith("sent "):
            client.tell()
        report = client.expect("done")
        assert report["good"] or report["reason"] in FALL_BACK or step.call.startswith("take-"), (
            report
        )
        seconds = BOUNDED_SECONDS + BOUNDED_WAIT_SECONDS if is_bounded else 0.0
        assert report["seconds"] < seconds + SLACK_SECONDS, report
        return report

    # -- after the fault --------------------------------------------------------------------------

    def _recovers(self, client: SteppingClient, step: Step, report: dict[str, Any]) -> None:
        """The same client, in the same process, is served again."""
        if step.call == "clear":
            if not report["good"]:
                # Nobody waits for it any more, but the daemon may yet carry it out.
                self._wait_until_alone()
            put(self.cache, HELD)
        client.tell("again")
        client.expect("recovered")
        client.tell("end")
        assert client.wait() == 0

    def _keeps_promise(self, step: Step, report: dict[str, Any]) -> None:
        """A client that was told `stored` finds it, if the daemon lives."""
        if step.call == "put" and report["good"]:
            assert self.cache.peek([*NEW, LAST], namespace=NAMESPACE) == len(NEW)

    def _serves_beside(self, step: Step) -> None:
        """A client that hangs costs the others nothing, and keeps what it holds (L1)."""
        if step.call != "clear":
            self._check_take(HELD, len(HELD))
        if not step.is_frozen:
            # What waits may be answered by a time of its own (P5).
            waits = {"offers_waiting", "takes_waiting"}
            assert self._holds(step) or waits & step.holds.keys(), step.holds

    def _serves_without_disk(self, step: Step) -> None:
        """D7: RAM goes on alone, a flush says so, and `status` too."""
        put(self.cache, DISK_PROMPT)
        flushed = self.cache.flush()
        assert flushed.failed or not flushed.complete, flushed
        assert not self.cache.stats()["ram_tier"]["disk"]["healthy"]
        self._check_take(DISK_PROMPT, len(DISK_PROMPT))

    def _disk_recovers(self) -> None:
        until(lambda: self.cache.stats()["ram_tier"]["disk"]["healthy"])
        flushed = self.cache.flush()
        assert (flushed.failed, flushed.complete) == (0, True), flushed

    def _hold_nothing(self, *names: str) -> None:
        until(
            lambda: not any(self.cache.stats()["ram_tier"][name] for name in names),
            lambda: take_census(self.daemon, self.cache),
        )

    def _wait_until_alone(self) -> None:
        until(
            lambda: take_census(self.daemon, self.cache).strangers == 0,
            lambda: take_census(self.daemon, self.cache),
        )

    def _check_visible(self, step: Step) -> None:
        self._wait_until_alone()
        length = self.cache.peek([*NEW, LAST], namespace=NAMESPACE)
        match step.visible:
            case Visible.NO:
                assert length == 0, f"{length} tokens of an uncommitted put are findable"
            case Visible.YES:
                assert length == len(NEW)
            case Visible.EITHER:
                assert length in (0, len(NEW))

    def _check_values(self, step: Step) -> None:
        """What is held is served bit for bit; what the client put is right or not there."""
        if step.call != "clear":
            self._check_take(HELD, len(HELD))
        self._check_take(NEW)
        put(self.cache, NEW)
        self._check_take(NEW, len(NEW))

    def _check_take(self, prompt: list[int], length: int | None = None) -> None:
        hit = self.cache.take([*prompt, LAST], namespace=NAMESPACE)
        if hit:
            derived_numpy.assert_derived(hit.kv, prompt[: hit.length])
        hit.drop_claim()
        assert length is None or (hit and hit.length == length), hit

    def _is_empty(self) -> bool:
        census = take_census(self.daemon, self.cache)
        counts = {**census.holdings, **census.ram_bytes, **census.ssd_bytes}
        return not any((*counts.values(), census.images, census.strangers, census.shared_memory))

    def _check_settled(self, before: Census) -> None:
        until(
            lambda: take_census(self.daemon, self.cache) == before,
            lambda: f"before: {before}\nnow: {take_census(self.daemon, self.cache)}",
        )
        assert unfinished_files(self.daemon.state_dir) == ()
        assert thread_count(self.daemon.pid) <= THREADS_MOST

"""Replayer: does the steps of a replay against a daemon. It owns the players.

One task does one step after the other, so that what happened in some order in the record happens
in that order again: a message has arrived before the next one is sent. While the daemon follows the
record (`following`) it keeps the order itself, and the replayer only issues what comes next.
"""

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final, assert_never

import trio

from prefixcached.daemon.trace.replay_link import ReplayFailedError, open_link
from prefixcached.daemon.trace.replay_player import STALL_SECONDS, Comparison, Player
from prefixcached.daemon.trace.replay_steps import (
    BARRIER,
    Answered,
    Effect,
    Gone,
    Send,
    Settle,
    Step,
)
from prefixcached.protocol import messages
from prefixcached.protocol.errors import ProtocolError

SETTLE_SECONDS: Final = 30.0
"""For the writer to catch up. A disk that is full never does."""

PATIENCE_SECONDS: Final = 30.0
"""For a reply from a daemon that follows the record: it gives that up by itself before."""

POLL_SECONDS: Final = 0.002
"""Between two questions to a daemon that is busy with what was asked before."""


class Replayer:
    """Does the steps of one record.

    Args:
        socket: Of a daemon that holds nothing and serves nobody else.
        speed: How many times as fast as in the record time passes; 0 waits for nothing.
        is_followed: Whether the daemon follows the record now.
    """

    def __init__(
        self, socket: Path, speed: float = 0.0, is_followed: Callable[[], bool] = lambda: False
    ) -> None:
        self._socket = socket
        self._speed = speed
        self._is_followed = is_followed
        self._players: dict[int, Player] = {}
        self._commits: dict[int, Send] = {}
        self._last: Player | None = None
        self.comparison = Comparison()

    async def run(self, steps: Iterable[Step]) -> None:
        """Do all steps.

        Raises:
            ReplayFailedError: The daemon failed.
            TraceError: The record is damaged; what came before it was done.
        """
        try:
            self._control = await open_link(self._socket, "replay")
            try:
                if not self._is_followed():
                    await self._until_loaded()
                started = trio.current_time()
                for step in steps:
                    if self._speed and isinstance(step, Send):
                        await trio.sleep_until(started + step.seconds / self._speed)
                    await self._do(step)
                await self._until_followed()
                for session in list(self._players):
                    await self._gone(session)
            finally:
                for player in self._players.values():
                    player.link.close()
                self._control.close()
        except (OSError, ProtocolError) as error:
            raise ReplayFailedError(f"the daemon of the replay failed: {error}") from error

    async def _do(self, step: Step) -> None:
        match step:
            case Send(session=session, request=messages.Commit()) if not self._is_followed():
                self._commits[session] = step
            case Send():
                await self._send(step)
            case Effect(session=session):
                if (commit := self._commits.pop(session, None)) is not None:
                    await self._send(commit)
            case Answered(session=session):
                if (player := self._players.get(session)) is not None and player.is_open:
                    patience = PATIENCE_SECONDS if self._is_followed() else STALL_SECONDS
                    await player.answered(step, patience)
            case Gone(session=session):
                await self._gone(session)
            case Settle():
                if not self._speed and not self._is_followed():
                    await self._settle(step)
            case _:
                assert_never(step)

    async def _send(self, step: Send) -> None:
        player = self._players.get(step.session)
        if player is None:
            player = Player(step.session, self._socket, self.comparison)
            await player.connect()
            self._players[step.session] = player
        if not player.is_open:
            self.comparison.left_out += 1
            return
        if not self._is_followed():
            await self._let_arrive(player)
        await player.send(step.request)

    async def _gone(self, session: int) -> None:
        player = self._players.pop(session, None)
        if player is None:
            return
        if not self._is_followed():
            await self._let_arrive(player)
        self._last = None
        await player.close()

        # What it held is free once its session is gone.
        async def is_gone() -> bool:
            return player.name not in await self._activity()

        await _until(is_gone)

    async def _let_arrive(self, player: Player) -> None:
        """What others sent is in RamTier's mailbox: what ``player`` sends now comes behind it."""
        last, self._last = self._last, player
        if last is None or last is player or not (last.is_open and last.link.is_ahead):
            return
        if not last.is_waiting:
            await last.link.ask(BARRIER)
            return

        async def has_arrived() -> bool:
            arrived = (await self._activity()).get(last.name)
            return arrived is None or arrived >= last.link.sent

        await _until(has_arrived)

    async def _activity(self) -> dict[str, int]:
        """By client, how many requests of it have arrived."""
        report, _ = await self._control.ask(messages.Activity())
        assert isinstance(report, messages.ActivityReport)
        return {client.client: client.requests for client in report.clients}

    async def _until_followed(self) -> None:
        """Let the daemon come to the record's end: what its disk did then counts as well."""
        while self._is_followed():
            await self._activity()  # which fails where the daemon has
            await trio.sleep(POLL_SECONDS)

    async def _until_loaded(self) -> None:
        async def is_loaded() -> bool:
            return not (await self._ram_tier())["loading"]

        await _until(is_loaded)

    async def _settle(self, step: Settle) -> None:
        """Let the disk do as much as it had done in the record by now, if there is as much to do.

        A write is delayed, since what is written at once is often replaced at once. Where all that
        waits had been written in the record, nobody needs to wait for the delay.
        """

        async def is_settled() -> bool:
            state = await self._ram_tier()
            missing = step.written - state["disk"]["written"]
            is_promoted = (
                state["disk"]["promoted"] >= step.promoted or not state["promotions_in_flight"]
            )
            if missing <= 0 or not state["writes_queued"]:
                return is_promoted
            if missing >= state["writes_queued"]:
                await self._control.ask(messages.Flush(seconds_left=SETTLE_SECONDS))
            return False

        await _until(is_settled)

    async def _ram_tier(self) -> dict[str, Any]:
        report, _ = await self._control.ask(messages.Status())
        assert isinstance(report, messages.StatusReport)
        section: dict[str, Any] = report.report["ram_tier"]
        return section


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    with trio.move_on_after(SETTLE_SECONDS):
        while not await condition():  # noqa: ASYNC110  (what is awaited happens in the daemon)
            await trio.sleep(POLL_SECONDS)
        return
    raise ReplayFailedError(f"the daemon of the replay does nothing for {SETTLE_SECONDS:g} s")

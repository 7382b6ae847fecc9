"""Watch: answers those who watch the daemon, from what its owners give out. It owns nothing.

Sessions call it instead of RamTier: watching adds nothing to RamTier's mailbox.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from prefixcached.actors.holdings import NOTHING_HELD, Holdings
from prefixcached.daemon.historian import Historian
from prefixcached.daemon.latency import Latencies
from prefixcached.protocol import limits
from prefixcached.protocol.messages import (
    Activity,
    ActivityReport,
    ClientActivity,
    History,
    Latency,
    Reply,
    WatchRequest,
)


class Watch:
    """Answers the requests of the group `watch`.

    Args:
        clients: Returns what the listener knows of its connections, the oldest first.
        holdings: Returns what connections hold of RamTier.
        latencies: The sessions' histograms.
        historian: The history.
    """

    def __init__(
        self,
        clients: Callable[[], Sequence[ClientActivity]],
        holdings: Callable[[], Holdings],
        latencies: Latencies,
        historian: Historian,
    ) -> None:
        self._clients = clients
        self._holdings = holdings
        self._latencies = latencies
        self._historian = historian

    def answer(self, request: WatchRequest) -> Reply:
        """Return the reply to ``request``."""
        match request:
            case Activity():
                return self._activity()
            case Latency():
                return self._latencies.report()
            case History():
                return self._historian.report(request)
            case _:
                assert_never(request)

    def _activity(self) -> ActivityReport:
        clients, holdings = self._clients(), self._holdings()
        return ActivityReport(
            clients=tuple(
                msgspec.structs.replace(
                    client,
                    **msgspec.structs.asdict(
                        holdings.by_session.get(client.session, NOTHING_HELD)
                    ),
                )
                for client in clients[: limits.MAX_WATCHED]
            ),
            claims=holdings.claims,
            labels=holdings.labels,
            complete=holdings.complete and len(clients) <= limits.MAX_WATCHED,
        )  # fmt: skip

"""Flows: which request of which session a message belongs to. Pure; it owns the maps from ids.

A flow is "SESSION.N": the N-th request of a session, and everything that the actors do for it. What
refers to a number of RamTier (a lease, put, pin, claim or read) belongs to the flow that was given
it, an outcome to the flow of its image, and an image to the flow in which it was published. What
RamTier says while it handles a message, and nothing else tells more exactly, belongs to that
message's flow.
"""

from typing import Any, Final

from prefixcached.protocol import actor_messages as inner
from prefixcached.protocol import messages as wire
from prefixcached.protocol.actor_messages import ActorMessage
from prefixcached.protocol.messages import AnyRequest, Reply

MAX_REMEMBERED: Final = 1 << 16
"""Numbers, and images: more than a daemon holds at a time, some 10 MB at most."""

NO_FLOW: Final = ""
"""Of what happens for nobody's request: pressure, scans, timers."""

GREETING: Final = "0"
"""Stands for N in the flow of a session's first exchange."""
END: Final = "end"
"""Stands for N in the flow of a session's end."""


class Flows:
    """Names the flow of each message, in the order in which they are sent."""

    def __init__(self) -> None:
        self._requests: dict[int, int] = {}
        self._by_number: dict[int, str] = {}
        self._by_image: dict[str, str] = {}
        self._by_order: dict[tuple[str, int | str], str] = {}
        self.current = NO_FLOW
        """What RamTier is handling."""

    def of_request(self, session: int, request: AnyRequest) -> str:
        """Return the flow of a request that a session passes on or answers now."""
        if isinstance(request, wire.Hello):
            return f"{session}.{GREETING}"
        flow = self._by_number.get(_refers_to(request), NO_FLOW)
        # Anybody may name any number; only its owner's request belongs to it.
        if flow.startswith(f"{session}."):
            return flow
        number = self._requests[session] = self._requests.get(session, 0) + 1
        return f"{session}.{number}"

    def replied(self, flow: str, reply: Reply) -> None:
        """Note what numbers a reply gives out."""
        match reply:
            case wire.Hit(lease=lease, claim=claim):
                self._remember(self._by_number, lease, flow)
                self._remember_claim(claim, flow)
            case wire.Miss(claim=claim):
                self._remember_claim(claim, flow)
            case wire.Grant(put=put):
                self._remember(self._by_number, put, flow)
            case wire.Pinned(pin=int(pin)):
                self._remember(self._by_number, pin, flow)
            case _:
                pass

    def of_order(self, message: ActorMessage) -> str:
        """Return the flow of what RamTier tells another actor."""
        match message:
            case inner.WriteImage(header=header):
                return self._of_image(header.id)
            case inner.CancelWrite(id=image) | inner.DeleteFile(id=image):
                return self._of_image(image)
            case inner.PromoteImage(entry=entry):
                self._remember(self._by_order, ("promote", entry.header.id), self.current)
            case inner.ReadImage(read=read):
                self._remember(self._by_number, read, self.current)
            case inner.CancelRead(read=read):
                return self._by_number.get(read, self.current)
            case inner.ClearNamespace(epoch=epoch):
                self._remember(self._by_order, ("clear", epoch), self.current)
            case inner.SyncAll(sync=sync):
                # A flush gives two orders, the second one while RamTier hears what was written.
                if (flow := self._by_order.get(("sync", sync))) is not None:
                    return flow
                self._remember(self._by_order, ("sync", sync), self.current)
            case _:
                pass
        return self.current

    def of_outcome(self, message: ActorMessage) -> str:
        """Return the flow of what RamTier is told by another actor, or by its own workers."""
        match message:
            case inner.Sealed(put=put):
                return self._by_number.get(put, NO_FLOW)
            case inner.ImageRead(read=read):
                return self._by_number.get(read, NO_FLOW)
            case inner.Written(id=image) | inner.Deleted(id=image):
                return self._by_image.get(image, NO_FLOW)
            case inner.Promoted(id=image):
                return self._by_order.get(("promote", image), NO_FLOW)
            case inner.NamespaceCleared(epoch=epoch):
                return self._by_order.get(("clear", epoch), NO_FLOW)
            case inner.Synced(sync=sync):
                return self._by_order.get(("sync", sync), NO_FLOW)
            case inner.Call(session=session, request=request):
                flow = self._by_number.get(_refers_to(request), NO_FLOW)
                return flow if flow.startswith(f"{session}.") else NO_FLOW
            case inner.ClientGone(session=session):
                self._requests.pop(session, None)
                return f"{session}.{END}"
            case _:
                return NO_FLOW

    def new_image(self, image: str) -> None:
        """Note that an image was published in the current flow."""
        self._remember(self._by_image, image, self.current)

    def _of_image(self, image: str) -> str:
        flow = self._by_image.get(image)
        if flow is None:
            flow = self.current
            self._remember(self._by_image, image, flow)
        return flow

    def _remember_claim(self, claim: int | None, flow: str) -> None:
        if claim is not None:
            self._remember(self._by_number, claim, flow)

    @staticmethod
    def _remember(flows: dict[Any, str], name: Any, flow: str) -> None:
        if len(flows) >= MAX_REMEMBERED and name not in flows:
            del flows[next(iter(flows))]
        flows[name] = flow


def _refers_to(request: AnyRequest) -> int:
    """The number of RamTier that a request names; 0, which is none, where it names none."""
    match request:
        case wire.Commit(put=number) | wire.Abandon(put=number):
            return number
        case wire.Fetch(of=number):
            return number
        case wire.Release(lease=number):
            return number
        case wire.Unpin(pin=number):
            return number
        case wire.DropClaim(claim=number):
            return number
        case _:
            return 0

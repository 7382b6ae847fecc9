"""A daemon in a thread, small but real: real socket, real protocol, real shared memory.

It holds whole entries and knows no budget, no eviction and no tree; what it answers is right, so
that clients can be tested before and apart from the product's daemon. ``on_request`` may take a
request over, to misbehave with it.
"""

import array
import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import xxhash

from prefixcached.actors import memory
from prefixcached.actors.memory import SharedImage
from prefixcached.protocol import image, limits, messages
from prefixcached.protocol.connection import CAPABILITIES, Connection, Received, Role
from prefixcached.protocol.errors import ProtocolError
from prefixcached.protocol.image import ImageKind, ImageSpec
from prefixcached.protocol.messages import AnyRequest, Part
from prefixcached.protocol.schema import decode_schema
from prefixcached.protocol.tokens import TokenArray, common_prefix_length, token_array

BOOT = "boot-1"


@dataclass
class Entry:
    """What one put stored: its tokens and all images that cover them, shared ones included."""

    tokens: TokenArray
    schema: bytes
    images: list[tuple[ImageSpec, SharedImage]]


@dataclass
class Put:
    """A put between grant and commit."""

    offer: messages.Offer
    held: list[tuple[ImageSpec, SharedImage]]
    own: list[tuple[ImageSpec, SharedImage]]

    def free(self) -> None:
        """Give up what was not committed."""
        for _, shared in self.own:
            shared.free()


@dataclass(eq=False)
class Peer:
    """One connection, in its own thread."""

    daemon: "SmallDaemon"
    socket: socket.socket
    connection: Connection = field(default_factory=lambda: Connection(role=Role.DAEMON))
    puts: dict[int, Put] = field(default_factory=dict)
    leases: dict[int, list[SharedImage]] = field(default_factory=dict)
    pins: set[int] = field(default_factory=set)

    def send(self, reply: Any, images: list[int] | None = None) -> None:
        """Send ``reply`` with the descriptors ``images``."""
        lent = images or []
        data = self.connection.send(reply, len(lent))
        self.send_raw(data, lent)

    def send_raw(self, data: bytes, descriptors: list[int]) -> None:
        """Send any bytes with any descriptors."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        sent = self.socket.sendmsg([data], ancillary if descriptors else [])
        self.socket.sendall(data[sent:])

    def run(self) -> None:
        """Serve until the client goes or breaks the protocol."""
        try:
            while True:
                event = self.connection.next_event()
                if isinstance(event, Received):
                    self.daemon.handle(self, event.message)  # type: ignore[arg-type]
                    continue
                data = self.socket.recv(1 << 16)
                if not data:
                    return
                self.connection.receive(data)
        except (OSError, ProtocolError) as error:
            self.daemon.session_errors.append(error)
        finally:
            for put in self.puts.values():
                put.free()
            self.daemon.gone(self)


class SmallDaemon:
    """Listens at ``path`` from `start` to `stop`."""

    def __init__(self, path: Path, *, segment_max_bytes: int = limits.SEGMENT_MAX_BYTES) -> None:
        self.path = path
        self.segment_max_bytes = segment_max_bytes
        self.entries: dict[str, list[Entry]] = {}
        self.requests: list[AnyRequest] = []
        self.session_errors: list[Exception] = []
        self.accepted = 0
        self.on_request: Callable[[Peer, AnyRequest], bool] | None = None
        self._ids = 0
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._peers: set[Peer] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def start(self) -> Self:
        """Bind the socket and accept connections in a thread."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.path))
        listener.listen(128)
        self._listener = listener
        self._spawn(self._accept)
        return self

    def stop(self) -> None:
        """Close everything at once, as kill -9 would, and free all images."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self.path.unlink()
            listener.shutdown(socket.SHUT_RDWR)
        self.drop_all()
        for thread in self._threads:
            thread.join()
        if listener is not None:
            listener.close()
        for shared in {
            s for entries in self.entries.values() for e in entries for _, s in e.images
        }:
            shared.free()
        self.entries.clear()

    def drop_all(self) -> None:
        """End all connections."""
        with self._lock:
            for peer in self._peers:
                # The client may have closed it just now.
                with contextlib.suppress(OSError):
                    peer.socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def connections(self) -> int:
        """Connections open now."""
        with self._lock:
            return len(self._peers)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait until ``condition`` holds; it is looked at after each request and connection."""
        with self._quiet:
            return self._quiet.wait_for(condition, timeout=10)

    def gone(self, peer: Peer) -> None:
        """Close a connection and forget it."""
        with self._quiet:
            peer.socket.close()
            self._peers.discard(peer)
            self._quiet.notify_all()

    @property
    def leases(self) -> int:
        """Leases held by all connections."""
        with self._lock:
            return sum(len(peer.leases) for peer in self._peers)

    @property
    def pins(self) -> int:
        """Pins held by all connections."""
        with self._lock:
            return sum(len(peer.pins) for peer in self._peers)

    def handle(self, peer: Peer, request: AnyRequest) -> None:
        """Answer one request."""
        with self._quiet:
            self.requests.append(request)
            hook = self.on_request
        if hook is None or not hook(peer, request):
            with self._lock:
                self.answer(peer, request)
        with self._quiet:
            self._quiet.notify_all()

    def answer(self, peer: Peer, request: AnyRequest) -> None:
        """Answer ``request`` as a daemon should."""
        match request:
            case messages.Hello():
                peer.send(
                    messages.Welcome(
                        version=limits.PROTOCOL_VERSION, capabilities=CAPABILITIES, boot=BOOT
                    )
                )
            case messages.Take():
                self._take(peer, request)
            case messages.Fetch():
                put = peer.puts.get(request.of)
                if put is None:
                    fds = [shared.descriptor for shared in peer.leases[request.of]]
                else:
                    fds = [shared.writable_descriptor for _, shared in put.own]
                fds = fds[request.first : request.first + limits.MAX_DESCRIPTORS]
                peer.send(messages.Descriptors(first=request.first, count=len(fds), boot=BOOT), fds)
            case messages.Release():
                peer.leases.pop(request.lease, None)
            case messages.Offer():
                self._offer(peer, request)
            case messages.Commit():
                self._commit(peer, request)
            case messages.Peek():
                length = self._longest(request.namespace, request.tokens)[0]
                peer.send(messages.Length(length=length, boot=BOOT))
            case messages.Contains():
                tokens = token_array(request.tokens)
                entries = self.entries.get(request.namespace, [])
                known = any(e.tokens.tobytes() == request.tokens for e in entries)
                peer.send(messages.Length(length=len(tokens) if known else 0, boot=BOOT))
            case messages.Prefetch():
                length = self._longest(request.namespace, request.tokens)[0]
                pin = self._next_id() if length else None
                if pin is not None:
                    peer.pins.add(pin)
                peer.send(messages.Pinned(pin=pin, length=length, boot=BOOT))
            case messages.Unpin():
                peer.pins.discard(request.pin)
            case messages.Flush():
                peer.send(messages.Flushed(written=3, skipped=2, failed=0, boot=BOOT))
            case messages.Clear():
                peer.send(messages.Cleared(images=4, ram_bytes=5, boot=BOOT))
            case messages.Status():
                peer.send(messages.StatusReport(report={"ram": {"hits": 1}}, boot=BOOT))
            case messages.Abandon():
                peer.puts.pop(request.put).free()

    def _take(self, peer: Peer, request: messages.Take) -> None:
        length, entry = self._longest(request.namespace, request.tokens)
        if entry is None or length == 0:
            peer.send(messages.Miss(reason="empty", boot=BOOT))
            return
        parts, images = [], []
        # Where a branch leaves a held image in the middle, its own image takes over.
        following = [spec.start for spec, _ in entry.images[1:]] + [length]
        for (spec, shared), next_start in zip(entry.images, following, strict=True):
            if spec.start < length or spec.kind is ImageKind.CHECKPOINT:
                parts.append(Part(spec, spec.start, min(spec.end, next_start, length)))
                images.append(shared)
        lease = self._next_id()
        peer.leases[lease] = images
        known = xxhash.xxh3_128_digest(entry.schema) == request.schema_digest
        peer.send(
            messages.Hit(
                lease=lease,
                length=length,
                tier="ram",
                parts=tuple(parts),
                schema=b"" if known else entry.schema,
                matched=length,
                boot=BOOT,
            ),
            [shared.descriptor for shared in images[: limits.MAX_DESCRIPTORS]],
        )

    def _offer(self, peer: Peer, offer: messages.Offer) -> None:
        tokens = token_array(offer.tokens)
        schema = decode_schema(offer.schema)
        base, entry = 0, None
        for candidate in self.entries.get(offer.namespace, []):
            common = common_prefix_length(candidate.tokens, tokens)
            if common > base:
                base, entry = common, candidate
        if base == len(tokens):
            peer.send(messages.Stored(new_bytes=0, length=base, boot=BOOT))
            return
        held = [
            (spec, shared)
            for spec, shared in (entry.images if entry is not None else [])
            if spec.kind is ImageKind.SEGMENT and spec.start < base
        ]
        specs = [
            ImageSpec(ImageKind.SEGMENT, start, end)
            for start, end in image.segment_lengths(
                schema, base, len(tokens), self.segment_max_bytes
            )
        ]
        if offer.checkpoint is not None:
            specs.append(offer.checkpoint)
        own = [(spec, memory.create(image.layout(schema, spec).nbytes)) for spec in specs]
        number = self._next_id()
        peer.puts[number] = Put(offer, held, own)
        peer.send(
            messages.Grant(put=number, base=base, images=tuple(specs), boot=BOOT),
            [shared.writable_descriptor for _, shared in own[: limits.MAX_DESCRIPTORS]],
        )

    def _commit(self, peer: Peer, commit: messages.Commit) -> None:
        put = peer.puts.pop(commit.put)
        for _, shared in put.own:
            shared.seal()
        tokens = token_array(put.offer.tokens)
        entry = Entry(tokens, put.offer.schema, put.held + put.own)
        self.entries.setdefault(put.offer.namespace, []).append(entry)
        new_bytes = sum(shared.nbytes for _, shared in put.own)
        peer.send(messages.Stored(new_bytes=new_bytes, length=len(tokens), boot=BOOT))

    def _longest(self, namespace: str, packed: bytes) -> tuple[int, Entry | None]:
        prompt = token_array(packed)
        best: tuple[int, Entry | None] = (0, None)
        for entry in self.entries.get(namespace, []):
            common = min(common_prefix_length(entry.tokens, prompt), len(prompt) - 1)
            if decode_schema(entry.schema).has_state and common != len(entry.tokens):
                continue
            if common > best[0]:
                best = (common, entry)
        return best

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _accept(self) -> None:
        assert self._listener is not None
        listener = self._listener
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            peer = Peer(self, accepted)
            with self._lock:
                self.accepted += 1
                self._peers.add(peer)
                self._spawn(peer.run)

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

"""A client of the core, for tests that name one rule: put, take and verify in one line each."""

from typing import Any

from prefixcached.protocol import messages as wire
from prefixcached.protocol.image import ImageKind, ImageSpec, StateTensor, WindowRows
from prefixcached.protocol.tokens import pack_tokens
from tests.support.core import Core, Slot, fetch_all, fill
from tests.support.core_payload import (
    SCHEMAS,
    STATE,
    Tokens,
    encoded,
    image_bytes,
    offered_rows,
    verify_hit,
)


def sequence(length: int, salt: int = 0) -> Tokens:
    """A token sequence of its own for each ``salt``."""
    return tuple((salt * 7919 + position * 31) % 50021 for position in range(length))


class Client:
    """One connection. A namespace is called "<schema>/<salt>"; "plain/a" unless said."""

    def __init__(self, core: Core, session: int = 1, *, fills: bool = True) -> None:
        self.core = core
        self.session = session
        self.fills = fills
        """Without it the images of a grant stay zero: for tests that count bytes alone."""

    # -- put ------------------------------------------------------------------------------------

    def offer(
        self, tokens: Tokens, namespace: str = "plain/a", *, state: bool = False,
        attachments: bytes = b"", minimum: int = 0, extra: int = 0, seconds: float = 5.0,
        windows: tuple[WindowRows, ...] | None = None, tensor: StateTensor = STATE,
        label: str | None = None,
    ) -> Slot:  # fmt: skip
        """Offer tokens; a grant's images are filled. ``state`` adds a checkpoint."""
        name = namespace.split("/", maxsplit=1)[0]
        schema, length = SCHEMAS[name], len(tokens)
        checkpoint = None
        if state or attachments:
            checkpoint = ImageSpec(
                ImageKind.CHECKPOINT, length, length, tensors=(tensor,), metadata=attachments
            )
        if windows is None:
            windows = tuple(offered_rows(window, length, extra) for window in schema.windows)
        offer = wire.Offer(
            namespace, pack_tokens(tokens), encoded(name), windows=windows, checkpoint=checkpoint,
            attachments=bool(attachments), minimum=minimum, seconds_left=seconds, label=label,
        )  # fmt: skip
        slot = self.core.call(self.session, offer)
        if isinstance(slot.reply, wire.Grant) and self.fills:
            self.fill(slot, tokens, namespace)
        return slot

    def fill(self, slot: Slot, tokens: Tokens, namespace: str = "plain/a") -> None:
        """Write a grant's images."""
        assert isinstance(slot.reply, wire.Grant)
        schema = SCHEMAS[namespace.split("/", maxsplit=1)[0]]
        images = [image_bytes(schema, s, namespace, tokens) for s in slot.reply.images]
        fill(self.core, self.session, slot, images)

    def grant(self, tokens: Tokens, namespace: str = "plain/a", **options: Any) -> wire.Grant:
        """The grant of an offer that is granted at once."""
        reply = self.offer(tokens, namespace, **options).reply
        assert isinstance(reply, wire.Grant), reply
        return reply

    def commit(self, grant: wire.Grant) -> Any:
        """Commit a grant."""
        return self.core.reply(self.session, wire.Commit(grant.put))

    def put(self, tokens: Tokens, namespace: str = "plain/a", **options: Any) -> Any:
        """Offer, fill and commit; the last reply."""
        reply = self.offer(tokens, namespace, **options).reply
        return self.commit(reply) if isinstance(reply, wire.Grant) else reply

    def store(self, tokens: Tokens, namespace: str = "plain/a", **options: Any) -> int:
        """Put tokens that must be stored; the new bytes."""
        reply = self.put(tokens, namespace, **options)
        assert isinstance(reply, wire.Stored), reply
        return reply.new_bytes

    def refusal(self, tokens: Tokens, namespace: str = "plain/a", **options: Any) -> str:
        """Put tokens that must be declined; the reason."""
        reply = self.put(tokens, namespace, **options)
        assert isinstance(reply, wire.Declined), reply
        return reply.reason

    # -- take -----------------------------------------------------------------------------------

    def ask(self, tokens: Tokens, namespace: str = "plain/a", **options: Any) -> Slot:
        """Take without looking at the reply."""
        return self.core.call(self.session, wire.Take(namespace, pack_tokens(tokens), **options))

    def verify(self, slot: Slot, tokens: Tokens, namespace: str = "plain/a") -> wire.Hit:
        """Check every byte of a hit."""
        hit = slot.reply
        assert isinstance(hit, wire.Hit), hit
        numbers = fetch_all(self.core, self.session, hit.lease, len(hit.parts), slot)
        schema = SCHEMAS[namespace.split("/", maxsplit=1)[0]]
        verify_hit(schema, namespace, tokens, hit, numbers, self.core.descriptors.read)
        return hit

    def hit(self, tokens: Tokens, namespace: str = "plain/a") -> wire.Hit:
        """Take tokens that must hit; the lease is held."""
        return self.verify(self.ask(tokens, namespace), tokens, namespace)

    def miss(self, tokens: Tokens, namespace: str = "plain/a") -> wire.Miss:
        """Take tokens that must miss."""
        reply = self.ask(tokens, namespace).reply
        assert isinstance(reply, wire.Miss), reply
        return reply

    def reuse(self, tokens: Tokens, namespace: str = "plain/a") -> int:
        """Take, check, release: the number of reused tokens, 0 on a miss."""
        slot = self.ask(tokens, namespace)
        if isinstance(slot.reply, wire.Miss):
            return 0
        hit = self.verify(slot, tokens, namespace)
        self.release(hit)
        return hit.length

    def release(self, hit: wire.Hit) -> None:
        """End a hit's lease."""
        self.core.send_one_way(self.session, wire.Release(hit.lease))

    # -- other ----------------------------------------------------------------------------------

    def contains(self, tokens: Tokens, namespace: str = "plain/a") -> bool:
        """Whether exactly these tokens are resumable at their end."""
        reply = self.core.reply(self.session, wire.Contains(namespace, pack_tokens(tokens)))
        return bool(reply.length == len(tokens))

    def peek(self, tokens: Tokens, namespace: str = "plain/a") -> int:
        """How many tokens a take would reuse."""
        return int(self.core.reply(self.session, wire.Peek(namespace, pack_tokens(tokens))).length)

    def prefetch(self, tokens: Tokens, namespace: str = "plain/a") -> Slot:
        """Ask for a pin."""
        return self.core.call(self.session, wire.Prefetch(namespace, pack_tokens(tokens)))

    def unpin(self, pin: int) -> None:
        """End a pin."""
        self.core.send_one_way(self.session, wire.Unpin(pin))

    def flush(self, seconds: float = 60.0) -> Slot:
        """Ask for everything to be durable."""
        return self.core.call(self.session, wire.Flush(seconds))

    def clear(self, namespace: str | None = None) -> Slot:
        """Forget a namespace, or all. With an SSD tier the reply waits for the disk."""
        return self.core.call(self.session, wire.Clear(namespace))

"""What of a message goes into the trace: its msgpack form without what would give prompts away.

Tokens of requests become prefix digests, labels and object keys digests, metadata its size. Tokens
of files become their number: where they stand follows from the header's parent and position. With
``keep_tokens`` all of these but metadata stay as they are. The columns of a history become their
sizes as well: they would be most of a trace while somebody watches the daemon.
"""

import hashlib
import secrets
from typing import Any, Final

import msgspec

from prefixcached.daemon.sendable import sendable
from prefixcached.daemon.trace.prefix_digests import PrefixDigests
from prefixcached.protocol import messages
from prefixcached.protocol.actor_messages import ActorMessage
from prefixcached.protocol.messages import AnyRequest, Reply

NAME_DIGEST_BYTES: Final = 8
"""Of a label or key: two of a million differ but for a chance of one in 40 million."""

Plain = dict[str, Any]


class PlainForm:
    """Turns messages into plain values under one secret, which it owns.

    Args:
        keep_tokens: Write tokens, labels and keys as they are.
    """

    def __init__(self, *, keep_tokens: bool) -> None:
        self._keep_tokens = keep_tokens
        self._digests = PrefixDigests()
        self._name_key = secrets.token_bytes(16)

    def of(self, message: ActorMessage | AnyRequest | Reply, request: Any = None) -> Plain:
        """Return the plain form of ``message``; ``request`` is what a reply answers."""
        plain: Plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        if isinstance(message, messages.StatusReport):
            return sendable(plain)
        self._reduce(plain)
        if isinstance(message, messages.Explanation) and not self._keep_tokens:
            held = request.tokens[: 4 * message.matched]
            plain["continuations"] = [
                self._digests.of_continuation(held, tokens) for tokens in message.continuations
            ]
        return plain

    def _reduce(self, plain: Plain) -> None:
        """Replace what must not stay, in place, however deep it lies."""
        for name, value in plain.items():
            match name, value:
                case (("metadata" | "values" | "times"), bytes()):
                    plain[name] = len(value)
                case "tokens", bytes() if not self._keep_tokens:
                    is_prompt = plain.get("type") in _PROMPTS
                    plain[name] = self._digests.of(value) if is_prompt else len(value) // 4
                case "tokens_checksum", str() if not self._keep_tokens:
                    plain[name] = ""  # whoever guesses a prompt could see that it is the one
                case (("label" | "key"), str()) if value and not self._keep_tokens:
                    plain[name] = self._name(value)
                case _, dict():
                    self._reduce(value)
                case _, list() | tuple():
                    for item in value:
                        if isinstance(item, dict):
                            self._reduce(item)
                case _:
                    pass

    def _name(self, name: str) -> str:
        return hashlib.blake2b(
            name.encode(), key=self._name_key, digest_size=NAME_DIGEST_BYTES
        ).hexdigest()


_PROMPTS: Final = frozenset(
    str(kind.__struct_config__.tag)
    for kind in (
        messages.Take, messages.Peek, messages.Contains, messages.Offer, messages.Prefetch,
        messages.Explain,
    )
)  # fmt: skip
"""Requests whose tokens begin at position 0, so that they have prefix digests."""

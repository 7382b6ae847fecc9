"""What a client raises when `fail_open=False`; otherwise the same becomes a miss or a decline.

Each error carries ``reason``, the word that a `Miss` or `Declined` has for it (rules T9, P10).
"""

from typing import ClassVar


class PrefixCachedError(Exception):
    """The cache could not serve a call. Whoever asked goes on without it."""

    reason: ClassVar[str] = "protocol"


class NoDaemon(PrefixCachedError):  # noqa: N818, the name says what happened, as the reason does
    """Nobody listens at the socket, or the daemon ended during the call."""

    reason = "no-daemon"


class CallTimeout(PrefixCachedError):  # noqa: N818, as NoDaemon
    """The call did not end within its `timeout` (rule C4)."""

    reason = "timeout"


class ProtocolFailure(PrefixCachedError):  # noqa: N818, as NoDaemon
    """The daemon broke the protocol, refused the request, or lent what cannot be used."""

    reason = "protocol"


class RestoreFailed(PrefixCachedError):  # noqa: N818, as NoDaemon
    """Lent bytes could not be read (rule T8)."""

    reason = "restore-failed"


class NoSpace(PrefixCachedError):  # noqa: N818, as NoDaemon
    """The machine had no memory left for a granted image."""

    reason = "no-space"


class NotStorable(PrefixCachedError):  # noqa: N818, as NoDaemon
    """These caches are valid but exceed what the protocol carries."""

    reason = "invalid"


class UseAfterClose(RuntimeError):  # noqa: N818, as NoDaemon
    """A closed `Cache` was used: a bug in the caller, raised also with `fail_open`."""

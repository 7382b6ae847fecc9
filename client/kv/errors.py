"""What goes wrong between mlx-lm's caches and images, by whose fault it is."""


class UnsupportedCacheError(ValueError):
    """The caller's cache is of a kind that cannot be stored: a batch, or a foreign class."""


class IncomparableKvError(ValueError):
    """The caller's tokens and caches do not belong together (rule P1); both numbers are told."""


class UncuttableKvError(Exception):
    """The KV would have to be cut where its kinds do not allow it: a declined put (rule P1)."""

    reason = "invalid"


class UnusableImageError(Exception):
    """Images or their description do not make up a cache: a miss, by the daemon's fault."""

    reason = "restore-failed"

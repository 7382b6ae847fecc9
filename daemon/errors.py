"""Why the daemon does not start."""


class StartError(Exception):
    """The daemon cannot start; the text says what is in the way and what to do about it."""

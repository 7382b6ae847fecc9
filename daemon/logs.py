"""Log lines: one a line on standard error, which launchd and systemd put where logs belong."""

import sys
from typing import Final

import structlog

LEVEL: Final = 20
"""INFO, by the numbers of the standard library."""


def configure() -> None:
    """Set structlog up for this process; called once, before anything logs."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=False),
            # Without the values of variables: these would be prompts.
            structlog.dev.ConsoleRenderer(
                colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVEL),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )

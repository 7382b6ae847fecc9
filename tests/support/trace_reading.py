"""Everything that the commands `trace` and `replay` do with a trace before a daemon is involved."""

from pathlib import Path

from prefixcached.daemon.commands.replay import chosen_options
from prefixcached.daemon.commands.trace import json_of, line_of, opened
from prefixcached.daemon.trace.guide import Guide, key_of
from prefixcached.daemon.trace.replay_steps import steps_of
from prefixcached.daemon.trace.summary import Tally
from prefixcached.daemon.trace.turns import outcomes_of, turns_of


def read_all(path: Path) -> None:
    """Do all of it; raise `click.ClickException` where they would say what is wrong with it."""
    with opened(path) as (header, found):
        chosen_options(header, {}, None)
        for record in found:
            assert line_of(record).isprintable()
            json_of(record)
    tally = Tally()
    with opened(path) as (_, found):
        for record in found:
            tally.add(record)
    tally.summary()
    with opened(path) as (_, found):
        outcomes = outcomes_of(found)
    with opened(path) as (_, found):
        guide = Guide(turns_of(found), outcomes, lambda _: None)
        while (turn := guide.upcoming()) is not None:
            guide.awaited_request()
            guide.begin()
            for name in turn.decided:
                guide.decide(name)
            if turn.heard is not None:
                key_of(turn.heard)
    with opened(path) as (_, found):
        list(steps_of(found))

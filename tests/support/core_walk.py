"""Seeded random walks through the rules of a machine: longer and denser than Hypothesis makes them.

Hypothesis shrinks what it finds, but spends most steps of a run on few rules. A walk chooses by
weight, so that puts, hits, evictions and restarts meet often; a seed reproduces it.
"""

import random
from collections.abc import Callable
from typing import Any

from tests.support.core_disk_machine import DiskMachine
from tests.support.core_machine import ClientMachine
from tests.support.core_payload import SCHEMAS

WEIGHTS = {
    "put": 10, "take": 6, "commit": 3, "release": 3, "wait": 2, "abandon": 1, "prefetch": 1,
    "unpin": 1, "dies": 1, "clear": 1, "finish_seal": 3, "finish_free": 2,
}  # fmt: skip

DISK_WEIGHTS = {
    "write": 6, "read": 4, "write_much": 3, "read_all": 3, "promotion": 3, "flush": 3,
    "empty_trash": 1, "lose": 1, "health": 1, "restart": 1,
}  # fmt: skip

Draw = Callable[[random.Random], Any]


def _which(order: random.Random) -> int:
    return order.randrange(50)


ARGUMENTS: dict[str, Draw] = {
    "session": lambda order: order.randrange(1, 5),
    "stem": lambda order: order.choice([0, 0, 1, 2, 3, order.randrange(50)]),
    "cut": lambda order: order.choice([0, 0, 0, order.randrange(4), order.randrange(60)]),
    "tail": lambda order: order.choices([1, 2], k=order.choice([0, 1, 2, 5, 10, 14])),
    "space": lambda order: order.choice([0, 0, 0, 0, 1, 2, 3]),
    "extra": lambda order: order.randrange(10),
    "lacks": lambda order: order.randrange(10),
    "checkpoint": lambda order: order.random() < 0.6,
    "heavy": lambda order: order.random() < 0.5,
    "attachments": lambda order: order.choice([0, 0, 4]),
    "minimum": lambda order: order.choice([0] * 8 + [10, 11]),
    "is_whole": lambda order: order.random() < 0.6,
    "which": _which,
    "really": lambda order: order.randrange(3),
    "fails": lambda order: order.randrange(10),
    "outcome": lambda order: order.choice(["good"] * 4 + ["transient", "damaged"]),
    "healthy": lambda order: order.random() < 0.6,
    "seed": _which,
    "batch": lambda order: order.randrange(1, 5),
}

NEEDS: dict[str, tuple[str, ...]] = {
    "put": (
        "session", "stem", "cut", "tail", "space", "extra", "lacks", "checkpoint", "heavy",
        "attachments", "minimum", "is_whole",
    ),
    "take": ("session", "stem", "cut", "tail", "space"),
    "prefetch": ("session", "stem", "cut", "tail", "space"),
    "dies": ("session", "really"),
    "clear": ("space", "really"),
    "finish_seal": ("fails",),
    "write": ("fails",),
    "read": ("which", "outcome"),
    "promotion": ("which", "outcome"),
    "health": ("healthy",),
    "flush": ("session",),
    "restart": ("seed", "batch", "really"),
    **dict.fromkeys(("commit", "abandon", "release", "unpin", "lose"), ("which",)),
}  # fmt: skip

SECONDS = {"put": [5.0, 5.0, 0.0], "wait": [0.1, 0.6, 3.0, 40.0], "write_much": [1.0, 1.0, 50.0]}


def walk(machine: ClientMachine, seed: int, steps: int) -> None:
    """Walk ``steps`` steps and check every invariant after each, and the machine's end."""
    order = random.Random(seed)
    weights = {**WEIGHTS, **(DISK_WEIGHTS if isinstance(machine, DiskMachine) else {})}
    machine.start(
        schemas=["plain"] if order.random() < 0.3 else order.sample(sorted(SCHEMAS), 1),
        ram_pages=order.choice([4000, 40, 16, 6]), images=order.choice([4000, 4000, 30, 8]),
        ssd_cap=order.randrange(4), segment_bytes=order.choice([1 << 20, 6000, 3000]),
        auto=order.random() < 0.5, minimum_tokens=order.choice([6, 24]),
        promote=order.choice(["second-hit", "always", "never"]), delay=order.choice([0.0, 0.5]),
    )  # fmt: skip
    names = list(weights)
    for _ in range(steps):
        (name,) = order.choices(names, weights=list(weights.values()))
        arguments = {need: ARGUMENTS[need](order) for need in NEEDS.get(name, ())}
        if name in SECONDS:
            arguments["seconds"] = order.choice(SECONDS[name])
        if _is_possible(machine, name):
            getattr(machine, name)(**arguments)
            machine.sound()
            if isinstance(machine, DiskMachine):
                machine.charged()
    machine.teardown()


def _is_possible(machine: ClientMachine, name: str) -> bool:
    """The preconditions of the machine's rules."""
    match name:
        case "commit" | "abandon":
            return bool(machine.granted)
        case "release":
            return bool(machine.lent)
        case "unpin":
            return bool(machine.pins)
        case "finish_seal":
            return bool(machine.core.sealing)
        case "finish_free":
            return bool(machine.core.freeing)
    if not isinstance(machine, DiskMachine):
        return True
    match name:
        case "read":
            return machine.pending_reads()
        case "promotion":
            return machine.pending_promotions()
        case "empty_trash":
            return machine.disk.trash_is_due
        case "lose":
            return bool(machine.disk.files)
        case _:
            return True

"""State machines over the core, against a plain model (tests/support/core_machine.py).

They check after every step: rules T1, T3, T5, T6, T11, T13 by definition; every byte of every hit,
when it is lent and again when it is released (T12, L2); P2 to P7, P11; caps and ledgers (E1, E2);
the tree's invariants; that what a flush confirmed is found after a restart (P8); and at the end
that nothing is held, reserved, unreachable or charged for nothing.
"""

import pytest

from tests.support.core_disk_machine import DiskMachine
from tests.support.core_machine import ClientMachine, machine_settings, walk_seeds
from tests.support.core_walk import walk

TestOneTier = ClientMachine.TestCase
TestOneTier.settings = machine_settings()

TestBothTiers = DiskMachine.TestCase
TestBothTiers.settings = machine_settings()


@pytest.mark.parametrize("seed", walk_seeds())
def test_a_random_walk_of_clients_keeps_every_invariant(seed: int) -> None:
    """T1 to T13, P2 to P11, L1, L2, E1, E2, E6: clients alone, in RAM."""
    walk(ClientMachine(), seed, steps=100)


@pytest.mark.parametrize("seed", walk_seeds())
def test_a_random_walk_over_both_tiers_keeps_every_invariant(seed: int) -> None:
    """The same with T4, T7, T8, E4 to E8, F1 to F4, D5, D8, D10, D11: a disk that may fail."""
    walk(DiskMachine(), seed, steps=100)

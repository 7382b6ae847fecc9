"""Hypothesis state machines over the core, against a plain model (tests/support/core_machine.py).

They check after every step: rules T1, T3, T5, T6, T11, T13 by definition; every byte of every hit,
when it is lent and again when it is released (T12, L2); P2 to P7, P11; caps and ledgers (E1, E2);
the tree's invariants; and at the end that nothing is held, reserved or left over.
"""

from tests.support.core_machine import ClientMachine, DiskMachine, machine_settings

TestOneTier = ClientMachine.TestCase
TestOneTier.settings = machine_settings()

TestBothTiers = DiskMachine.TestCase
TestBothTiers.settings = machine_settings()

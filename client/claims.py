"""The claims of one client: prompts that it is computing, so that other processes wait for them.

A claim comes with a `Hit` or `Miss` that leaves much to compute. It ends with a put that covers the
prompt, with `drop_claim`, with the last reference to its result, or with the process (rule Q1).

All claims of one thread (or Trio task) share a connection, over which its takes go. So the daemon
sees who waits for whom: nobody waits for a claim of its own, and two that wait for each other are
found out (rule Q3).
"""

import weakref
from collections.abc import Callable
from typing import Final

import xxhash

from prefixcached.client.loans import Hold, Loan
from prefixcached.protocol import messages

_TOKEN_BYTES: Final = 4


class Claim(Hold):
    """The first tokens of a prompt, all but the last, are being computed here."""

    def __init__(self, loan: Loan, message: messages.DropClaim, take: messages.Take) -> None:
        super().__init__(loan, message)
        self._namespace = take.namespace
        self._nbytes = len(take.tokens) - _TOKEN_BYTES
        # Not the tokens: megabytes that stay make every later call allocate anew.
        self._digest = _digest_of(take.tokens, self._nbytes)

    def is_covered_by(self, namespace: str, tokens: bytes) -> bool:
        """Whether a put of these packed tokens fulfils it."""
        return (
            namespace == self._namespace
            and len(tokens) >= self._nbytes
            and _digest_of(tokens, self._nbytes) == self._digest
        )

    def __repr__(self) -> str:
        state = "alive" if self.is_alive else "ended"
        return f"<Claim on {self._nbytes // _TOKEN_BYTES} tokens, {state}>"


class ClaimBook:
    """All living claims of one cache, and whose they are. It keeps none of them alive.

    Args:
        owner: Returns the running thread or task.
    """

    def __init__(self, owner: Callable[[], object]) -> None:
        self._owner = owner
        self._loans: weakref.WeakKeyDictionary[object, weakref.ref[Loan]] = (
            weakref.WeakKeyDictionary()
        )
        self._claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()

    def own_loan(self) -> Loan | None:
        """Return the loan that carries the owner's claims, ready for a call, if there is one."""
        reference = self._loans.get(self._owner())
        loan = reference() if reference is not None else None
        return loan if loan is not None and loan.begin() else None

    def grant(
        self, loan: Loan, reply: messages.Hit | messages.Miss, take: messages.Take
    ) -> Claim | None:
        """Return the claim that a reply to ``take`` over ``loan`` carries, if it carries one."""
        if reply.claim is None:
            return None
        message = messages.DropClaim(reply.claim, reply.boot)
        claim = Claim(loan, message, take)
        self._claims[id(claim)] = claim
        self._loans[self._owner()] = weakref.ref(loan)
        return claim

    def put_ended(self, namespace: str, tokens: bytes, *, is_stored: bool) -> None:
        """End the claims that a put of ``tokens`` covers; the daemon knows of what it stored."""
        for claim in self._living():
            if claim.is_covered_by(namespace, tokens):
                claim.end(tell=not is_stored)

    def end_all(self) -> None:
        """End all claims."""
        for claim in self._living():
            claim.end()

    @property
    def count(self) -> int:
        """Claims that have not ended."""
        return sum(claim.is_alive for claim in self._living())

    def _living(self) -> list[Claim]:
        # A list at once: other threads add claims, and collections remove some.
        found = (reference() for reference in self._claims.valuerefs())
        return [claim for claim in found if claim is not None]


def _digest_of(tokens: bytes, nbytes: int) -> bytes:
    """Of the first ``nbytes``, without a copy of them."""
    return xxhash.xxh3_128_digest(memoryview(tokens)[:nbytes])

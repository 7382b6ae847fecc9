"""ClaimDesk: who is computing which prompt, so that others can wait for it. Part of RamTier, pure.

Rules Q1 to Q3: a take that leaves much to compute makes its session the claimant of that prompt.
A claim ends with a put that covers it, an explicit drop, or its session; it has no timeout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prefixcached.protocol.tokens import TokenArray, common_prefix_length

MAX_CLAIMS_PER_SESSION: Final = 16
"""Claims one connection may have; beyond it the oldest ends. Each keeps its prompt's tokens."""


@dataclass(slots=True, eq=False)
class Claim:
    """``session`` is computing tokens [0, length) of a prompt."""

    id: int
    session: int
    namespace: str
    tokens: TokenArray

    @property
    def length(self) -> int:
        """Tokens that the claimant will hold when it is done."""
        return int(self.tokens.size)


@dataclass(slots=True)
class ClaimCounters:
    """What became of claims."""

    granted: int = 0
    covered: int = 0
    dropped: int = 0
    orphaned: int = 0
    declined: int = 0


class ClaimDesk:
    """Owns the claims. `changed` is set when one ended, so that waiting takes look again."""

    def __init__(self, claim_min_tokens: int) -> None:
        self._min_tokens = claim_min_tokens
        self.claims: dict[int, Claim] = {}
        self.changed = False
        self.counters = ClaimCounters()

    def grant(
        self, claim_id: int, session: int, namespace: str, tokens: TokenArray, held: int
    ) -> int | None:
        """Make ``session`` the claimant of all but the last of ``tokens``; None if few are left.

        Args:
            claim_id: A number that names it, never used before.
            session: Whose claim it becomes.
            namespace: Of the prompt.
            tokens: The prompt, shape (tokens,).
            held: Leading tokens that the session was just given.
        """
        length = int(tokens.size) - 1
        if length - held < self._min_tokens:
            return None
        own = [claim for claim in self.claims.values() if claim.session == session]
        if len(own) >= MAX_CLAIMS_PER_SESSION:
            self._end(own[0])
        self.claims[claim_id] = Claim(claim_id, session, namespace, tokens[:length])
        self.counters.granted += 1
        return claim_id

    def worth_waiting_for(
        self, session: int, namespace: str, tokens: TokenArray, held: int,
        would_deadlock: Callable[[Claim], bool],
    ) -> tuple[Claim, int] | None:  # fmt: skip
        """Return the claim of another session that promises most, and up to which position.

        It must promise at least ``claim_min_tokens`` more than is held (rule Q2), and its claimant
        must not wait for ``session`` itself (rule Q3).
        """
        best: tuple[Claim, int] | None = None
        limit = int(tokens.size) - 1
        for claim in self.claims.values():
            if claim.namespace != namespace or claim.session == session:
                continue
            common = min(common_prefix_length(claim.tokens, tokens), limit)
            is_better = common - held >= self._min_tokens and (best is None or common > best[1])
            if is_better and not would_deadlock(claim):
                best = claim, common
        return best

    def published(self, namespace: str, tokens: TokenArray) -> None:
        """A put became visible: the claims that it covers have been fulfilled."""
        for claim in self._covered_by(namespace, tokens):
            self.counters.covered += 1
            self._end(claim)

    def declined(self, namespace: str, tokens: TokenArray) -> set[int]:
        """A put was declined: what it would have covered will not come. Return the ended claims."""
        ended = self._covered_by(namespace, tokens)
        for claim in ended:
            self.counters.declined += 1
            self._end(claim)
        return {claim.id for claim in ended}

    def drop(self, session: int, claim_id: int) -> None:
        """End a claim of this session; anything else is ignored."""
        claim = self.claims.get(claim_id)
        if claim is not None and claim.session == session:
            self.counters.dropped += 1
            self._end(claim)

    def client_gone(self, session: int) -> None:
        """End the claims of a connection."""
        for claim in [claim for claim in self.claims.values() if claim.session == session]:
            self.counters.orphaned += 1
            self._end(claim)

    def clear(self, namespace: str | None) -> None:
        """End the claims of a namespace, all when None (rule D11)."""
        for claim in list(self.claims.values()):
            if namespace in (None, claim.namespace):
                self._end(claim)

    def _covered_by(self, namespace: str, tokens: TokenArray) -> list[Claim]:
        return [
            claim
            for claim in self.claims.values()
            if claim.namespace == namespace
            and common_prefix_length(claim.tokens, tokens) == claim.length
        ]

    def _end(self, claim: Claim) -> None:
        del self.claims[claim.id]
        self.changed = True

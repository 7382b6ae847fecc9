"""Bytes and images of one tier by state, against hard caps (rules E1, E2). Pure."""

from collections.abc import Iterable


class Ledger:
    """What a tier has allocated. Every image is charged in exactly one state at any time."""

    def __init__(self, states: Iterable[str], bytes_cap: int, images_cap: int) -> None:
        self.bytes_cap = bytes_cap
        self.target_bytes = bytes_cap
        """What may be used for now: the cap, or less under memory pressure (rule M2)."""
        self.images_cap = images_cap
        self.bytes_by_state = dict.fromkeys(states, 0)
        self.images_by_state = dict.fromkeys(self.bytes_by_state, 0)
        self.bytes = 0
        self.images = 0
        self.peak_bytes = 0

    def add(self, state: str, nbytes: int, images: int = 1) -> None:
        """Charge ``nbytes`` of ``images`` images to ``state``."""
        self.bytes_by_state[state] += nbytes
        self.images_by_state[state] += images
        self.bytes += nbytes
        self.images += images
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def remove(self, state: str, nbytes: int, images: int = 1) -> None:
        """Discharge what `add` charged."""
        self.add(state, -nbytes, -images)
        if self.bytes_by_state[state] < 0 or self.images_by_state[state] < 0:
            raise RuntimeError(f"more was discharged from {state!r} than charged: {self!r}")

    def move(self, source: str, target: str, nbytes: int, images: int = 1) -> None:
        """Recharge from one state to another."""
        self.remove(source, nbytes, images)
        self.add(target, nbytes, images)

    @property
    def limit_bytes(self) -> int:
        """What reservations must stay within: the cap and the target."""
        return min(self.bytes_cap, self.target_bytes)

    @property
    def is_reduced(self) -> bool:
        """Whether the target is below the cap."""
        return self.target_bytes < self.bytes_cap

    def fits(self, nbytes: int, images: int, leaving: str = "") -> bool:
        """Whether so much more is within both limits, once what is in ``leaving`` has left."""
        spare_bytes = self.bytes_by_state.get(leaving, 0)
        spare_images = self.images_by_state.get(leaving, 0)
        return (
            self.bytes - spare_bytes + nbytes <= self.limit_bytes
            and self.images - spare_images + images <= self.images_cap
        )

    def __repr__(self) -> str:
        return f"<Ledger {self.bytes}/{self.bytes_cap} bytes {self.bytes_by_state}>"

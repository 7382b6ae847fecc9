"""PinDesk: prefetches and the pins they return. Part of RamTier, pure. Rules F1 to F4."""

from dataclasses import dataclass

from prefixcached.actors.desk import Answer, Shared
from prefixcached.actors.entries import Entry
from prefixcached.actors.labels import LabelDesk
from prefixcached.actors.parts import parts_of
from prefixcached.actors.promotions import PromotionDesk
from prefixcached.actors.reads import OpenFile, ReadDesk
from prefixcached.actors.resume import held, resident
from prefixcached.actors.takes import TakeDesk
from prefixcached.protocol.messages import Pinned, Prefetch
from prefixcached.protocol.tokens import token_array


@dataclass(slots=True, eq=False)
class Pin:
    """Entries that stay until the pin is released. ``answer`` is None once it was given."""

    id: int
    session: int
    entries: list[Entry]
    length: int
    answer: Answer | None
    promoting: int = 0


class PinDesk:
    """Owns the pins."""

    def __init__(
        self, shared: Shared, takes: TakeDesk, reads: ReadDesk, promotions: PromotionDesk,
        labels: LabelDesk,
    ) -> None:  # fmt: skip
        self._shared = shared
        self._index = shared.index
        self._takes = takes
        self._labels = labels
        self._reads = reads
        self._promotions = promotions
        self.pins: dict[int, Pin] = {}
        self.is_suspended = False
        """Set while memory is short: prefetches return an empty pin (rule M2)."""
        self.prefetches = 0
        self.empty = 0

    def prefetch(self, session: int, request: Prefetch, answer: Answer, now: float) -> None:
        """Bring what `take` would choose into RAM as far as it fits, and pin it."""
        self.prefetches += 1
        tokens = token_array(request.tokens)
        lookup = self._takes.look_up(request.namespace, tokens, int(tokens.size) - 1)
        if lookup.namespace is None or not lookup.any_length or self.is_suspended:
            self.empty += 1
            answer.set(Pinned(pin=None, length=0))
            return
        # The whole path is pinned, also where RAM needs less: it must stay to be found.
        available = resident if lookup.ram_length == lookup.any_length else held
        lent = parts_of(lookup.namespace.schema, lookup.path, lookup.any_length, available)
        segments = [s for s, _ in lookup.path.cut(lookup.any_length).steps]
        entries: list[Entry] = list(dict.fromkeys([*segments, *(p.entry for p in lent)]))
        pin = Pin(next(self._shared.numbers), session, entries, lookup.any_length, answer)
        self.pins[pin.id] = pin
        self._index.keep(entries)
        self._takes.use(entries, now)
        self._labels.mark(request.namespace, request.label, segments[-1], lookup.any_length, now)
        on_disk = {i: p.entry for i, p in enumerate(lent) if p.entry.memory is None}
        if not on_disk:
            self._answer(pin)
            return
        self._reads.read(session, on_disk, lambda files, _: self._verified(pin, on_disk, files))

    def unpin(self, session: int, pin_id: int, boot: str) -> None:
        """End a pin; anything that is not this session's is ignored."""
        pin = self.pins.get(pin_id)
        if pin is not None and pin.session == session and boot in ("", self._shared.boot):
            self._end(pin)

    def client_gone(self, session: int) -> None:
        """End the pins of a connection."""
        for pin in [pin for pin in self.pins.values() if pin.session == session]:
            self._end(pin)

    def give_up_pending(self) -> None:
        """Answer the prefetches that still wait with an empty pin (rule M2)."""
        for pin in [pin for pin in self.pins.values() if pin.answer is not None]:
            self._give_up(pin)

    def _verified(
        self, pin: Pin, on_disk: dict[int, Entry], files: dict[int, OpenFile] | None
    ) -> None:
        for file in (files or {}).values():
            file.close()
        if pin.id not in self.pins:
            return
        # What a put absorbed meanwhile is not needed any more, whatever became of its file.
        if files is None and any(entry in pin.entries for entry in on_disk.values()):
            self._give_up(pin)
            return

        def promoted(_: float) -> None:
            pin.promoting -= 1
            if not pin.promoting and pin.id in self.pins:
                self._answer(pin)

        for entry in on_disk.values():
            pin.promoting += self._promotions.promote(entry, promoted)
        if not pin.promoting:
            self._answer(pin)

    def _answer(self, pin: Pin) -> None:
        if not all(entry.attached for entry in pin.entries):  # cleared meanwhile (rule F4)
            self._give_up(pin)
            return
        answer, pin.answer = pin.answer, None
        assert answer is not None
        answer.set(Pinned(pin=pin.id, length=pin.length))

    def _give_up(self, pin: Pin) -> None:
        answer, pin.answer = pin.answer, None
        assert answer is not None
        self.empty += 1
        self._end(pin)
        answer.set(Pinned(pin=None, length=0))

    def _end(self, pin: Pin) -> None:
        del self.pins[pin.id]
        self._index.let_go(pin.entries)

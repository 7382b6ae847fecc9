"""What values an option admits: each kind reads text and TOML values alike. Pure."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prefixcached.daemon.sizes import parse_size


class Kind(Protocol):
    """One kind of value."""

    @property
    def allowed(self) -> str:
        """What may stand there, for people."""
        ...

    @property
    def metavar(self) -> str:
        """What stands for the value in the help of a flag."""
        ...

    def parse(self, raw: object) -> object:
        """Return the value of ``raw``: text of a flag or variable, or a value of TOML.

        Raises:
            ValueError: It is none of this kind.
        """
        ...


@dataclass(frozen=True, slots=True)
class SizeKind:
    """Bytes, a share, or one of a few ``words``. Kept as written: shares need the machine."""

    whole: str
    words: tuple[str, ...] = ()
    share: bool = True

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        forms = ["a size (8GiB, 500MB, plain bytes)"]
        if self.share:
            forms.append(f"a share of {self.whole} (12%)")
        return ", ".join([*forms, *self.words])

    @property
    def metavar(self) -> str:
        """See `Kind`."""
        return "|".join(["SIZE", *self.words])

    def parse(self, raw: object) -> object:
        """See `Kind`."""
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise ValueError("not a size")
        if raw in self.words:
            return raw
        if not self.share and isinstance(raw, str) and "%" in raw:
            raise ValueError("not a share of anything")
        parse_size(raw, 100)
        return raw


@dataclass(frozen=True, slots=True)
class NumberKind:
    """A finite number from ``least`` to ``most``, whole if ``is_whole``."""

    unit: str
    least: float
    most: float
    is_whole: bool = False

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        what = "a whole number" if self.is_whole else "a number"
        unit = f" of {self.unit}" if self.unit else ""
        return f"{what}{unit}, {self.least:g} to {self.most:.10g}"

    @property
    def metavar(self) -> str:
        """See `Kind`."""
        return self.unit.upper() or "NUMBER"

    def parse(self, raw: object) -> object:
        """See `Kind`."""
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError("not a number")
        number = float(raw)
        if not math.isfinite(number) or not self.least <= number <= self.most:
            raise ValueError("out of range")
        if self.is_whole:
            if number != int(number):
                raise ValueError("not whole")
            return int(number)
        return number


@dataclass(frozen=True, slots=True)
class ChoiceKind:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return ", ".join(self.words)

    @property
    def metavar(self) -> str:
        """See `Kind`."""
        return f"[{'|'.join(self.words)}]"

    def parse(self, raw: object) -> object:
        """See `Kind`."""
        if raw not in self.words:
            raise ValueError("none of them")
        return raw


@dataclass(frozen=True, slots=True)
class PathKind:
    """A path; ``~`` is the home directory."""

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return "an absolute path, or one that begins with ~"

    @property
    def metavar(self) -> str:
        """See `Kind`."""
        return "DIRECTORY"

    def parse(self, raw: object) -> object:
        """See `Kind`."""
        if not isinstance(raw, str | Path) or not raw:
            raise ValueError("not a path")
        if "\0" in str(raw):
            raise ValueError("no path has a NUL")
        try:
            path = Path(raw).expanduser()
        except RuntimeError as error:
            raise ValueError("~ names no user here") from error
        if isinstance(raw, Path):  # from a flag, where a relative path means what the shell means
            return path.absolute()
        if not path.is_absolute():
            raise ValueError("relative to what? launchd starts the daemon in /")
        return path

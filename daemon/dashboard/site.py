"""Site: what the dashboard's server has, by path. It owns the token and the bytes of its files.

Everything lies below the token: ``/TOKEN/`` is the page, whose links are relative. Whoever does not
know the token gets the same "not found" for every path.
"""

import hmac
import importlib.util
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import parse_qsl

import msgspec

from prefixcached.daemon.loopback_http import Answer

INSTALL: Final = "pip install 'prefixcached[dashboard]'"

MAX_QUERY_FIELDS: Final = 8
"""The page sends three."""

MAX_BOOT_CHARACTERS: Final = 64
"""As in the protocol."""

HEADERS: Final = (
    # The charting library needs neither inline scripts nor eval for these charts, and no inline
    # styles where it finds a style sheet under the name that it looks for (page.html).
    (
        "Content-Security-Policy",
        "; ".join((
            "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
            "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        )),
    ),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)  # fmt: skip
"""Nothing of elsewhere is loaded, nobody elsewhere learns the address or frames the page."""

FILES: Final = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "charts.css": ("charts.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "tables.js": ("tables.js", "text/javascript; charset=utf-8"),
    "history.js": ("history.js", "text/javascript; charset=utf-8"),
    "texts.js": ("texts.js", "text/javascript; charset=utf-8"),
}
"""By name in the address: the file in this package, and its type."""

CHARTS: Final = "plotly.min.js"
"""The charting library, from the package `plotly`, under its own name."""


class MissingCharts(Exception):  # noqa: N818, its text is shown as it is
    """The charting library is not installed; the text says what to install."""


class Since(msgspec.Struct, frozen=True):
    """What the page has already: of which run of the daemon, and the numbers of its last rows."""

    boot: Annotated[str, msgspec.Meta(max_length=MAX_BOOT_CHARACTERS)] = ""
    second: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    minute: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


Look = Callable[[Since], Awaitable[bytes]]
"""Gives what the page shows, as JSON."""

Tree = Callable[[], Awaitable[bytes]]
"""Gives the prefix tree, as JSON."""


class Site:
    """What is served.

    Args:
        token: The first part of every path.
        look: Answers ``look``.
        tree: Answers ``tree``.

    Raises:
        MissingCharts: Without the charting library there is nothing to show.
    """

    def __init__(self, token: str, look: Look, tree: Tree) -> None:
        self._token = token
        self._look = look
        self._tree = tree
        here = resources.files("prefixcached.daemon.dashboard")
        self._files = {
            name: Answer(content_type, here.joinpath(file).read_bytes(), HEADERS)
            for name, (file, content_type) in FILES.items()
        }
        self._files[CHARTS] = Answer(
            "text/javascript; charset=utf-8", charts_file().read_bytes(), HEADERS
        )

    async def respond(self, target: str) -> Answer | None:
        """Return what ``target`` names; None where the token is wrong or nothing is there."""
        path, _, query = target.partition("?")
        token, slash, name = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token, self._token) or not slash:
            return None
        match name:
            case "look":
                since = since_of(query)
                return None if since is None else _json(await self._look(since))
            case "tree":
                return _json(await self._tree())
            case _:
                return self._files.get(name)


def _json(body: bytes) -> Answer:
    return Answer("application/json", body, HEADERS)


def since_of(query: str) -> Since | None:
    """Return what a query says; None where it is none of the page's."""
    try:
        fields = dict(parse_qsl(query, strict_parsing=bool(query), max_num_fields=MAX_QUERY_FIELDS))
        return msgspec.convert(fields, Since, strict=False)
    except (ValueError, msgspec.ValidationError):
        return None


def charts_file() -> Path:
    """Return the charting library's file.

    Raises:
        MissingCharts: It is not installed.
    """
    # Found, not imported: the package's own code is not needed.
    found = importlib.util.find_spec("plotly")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder) / "package_data" / CHARTS
        if file.is_file():
            return file
    raise MissingCharts(f"the dashboard needs plotly: {INSTALL}")

"""A headless Chromium in a process of its own, driven over a pipe (DevTools protocol).

Messages are JSON that ends with a zero byte, on descriptors 3 and 4 of the browser: no port is
opened and no driver is needed.
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

WAIT_SECONDS: Final = 60.0
"""For an answer, or for something to appear: a browser's start on a busy machine."""

POLL_SECONDS: Final = 0.05


def chromium() -> str | None:
    """Return the browser's path, None where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    return None


class Page:
    """One tab: `session` names it to the browser."""

    def __init__(self, browser: "Browser", target: str, session: str) -> None:
        self.target = target
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol on this tab."""
        return self._browser.call(method, self._session, **parameters)

    def events(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events of one kind so far."""
        return [
            event["params"]
            for event in self._browser.events
            if event["method"] == method and event.get("sessionId") == self._session
        ]

    def value(self, expression: str) -> Any:
        """Return what JavaScript's ``expression`` is, as JSON."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return ``expression`` once it is true; while the page loads it may fail."""
        guarded = f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()"
        return until(lambda: self.value(guarded), expression)

    def text(self) -> str:
        """Return the text that a person sees."""
        return str(self.value("document.body.innerText"))

    def picture(self) -> bytes:
        """Return the whole page as a PNG."""
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        return base64.b64decode(answer["data"])


class Browser:
    """Starts it; a context manager that leaves nothing behind."""

    def __init__(self, path: str, width: int = 1280, height: int = 1000) -> None:
        self.events: list[dict[str, Any]] = []
        self._home = Path(tempfile.mkdtemp(prefix="pfxc-browser-"))
        self._buffer = b""
        self._last = 0
        reading, self._to_browser = os.pipe()
        self._from_browser, writing = os.pipe()
        command = [
            path, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            f"--user-data-dir={self._home}", f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        # The browser wants its pipes at 3 and 4; a shell puts them there.
        line = f'exec "$@" 3<&{reading} 4>&{writing}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", *command], pass_fds=(reading, writing),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env={**os.environ, "HOME": str(self._home)},
        )  # fmt: skip
        os.close(reading)
        os.close(writing)

    def open(self, address: str, **media: str) -> Page:
        """Open a tab with the events that tests look at, and load ``address`` in it.

        ``media`` are CSS features, such as ``prefers_color_scheme="dark"``.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        features = [
            {"name": name.replace("_", "-"), "value": value} for name, value in media.items()
        ]
        page.call("Emulation.setEmulatedMedia", features=features)
        page.call("Page.navigate", url=address)
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; AssertionError where it fails."""
        self._last += 1
        request = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            request["sessionId"] = session
        os.write(self._to_browser, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            message = self._message(deadline)
            if message.get("id") == self._last:
                assert "error" not in message, (method, message)
                result: dict[str, Any] = message["result"]
                return result
            if "method" in message:
                self.events.append(message)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._from_browser], [], [], left)[0], "the browser hangs"
            data = os.read(self._from_browser, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Its children are of the group that it leads.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to_browser)
        os.close(self._from_browser)
        shutil.rmtree(self._home, ignore_errors=True)


def until(ask: Callable[[], Any], what: str) -> Any:
    """Ask until the answer is true, and return it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"never true: {what}"
        time.sleep(POLL_SECONDS)
    return answer

"""`prefixcached mlx-lm-server` as a process, and a chat with it over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from prefixcached.protocol.paths import SOCKET_VARIABLE
from tests.support.openblas import openblas_environment

START_SECONDS = 120.0
"""For importing mlx_lm and loading a model on a machine that runs other tests as well."""

REQUEST_SECONDS = 240.0
STOP_SECONDS = 30.0

Messages = Sequence[dict[str, str]]


class Answer(NamedTuple):
    """What one request brought."""

    text: str
    prompt_tokens: int
    cached_tokens: int


class MlxLmServer:
    """A server on a port of its own; a context manager that leaves nothing behind.

    Args:
        model: The folder of its model.
        directory: Where its log is written.
        socket_path: The daemon's socket; None runs the installed mlx_lm.server itself.
        *flags: More flags of mlx_lm.server.
    """

    def __init__(self, model: Path, directory: Path, socket_path: Path | None, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.is_shared = socket_path is not None
        self.log_file = directory / f"server-{self.port}.log"
        module = (
            ["mlx_lm", "server"]
            if socket_path is None
            else ["prefixcached.daemon.cli", "mlx-lm-server"]
        )
        self._command = [
            sys.executable, "-m", *module, "--model", str(model), "--port", str(self.port), *flags,
        ]  # fmt: skip
        self._environment = {
            **os.environ,
            **openblas_environment(),
            "HF_HUB_OFFLINE": "1",
            SOCKET_VARIABLE: str(socket_path or ""),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def log(self) -> str:
        """What it wrote so far."""
        return self.log_file.read_text(errors="replace")

    def chat(self, messages: Messages, *, max_tokens: int = 16, **options: Any) -> Answer:
        """Ask for the answer to ``messages``, greedily; AssertionError with the log on an error."""
        with self.request(messages, max_tokens=max_tokens, **options) as response:
            said: dict[str, Any] = json.load(response)
        usage = said["usage"]
        return Answer(
            text=said["choices"][0]["message"]["content"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )

    def request(self, messages: Messages, **options: Any) -> Any:
        """Send a chat request and return the open response."""
        body = json.dumps({"messages": messages, "temperature": 0, **options}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            body,
            {"Content-Type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=REQUEST_SECONDS)
        except (urllib.error.URLError, TimeoutError) as error:
            raise AssertionError(f"{error}; the server's log:\n{self.log()}") from error

    def __enter__(self) -> Self:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_listening():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = f"the server did not start; its log:\n{self.log()}"
                self.close()
                raise AssertionError(said)
        return self

    def _is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            # A process that imports for seconds is not asked a thousand times a second.
            assert self._process is not None
            try:
                self._process.wait(0.1)
            except subprocess.TimeoutExpired:
                return False
            return False
        return True

    def interrupt(self) -> int:
        """Stop it as Ctrl-C does, and return its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(STOP_SECONDS)

    def close(self) -> None:
        """End it however it stands."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        print(self.log())

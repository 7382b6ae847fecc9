"""Draws the pictures of the dashboard from a longer run of the demo's processes and model.

Three processes with the real SmolLM2-135M answer questions under two system prompts, through one
daemon. A headless Chromium, which must be installed, takes the pictures. From the root:
``PYTHONPATH=. .venv/bin/python docs/images/make_dashboard_pictures.py``
"""

import json
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

from prefixcached.client.demo_model import prepare
from prefixcached.client.openblas import openblas_environment
from prefixcached.daemon.commands.demo import LATER_QUESTION, QUESTIONS, SYSTEM
from tests.daemon.test_dashboard import dashboard_of
from tests.support.browser import Browser, chromium
from tests.support.daemon_process import DaemonProcess

HERE = Path(__file__).resolve().parent
SYSTEMS = (SYSTEM, "You are a pirate who has sailed all seas. Answer in one short sentence.")
MORE_QUESTIONS = (
    "Why is the sky blue?", "What is a mineral?", "How do ships float?", "Who made the first map?",
    "How far away is the moon?", "What do owls eat?", "What is the longest river?",
)  # fmt: skip
MAX_TOKENS = 24


def ask_all(worker: "subprocess.Popen[str]", first: int) -> None:
    """Ask one process every question, beginning with another one than its neighbours do."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    questions = (*QUESTIONS, LATER_QUESTION, *MORE_QUESTIONS)
    for number in range(len(questions)):
        request = {
            "system": SYSTEMS[number % 3 == 2],
            "question": questions[(first + number) % len(questions)],
            "max_tokens": MAX_TOKENS,
            "reused": 0,
        }
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
        for line in worker.stdout:
            if json.loads(line)["event"] == "answer":
                break


def main() -> None:
    """Run the processes and draw."""
    browser_path = chromium()
    if browser_path is None:
        sys.exit("no Chromium: apt-get install chromium")
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pfxc-pictures-")))
        model = prepare(home)
        daemon = stack.enter_context(DaemonProcess("--ram-bytes", "192MiB", "--ssd-bytes", "2GiB"))
        dashboard = stack.enter_context(dashboard_of(daemon))
        command = [sys.executable, "-m", "prefixcached.client.demo_worker", str(model),
                   str(daemon.socket)]  # fmt: skip
        environment = {**daemon.environment, **openblas_environment(), "MLX_DISABLE_COMPILE": "1"}
        workers = []
        for _ in range(3):
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL, env=environment,
                                      text=True)  # fmt: skip
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        threads = [
            threading.Thread(target=ask_all, args=(worker, 4 * number))
            for number, worker in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        threads[0].join()
        browser = stack.enter_context(Browser(browser_path))
        for theme in ("light", "dark"):
            page = browser.open(dashboard.address, prefers_color_scheme=theme)
            page.wait_for("document.getElementById('state').textContent === 'live'")
            page.wait_for("document.querySelectorAll('#tree path.surface').length > 3")
            (HERE / f"dashboard-{theme}.png").write_bytes(page.picture())
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()

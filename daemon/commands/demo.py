"""`prefixcached demo`: a daemon and several processes that share one real model's prompts.

Two acts: three processes share what the first computed, in RAM; then the daemon is killed and
started again, and a fourth process finds the same on SSD.

Everything happens in a temporary directory, which is removed at the end. The daemon and all model
processes are children of this one, which owns them from start to end.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from prefixcached.daemon.commands.asking import asking
from prefixcached.daemon.commands.common import counted, plain
from prefixcached.daemon.commands.leaving import leaving_cleanly
from prefixcached.protocol.messages import List
from prefixcached.protocol.paths import SOCKET_VARIABLE

if TYPE_CHECKING:
    # `serve` imports this module as well, and stays small without rich.
    from rich.console import Console

SYSTEM: Final = (
    "You are a helpful assistant who answers questions about the world for the visitors of a "
    "small museum. The museum shows maps, globes, stuffed animals, minerals, old ships and a "
    "large model of the solar system. Visitors of every age stand in front of you and ask about "
    "what they have just seen. Give one short, correct and friendly answer in plain English, and "
    "stop when you have given it. Use full sentences. Name the thing that was asked for. Give a "
    "number where a number was asked for. Do not repeat the question, do not make lists, do not "
    "use headings, and do not tell stories. If the question has more than one right answer, give "
    "the best known one. If a child asks, use easy words. If a teacher asks, you may add one more "
    "fact. If you do not know the answer, say that you do not know it, and send the visitor to "
    "the desk at the entrance, where a guide is glad to help. The museum is open from nine to "
    "five every day, and the last tour through all its rooms begins at four in the afternoon."
)
"""223 tokens of SmolLM2, which the processes share: what computing it costs can be felt."""

QUESTIONS: Final = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "What is the largest planet of the solar system?",
)

LATER_QUESTION: Final = "Which ocean is the largest?"
"""Asked by a process that starts after the daemon was killed and started again."""

LOAD_SECONDS: Final = 30.0
"""For a new daemon to read the headers of a handful of files."""

Show = Callable[[int, int], None]


class DemoFailure(click.ClickException):
    """The demonstration did not show what it promises."""


@click.command(
    short_help="Show processes share a system prompt, with a real model.",
    epilog="Example: prefixcached demo --model-dir ~/.cache/smollm2",
)
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIRECTORY",
    help="Keep the prepared model (540 MB) here and find it again the next time.",
)
@click.option(
    "--max-tokens", metavar="TOKENS", default=32, show_default=True, help="Length of an answer."
)
@click.option(
    "--keep", is_flag=True, help="Keep the daemon until Enter is pressed, to look at it meanwhile."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def demo(model_dir: Path | None, max_tokens: int, keep: bool, as_json: bool) -> None:
    """Show three processes share a system prompt through a daemon, with a real small model.

    Fails unless the second and third process reuse all of it, unless a fourth one does so from SSD
    after the daemon was killed and started again, and unless all answers equal those of a run that
    resumes the same tokens without a daemon.
    """
    from rich.console import Console

    from prefixcached.client.demo_model import DemoModelMissingError

    console = Console(stderr=as_json)
    with ExitStack() as stack:
        stack.enter_context(leaving_cleanly())
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pfxc-demo-")))
        try:
            model = _prepare(model_dir or home / "model", console)
        except DemoModelMissingError as error:
            raise click.ClickException(str(error)) from error
        report = _share(home, model, max_tokens, console, keep=keep)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report, console)
    _check(report)


def _prepare(folder: Path, console: "Console") -> Path:
    from rich.progress import Progress

    from prefixcached.client.demo_model import MODEL_NAME, prepare

    console.print(f"Preparing {MODEL_NAME} in {folder}", markup=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Dequantising", total=None)
        return prepare(
            folder,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _share(
    home: Path, model: Path, max_tokens: int, console: "Console", *, keep: bool
) -> dict[str, Any]:
    """Let the processes answer, and one more without the daemon; return what they said."""
    from prefixcached.client import connect

    questions = (*QUESTIONS, LATER_QUESTION)
    answers: list[dict[str, Any]] = []
    with ExitStack() as stack:
        console.print("Starting the daemon")
        socket, daemon = stack.enter_context(_daemon(home))
        console.print(f"Starting {len(QUESTIONS)} processes, each loads the model")
        workers = [
            stack.enter_context(_worker(home / f"process-{number}.log", model, socket))
            for number in range(1, len(QUESTIONS) + 1)
        ]
        for worker in workers:
            _wait_for(worker, "ready")
        for number, (worker, question) in enumerate(zip(workers, QUESTIONS, strict=True), 1):
            answers.append(_ask(worker, question, max_tokens, 0, f"Process {number}", console))
        with connect(socket, fail_open=False, start=False) as cache:
            statistics = cache.stats()
            flushed = cache.flush()
        with asking(socket) as tell:
            listing = msgspec.to_builtins(tell(List()))
        written = counted(flushed.written, "image")
        console.print(f"Flushed {written} to SSD; killing the daemon (SIGKILL)")
        daemon.process.kill()
        daemon.process.wait()
    console.print("Starting the daemon again, and one more process")
    with (
        _daemon(home) as (socket, _),
        _worker(home / f"process-{len(questions)}.log", model, socket) as late,
    ):
        _wait_for(late, "ready")
        _wait_until_loaded(socket)
        number = len(questions)
        answers.append(_ask(late, LATER_QUESTION, max_tokens, 0, f"Process {number}", console))
        with connect(socket, fail_open=False, start=False) as cache:
            restarted = cache.stats()
        if keep:
            _keep(socket, console)
    console.print("Answering again in one process without a daemon, from the same tokens on")
    with _worker(home / "alone.log", model, None) as alone:
        _wait_for(alone, "ready")
        expected = [
            _ask(alone, question, max_tokens, answer["reused"], "Without a daemon", console)
            for question, answer in zip(questions, answers, strict=True)
        ]
    return {
        "processes": answers,
        "without_daemon": expected,
        "shared_prefixes": _shared_prefixes([answer["prompt"] for answer in answers]),
        "daemon": statistics,
        "restarted_daemon": restarted,
        "listing": listing,
    }


def _keep(socket: Path, console: "Console") -> None:
    """Let people look at the daemon with other commands."""
    console.print(
        f"Look at it from another terminal: {SOCKET_VARIABLE}={socket} {sys.argv[0]} dashboard "
        "(or top, status, ls). Enter ends it.",
        markup=False,
        soft_wrap=True,
    )
    sys.stdin.readline()


def _wait_until_loaded(socket: Path) -> None:
    """Return once the daemon has read its index; hits appear as it grows."""
    from prefixcached.client import connect

    deadline = time.monotonic() + LOAD_SECONDS
    with connect(socket, fail_open=False, start=False) as cache:
        while cache.stats()["ram_tier"]["loading"] and time.monotonic() < deadline:
            time.sleep(0.05)


def _shared_prefixes(prompts: list[list[int]]) -> list[int]:
    """Return for each prompt how many leading tokens an earlier one has too."""
    from prefixcached.client.demo_worker import shared_tokens

    return [
        max((shared_tokens(prompt, earlier) for earlier in prompts[:index]), default=0)
        for index, prompt in enumerate(prompts)
    ]


def _check(report: dict[str, Any]) -> None:
    if not report["restarted_daemon"]["ram_tier"]["takes"]["ssd_hits"]:
        raise DemoFailure("the process after the restart did not reuse what is on SSD")
    pairs = zip(report["processes"], report["without_daemon"], strict=True)
    for number, (answer, expected) in enumerate(pairs, 1):
        shared = report["shared_prefixes"][number - 1]
        if answer["reused"] != shared:
            raise DemoFailure(
                f"process {number} reused {answer['reused']} of {shared} shared tokens"
            )
        if answer["answer"] != expected["answer"]:
            raise DemoFailure(
                f"process {number} answered {answer['text']!r}, and without the daemon "
                f"{expected['text']!r}"
            )


def _print(report: dict[str, Any], console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="One system prompt, four processes", title_justify="left")
    for column in ("process", "prompt tokens", "reused tokens", "seconds to first token"):
        table.add_column(column, justify="right")
    table.add_column("answer")
    for number, answer in enumerate(report["processes"], 1):
        table.add_row(
            str(number),
            str(len(answer["prompt"])),
            str(answer["reused"]),
            f"{answer['seconds_to_first_token']:.2f}",
            Text(plain(" ".join(answer["text"].split()))),
        )
    console.print(table)
    ram = report["daemon"]["ram_tier"]
    console.print(
        f"The daemon holds {ram['ram_bytes'] / (1 << 20):.1f} MiB in {ram['images']} images, and "
        f"gave {ram['takes']['tokens_reused']} of {ram['takes']['tokens_requested']} tokens asked "
        "for."
    )
    console.print(
        f"Process {len(report['processes'])} started after the daemon was killed and started "
        "again: what it reused came from SSD."
    )
    console.print("Without the daemon, one process gave the same answers from the same tokens on.")


# -- processes ----------------------------------------------------------------------------------


class Child(NamedTuple):
    """A process with JSON or plain lines on its pipes, and the file of its standard error."""

    questions: IO[str]
    answers: IO[str]
    log: Path
    process: subprocess.Popen[str]

    def failure(self, what: str) -> DemoFailure:
        """Return an error that ends with the child's last words."""
        return DemoFailure(f"{what}\n{self.log.read_text(errors='replace')[-2000:]}")


@contextmanager
def _daemon(home: Path) -> Iterator[tuple[Path, Child]]:
    """A daemon of its own, READY, and its socket; it ends with the context."""
    socket = home / "socket"
    command = [
        sys.executable, "-m", "prefixcached.daemon.cli", "serve",
        "--socket", str(socket), "--state-dir", str(home / "state"),
        "--ram-bytes", "1GiB", "--ssd-bytes", "2GiB",
    ]  # fmt: skip
    with _child(command, home / "daemon.log", {}) as child:
        line = child.answers.readline()
        if not line.startswith("READY "):
            raise child.failure(f"the daemon said {line!r} and not READY")
        yield socket, child


@contextmanager
def _worker(log: Path, model: Path, socket: Path | None) -> Iterator[Child]:
    """A process that answers questions, with the daemon's cache if there is a socket."""
    from prefixcached.client.openblas import openblas_environment

    environment = openblas_environment()
    if sys.platform == "linux":
        # Fused kernels would be compiled with a C++ compiler that may not be there.
        environment["MLX_DISABLE_COMPILE"] = "1"
    command = [sys.executable, "-m", "prefixcached.client.demo_worker", str(model)]
    with _child(command + ([str(socket)] if socket else []), log, environment) as child:
        yield child


@contextmanager
def _child(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[Child]:
    with (
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | environment,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Child(process.stdin, process.stdout, log, process)
        finally:
            process.terminate()


def _ask(
    worker: Child, question: str, max_tokens: int, reused: int, who: str, console: "Console"
) -> dict[str, Any]:
    from rich.progress import Progress

    request = {
        "system": SYSTEM,
        "question": question,
        "max_tokens": max_tokens,
        "reused": reused,
    }
    worker.questions.write(json.dumps(request) + "\n")
    worker.questions.flush()
    console.print(f"{who}: {question}")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Prompt", total=None)
        return _wait_for(
            worker,
            "answer",
            lambda done, total: progress.update(task, completed=done, total=total),
        )


def _wait_for(worker: Child, event: str, show: Show | None = None) -> dict[str, Any]:
    """Return the worker's next ``event``, showing its progress until then."""
    while line := worker.answers.readline():
        told: dict[str, Any] = json.loads(line)
        if told.pop("event") == event:
            return told
        if show is not None:
            show(told["done"], told["total"])
    raise worker.failure("a model process ended early")

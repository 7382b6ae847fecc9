"""`prefixcached demo`: a daemon and several processes that share one real model's prompts.

Everything happens in a temporary directory, which is removed at the end. The daemon and all model
processes are children of this one, which owns them from start to end.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

SYSTEM: Final = (
    "You are the assistant of a small public library in a town by the sea. Answer every question "
    "in one short and friendly sentence, and never in more than twenty words. The library opens "
    "at nine in the morning and closes at six in the evening, from Tuesday to Saturday. On Sunday "
    "and Monday it is closed. A reader may borrow five books for three weeks, and two films for "
    "one week. Whoever returns a book late pays ten cents a day. The reading room on the first "
    "floor has twelve desks, fast internet and a view of the harbour. Children under twelve meet "
    "every Wednesday afternoon, when Maria reads stories to them. New readers get their card at "
    "the front desk and need a passport or an identity card. If you do not know something, say so "
    "and name the front desk. Never talk about politics, and never give medical advice. You speak "
    "English only, you stay calm with angry readers, and you thank everybody who asks you "
    "something. You never promise a book that you have not seen on the shelf yourself."
)
"""About 200 tokens of SmolLM2: what the processes share."""

QUESTIONS: Final = (
    "How many books may I borrow?",
    "When do the children meet?",
    "Is the library open on Monday?",
)

START_SECONDS: Final = 60.0
"""For a daemon to say READY on a machine that does much else."""

Show = Callable[[int, int], None]


class DemoFailure(click.ClickException):
    """The demonstration did not show what it promises."""


@click.command()
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the prepared model (540 MB) here and find it again the next time.",
)
@click.option("--max-tokens", default=32, show_default=True, help="Length of an answer.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
def demo(model_dir: Path | None, max_tokens: int, as_json: bool) -> None:
    """Show three processes share a system prompt through a daemon, with a real small model.

    Fails unless the second and third process reuse all of it, and unless all answers equal those
    of a run that resumes the same tokens without a daemon.
    """
    from prefixcached.client.demo_model import DemoModelMissingError

    console = Console(stderr=as_json)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pfxc-demo-")))
        try:
            model = _prepare(model_dir or home / "model", console)
        except DemoModelMissingError as error:
            raise click.ClickException(str(error)) from error
        report = _share(home, model, max_tokens, console)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report, console)
    _check(report)


def _prepare(folder: Path, console: Console) -> Path:
    from prefixcached.client.demo_model import MODEL_NAME, prepare

    with Progress(console=console, transient=True) as progress:
        console.print(f"Preparing {MODEL_NAME} in {folder}")
        task = progress.add_task("Dequantising", total=None)
        return prepare(
            folder,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _share(home: Path, model: Path, max_tokens: int, console: Console) -> dict[str, Any]:
    """Let the processes answer, and one more without the daemon; return what they said."""
    from prefixcached.client import connect

    answers: list[dict[str, Any]] = []
    with ExitStack() as stack:
        console.print("Starting the daemon")
        socket = stack.enter_context(_daemon(home))
        console.print(f"Starting {len(QUESTIONS)} processes, each loads the model")
        workers = [
            stack.enter_context(_worker(home / f"process-{number}.log", model, socket))
            for number in range(1, len(QUESTIONS) + 1)
        ]
        for worker in workers:
            _wait_for(worker, "ready")
        for number, (worker, question) in enumerate(zip(workers, QUESTIONS, strict=True), 1):
            answers.append(_ask(worker, question, max_tokens, 0, f"Process {number}", console))
        with connect(socket, fail_open=False) as cache:
            statistics = cache.stats()
    console.print("Answering again in one process without a daemon, from the same tokens on")
    with _worker(home / "alone.log", model, None) as alone:
        _wait_for(alone, "ready")
        expected = [
            _ask(alone, question, max_tokens, answer["reused"], "Without a daemon", console)
            for question, answer in zip(QUESTIONS, answers, strict=True)
        ]
    return {
        "processes": answers,
        "without_daemon": expected,
        "shared_prefixes": _shared_prefixes([answer["prompt"] for answer in answers]),
        "daemon": statistics,
    }


def _shared_prefixes(prompts: list[list[int]]) -> list[int]:
    """Return for each prompt how many leading tokens an earlier one has too."""
    from prefixcached.client.demo_worker import shared_tokens

    return [
        max((shared_tokens(prompt, earlier) for earlier in prompts[:index]), default=0)
        for index, prompt in enumerate(prompts)
    ]


def _check(report: dict[str, Any]) -> None:
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


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table(title="One system prompt, three processes", title_justify="left")
    for column in ("process", "prompt tokens", "reused tokens", "seconds to first token"):
        table.add_column(column, justify="right")
    table.add_column("answer")
    for number, answer in enumerate(report["processes"], 1):
        table.add_row(
            str(number),
            str(len(answer["prompt"])),
            str(answer["reused"]),
            f"{answer['seconds_to_first_token']:.2f}",
            answer["text"],
        )
    console.print(table)
    ram = report["daemon"]["ram_tier"]
    console.print(
        f"The daemon holds {ram['ram_bytes'] / (1 << 20):.1f} MiB in {ram['images']} images, and "
        f"gave {ram['takes']['tokens_reused']} of {ram['takes']['tokens_requested']} tokens asked "
        "for."
    )
    console.print("Without the daemon, one process gave the same answers from the same tokens on.")


# -- processes ----------------------------------------------------------------------------------

Child = subprocess.Popen[str]


@contextmanager
def _daemon(home: Path) -> Iterator[Path]:
    """A daemon of its own, READY; it ends with the context."""
    socket = home / "socket"
    command = [
        sys.executable, "-m", "prefixcached.daemon.cli", "serve",
        "--socket", str(socket), "--state-dir", str(home / "state"),
    ]  # fmt: skip
    with _child(command, home / "daemon.log", {}) as child:
        line = _line(child)
        if not line.startswith("READY "):
            raise DemoFailure(f"the daemon said {line!r} and not READY\n{_log(child)}")
        yield socket


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
    with log.open("w", encoding="utf-8") as stderr:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | environment,
            text=True,
        )
    with child:
        child.args = [*command, str(log)]
        try:
            yield child
        finally:
            child.terminate()


def _ask(
    worker: Child, question: str, max_tokens: int, reused: int, who: str, console: Console
) -> dict[str, Any]:
    request = {
        "system": SYSTEM,
        "question": question,
        "max_tokens": max_tokens,
        "reused": reused,
    }
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    with Progress(console=console, transient=True) as progress:
        console.print(f"{who}: {question}")
        task = progress.add_task("Prompt", total=None)
        return _wait_for(
            worker,
            "answer",
            lambda done, total: progress.update(task, completed=done, total=total),
        )


def _wait_for(worker: Child, event: str, show: Show | None = None) -> dict[str, Any]:
    """Return the worker's next ``event``, showing its progress until then."""
    while line := _line(worker):
        told: dict[str, Any] = json.loads(line)
        if told.pop("event") == event:
            return told
        if show is not None:
            show(told["done"], told["total"])
    raise DemoFailure(f"a model process ended early\n{_log(worker)}")


def _line(child: Child) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def _log(child: Child) -> str:
    assert isinstance(child.args, list)
    return Path(str(child.args[-1])).read_text(encoding="utf-8", errors="replace")[-2000:]

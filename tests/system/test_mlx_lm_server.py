"""`prefixcached mlx-lm-server`: two servers over one daemon, with a real model."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.mlx_lm_server import Answer, MlxLmServer
from tests.support.until import until

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

CALL_SECONDS = 5.0
"""The client's timeout: the longest that one look-up or store may take."""

SYSTEM = {
    "role": "system",
    "content": "You are a helpful assistant for the visitors of a small museum. Give one short, "
    "correct and friendly answer in plain English, and stop when you have given it. Use full "
    "sentences. Name the thing that was asked for. Do not repeat the question, and make no lists.",
}
QUESTIONS = (
    "What is the capital of France?",
    "And what is the capital of Italy?",
    "How many legs does a spider have?",
    "Which planet is the largest?",
)

PATHS: dict[str, dict[str, Any]] = {"batched": {}, "sequential": {"seed": 7}}
"""Options of a request that make mlx_lm.server serve it in a batch, or alone."""


STORED = "tokens stored as assistant"
"""What a server logs when an answer is stored, or cannot be."""


class Turn(NamedTuple):
    """One question and its answer."""

    question: str
    answer: Answer


def ask(server: MlxLmServer, question: str, before: list[Turn], **options: Any) -> Turn:
    """Go on with a chat."""
    messages = [SYSTEM]
    for turn in before:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer.text})
    messages.append({"role": "user", "content": question})
    stored = server.log().count(STORED)
    answer = server.chat(messages, **options)
    # mlx_lm.server stores the answer after it was given.
    if server.is_shared:
        until(lambda: server.log().count(STORED) > stored)
    return Turn(question, answer)


def seconds_of_calls(server: MlxLmServer) -> list[float]:
    """How long each look-up and each store held up the thread that generates."""
    lines = re.findall(r"tokens (?:is shared|are shared|stored) .*?([0-9.]+) s\)", server.log())
    return [float(seconds) for seconds in lines]


@pytest.fixture
def servers(
    smollm2: Path, daemon: DaemonProcess, tmp_path: Path
) -> Iterator[tuple[MlxLmServer, MlxLmServer]]:
    """Two servers over one daemon."""
    with ExitStack() as stack:
        left, right = (MlxLmServer(smollm2, tmp_path, daemon.socket) for _ in range(2))
        yield stack.enter_context(left), stack.enter_context(right)


@pytest.mark.parametrize("path", PATHS)
def test_a_chat_moves_to_another_server(
    smollm2: Path, servers: tuple[MlxLmServer, MlxLmServer], tmp_path: Path, path: str
) -> None:
    """T1, T12: what one server computed the other reuses, and answers as mlx_lm.server alone does.

    The reference is the installed mlx_lm.server, unchanged, which resumes at the same positions.
    """
    options = PATHS[path]
    left, right = servers
    chat: list[Turn] = []
    for server, question in zip((left, right, left), QUESTIONS[:3], strict=True):
        chat.append(ask(server, question, chat, **options))
    with MlxLmServer(smollm2, tmp_path, None) as alone:
        reference: list[Turn] = []
        for question in QUESTIONS[:3]:
            reference.append(ask(alone, question, reference, **options))
    assert "Paris" in chat[0].answer.text
    assert [turn.answer.text for turn in chat] == [turn.answer.text for turn in reference]
    cached = [turn.answer.cached_tokens for turn in chat]
    assert cached == [turn.answer.cached_tokens for turn in reference]
    # The whole prompt of the turn before, and its answer.
    assert all(now > before.answer.prompt_tokens for now, before in zip(cached[1:], chat[:-1]))  # noqa: B905, the last turn has no next one


def test_the_very_same_prompt(servers: tuple[MlxLmServer, MlxLmServer]) -> None:
    """T3: an exact hit, of which the stock server's thread dies, is answered by both paths."""
    left, right = servers
    for options in PATHS.values():
        first = ask(left, QUESTIONS[0], [], **options).answer
        again = ask(right, QUESTIONS[0], [], **options).answer
        assert again.cached_tokens == again.prompt_tokens - 1
        assert again.text == first.text


def test_system_prompts_are_shared_at_once(servers: tuple[MlxLmServer, MlxLmServer]) -> None:
    """P8: another user's chat finds the system prompt while the first answer is still written."""
    left, right = servers
    for options in PATHS.values():
        messages = [SYSTEM, {"role": "user", "content": f"{QUESTIONS[3]} {options}"}]
        with left.request(messages, stream=True, max_tokens=200, **options) as stream:
            first = next(line for line in stream if line.startswith(b"data: "))
            assert json.loads(first.removeprefix(b"data: "))["choices"]
            other = ask(right, QUESTIONS[2], [], **options).answer
            assert other.cached_tokens > other.prompt_tokens // 2


def test_the_daemon_is_killed_in_mid_conversation(
    servers: tuple[MlxLmServer, MlxLmServer], daemon: DaemonProcess
) -> None:
    """C4: both servers go on without the daemon, none slower by its timeout, and share again."""
    left, right = servers
    chat = [ask(left, QUESTIONS[0], [])]
    chat.append(ask(right, QUESTIONS[1], chat))
    assert chat[1].answer.cached_tokens > 0
    messages = [SYSTEM, {"role": "user", "content": QUESTIONS[3]}]
    with left.request(messages, stream=True, max_tokens=24) as stream:
        lines = iter(stream)
        assert next(line for line in lines if line.startswith(b"data: "))
        daemon.kill()
        assert any(line.startswith(b"data: [DONE]") for line in lines)
    for server in (left, right, left, right):
        alone = ask(server, QUESTIONS[2], chat).answer
        assert alone.cached_tokens == 0
        assert alone.text
    for server in (left, right):
        assert "no-daemon" in server.log()
        assert max(seconds_of_calls(server)) < CALL_SECONDS
    daemon.start()
    answers: list[Answer] = []

    def is_cached() -> bool:
        answers.append(ask(left, QUESTIONS[2], chat).answer)
        return answers[-1].cached_tokens > 0

    until(is_cached)
    until(lambda: ask(right, QUESTIONS[2], chat).answer.cached_tokens > 0)
    assert answers[-1].text == answers[0].text


def test_it_stops_as_the_stock_server_does(smollm2: Path, tmp_path: Path) -> None:
    """Ctrl-C ends it, as it ends mlx_lm.server, also without a daemon."""
    with MlxLmServer(smollm2, tmp_path, tmp_path / "nobody") as server:
        answer = server.chat([{"role": "user", "content": "Say yes."}], max_tokens=2)
        assert answer.cached_tokens == 0
        # mlx on a CPU may abort as it tears down its threads, in mlx_lm.server itself as well.
        assert server.interrupt() in (0, -signal.SIGABRT)

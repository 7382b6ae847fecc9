"""`prefixcached mlx-lm-server` on mlx_lm.server's own code, with tiny models in this process."""

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm.server as plain
import pytest
from click.testing import CliRunner
from mlx.utils import tree_flatten
from mlx_lm.models.cache import LRUPromptCache

from prefixcached.client import Cache, connect
from prefixcached.client.generation import with_tokens_before
from prefixcached.client.mlx_lm_server import (
    UnsupportedServerError,
    binding,
    check,
    sharing,
)
from prefixcached.client.shared_prompt_cache import SharedPromptCache
from prefixcached.daemon.cli import main
from tests.client.kv.loopback import build
from tests.client.word_tokenizer import word_tokenizer
from tests.support import models
from tests.support.daemon_process import DaemonProcess

TEMPLATE = (
    "{% for m in messages %}{{ {'system': '2', 'user': '3', 'assistant': '4'}[m['role']] }} "
    "{{ m['content'] }} 5 {% endfor %}{% if add_generation_prompt %}4{% endif %}"
)
SYSTEM = " ".join(map(str, models.tokens("qwen3_next", 40)))
QUESTION = " ".join(map(str, models.tokens("qwen3_next", 30, seed=1)))
CONVERSATION = (SYSTEM, QUESTION, "9 8 7", "11 12 13")

SYSTEM_TOKENS = 43
"""System prompt with its marks, and the mark of the question."""

PROMPT_TOKENS = 75
"""System prompt, question, and the mark of the answer."""


def folder(directory: Path, name: str = "llama", seed: int = 0) -> str:
    """A model's folder, as `mlx_lm.load` wants it."""
    place = directory / f"{name}-{seed}"
    place.mkdir()
    mx.random.seed(seed)
    model = type(build(name))(build(name).args)
    mx.save_safetensors(
        str(place / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        {"format": "mlx"},
    )
    config = {k: v for k, v in dataclasses.asdict(model.args).items() if v is not None}
    (place / "config.json").write_text(json.dumps(config))
    tokenizer = word_tokenizer(models.vocab_size(name))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    settings = place / "tokenizer_config.json"
    # A class chosen by the model's type would split the words into digits.
    generic = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(generic))
    return str(place)


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[Cache]:
    with connect(daemon.socket) as connected:
        yield connected


class Server:
    """mlx_lm.server without HTTP, given the cache as `run` gives it."""

    def __init__(self, flags: argparse.Namespace, cache: Cache | None) -> None:
        self.flags = flags
        provider: Any = plain.ModelProvider
        self.shared: Any = LRUPromptCache(10)
        if cache is not None:
            self.shared = SharedPromptCache()
            provider = binding(plain.ModelProvider, self.shared, cache)
        self.provider = provider(flags)
        self.generator = plain.ResponseGenerator(self.provider, self.shared)

    def answer(
        self,
        *contents: str,
        seed: int | None = None,
        penalty: float = 0.0,
        draft: str | None = None,
        model: str = "default_model",
    ) -> tuple[list[int], int]:
        """The tokens that answer system, user, assistant, user, ..., and the cached tokens."""
        roles = ["system", *["user", "assistant"] * len(contents)]
        messages = [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=False)
        ]
        arguments = plain.GenerationArguments(
            model=plain.ModelDescription(model, draft or "default_model", cast(Any, None)),
            sampling=plain.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
            logits=plain.LogitsProcessorArguments(None, penalty, 200, 0.0, 20, 0.0, 20),
            stop_words=[],
            max_tokens=6,
            num_draft_tokens=2,
            logprobs=False,
            top_logprobs=-1,
            seed=seed,
            chat_template_kwargs=None,
        )
        request = plain.CompletionRequest("chat", "", messages, None, None)
        context, responses = self.generator.generate(request, arguments)
        tokens = [response.token for response in responses]
        return tokens, context.prompt_cache_count

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.generator.stop_and_join()


Start = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def start(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts servers, one at a time; ``is_shared=False`` for the stock one."""

    @contextmanager
    def begin(model: str, *, is_shared: bool = True, **flags: Any) -> Iterator[Server]:
        defaults: dict[str, Any] = {
            "model": model,
            "adapter_path": None,
            "draft_model": None,
            "trust_remote_code": False,
            "chat_template": "",
            "use_default_chat_template": False,
            "chat_template_args": {},
            "pipeline": False,
            "decode_concurrency": 4,
            "prompt_concurrency": 2,
            "prefill_step_size": 512,
            "prompt_cache_bytes": 1 << 30,
            "kv_bits": None,
            "kv_group_size": 32,
            "quantized_kv_start": 50,
        }
        server = Server(argparse.Namespace(**defaults | flags), cache if is_shared else None)
        with monkeypatch.context() as patch, server:
            if is_shared:
                generate = sharing(vars(plain)["stream_generate"], server.shared)
                patch.setattr(plain, "stream_generate", generate)
            yield server

    return begin


@pytest.mark.parametrize(
    ("name", "seed", "of_chat", "of_system"),
    [
        ("llama", None, PROMPT_TOKENS, SYSTEM_TOKENS),
        ("llama", 3, PROMPT_TOKENS, SYSTEM_TOKENS),
        # Recurrent state is found where it was stored. mlx-lm tells the batched path alone where
        # the system prompt ends.
        ("qwen3_next", None, PROMPT_TOKENS - 1, SYSTEM_TOKENS),
        ("qwen3_next", 3, PROMPT_TOKENS - 1, 0),
    ],
)
def test_two_servers(
    tmp_path: Path, start: Start, name: str, seed: int | None, of_chat: int, of_system: int
) -> None:
    """T1, T3, P11: both paths reuse what another server computed, and answer exact hits."""
    model = folder(tmp_path, name)
    with start(model) as server:
        first, cached = server.answer(*CONVERSATION[:2], seed=seed)
        assert cached == 0
    with start(model) as server:
        again, cached = server.answer(*CONVERSATION[:2], seed=seed)
        assert (again, cached) == (first, PROMPT_TOKENS - 1)
        assert server.answer(*CONVERSATION, seed=seed)[1] == of_chat
        assert server.answer(SYSTEM, "13 14 15 16 17", seed=seed)[1] == of_system


def test_segments_are_stored_as_they_finish(tmp_path: Path, start: Start) -> None:
    """P11: the batched path stores system prompt, prompt and answer, as mlx-lm types them."""
    with start(folder(tmp_path)) as server:
        server.answer(*CONVERSATION[:2])
    # The answer is stored after it was given.
    assert {kind: told["n_sequences"] for kind, told in server.shared.stats_by_type().items()} == {
        "system": 1,
        "user": 1,
        "assistant": 1,
    }


@pytest.mark.parametrize("seed", [None, 3])
def test_a_repetition_penalty_sees_the_whole_prompt(
    tmp_path: Path, start: Start, seed: int | None
) -> None:
    """With a penalty the answer to a reused prompt is the one of a server that reuses nothing."""
    model = folder(tmp_path)
    with start(model, is_shared=False) as server:
        (likely, *_), _ = server.answer(SYSTEM, QUESTION, seed=seed, penalty=1.9)
        # What it would say is in the prompt now, which a penalty of the whole prompt forbids.
        question = f"{likely} {QUESTION}"
        expected, _ = server.answer(SYSTEM, question, seed=seed, penalty=1.9)
        assert expected[0] != likely
    with start(model) as server:
        server.answer(SYSTEM, question, seed=seed)
        penalised, cached = server.answer(SYSTEM, question, seed=seed, penalty=1.9)
    assert cached == PROMPT_TOKENS
    assert penalised == expected


def test_quantised_kv(tmp_path: Path, start: Start) -> None:
    """N4: servers with equal flags share quantised KV, and others do not see it."""
    model = folder(tmp_path)
    for flags, expected in (
        ({"kv_bits": 8}, 0),
        ({"kv_bits": 8}, PROMPT_TOKENS - 1),
        ({"kv_bits": 4}, 0),
        ({"kv_bits": 8, "quantized_kv_start": 60}, 0),
        ({}, 0),
    ):
        with start(model, **flags) as server:
            _, cached = server.answer(*CONVERSATION[:2])
            assert cached == expected, flags


def test_a_draft_model(tmp_path: Path, start: Start) -> None:
    """N2: speculative decoding reuses the KV of both models, and answers as without a cache."""
    model, draft = folder(tmp_path), folder(tmp_path, seed=1)
    with start(model, is_shared=False, draft_model=draft) as server:
        expected, _ = server.answer(*CONVERSATION[:2])
    with start(model, draft_model=draft) as server:
        assert server.answer(*CONVERSATION[:2]) == (expected, 0)
    with start(model, draft_model=draft) as server:
        answered, cached = server.answer(*CONVERSATION[:2])
        assert answered == expected
        assert cached == PROMPT_TOKENS - 1
    with start(model) as server:
        assert server.answer(*CONVERSATION[:2])[1] == PROMPT_TOKENS - 1


def test_a_draft_model_with_a_penalty(tmp_path: Path, start: Start) -> None:
    """FIELD 2: what speculative decoding shows a processor does not depend on what is reused."""
    model, draft = folder(tmp_path), folder(tmp_path, seed=1)
    with start(model, is_shared=False, draft_model=draft) as server:
        expected, _ = server.answer(*CONVERSATION[:2], penalty=1.7)
    for reused in (0, PROMPT_TOKENS - 1):
        with start(model, draft_model=draft) as server:
            assert server.answer(*CONVERSATION[:2], penalty=1.7) == (expected, reused)


@pytest.mark.parametrize(("name", "flags"), [("llama", {"kv_bits": 8}), ("gemma3_text", {})])
def test_speculation_that_spoils_the_caches(
    tmp_path: Path, start: Start, name: str, flags: dict[str, Any]
) -> None:
    """T12: where mlx-lm leaves rejected tokens in the caches nothing is shared, and it answers."""
    model, draft = folder(tmp_path, name), folder(tmp_path, name, seed=1)
    with start(model, draft_model=draft, **flags) as server:
        for _ in range(2):
            tokens, cached = server.answer(*CONVERSATION[:2])
            assert (len(tokens) > 0, cached) == (True, 0)
    assert server.shared.statistics().misses == {"unknown-model": 2}
    assert server.shared.statistics().declined == {"unknown-model": 2}


def test_another_model_is_loaded(tmp_path: Path, start: Start) -> None:
    """N1: a server that changes models keeps them apart, and lets go of the first."""
    first, second = folder(tmp_path), folder(tmp_path, seed=1)
    with start(first) as server:
        server.answer(*CONVERSATION[:2])
        gone = weakref.ref(server.provider.model)
        assert server.answer(*CONVERSATION[:2], model=second)[1] == 0
        gc.collect()
        assert gone() is None
        assert server.answer(*CONVERSATION[:2])[1] == PROMPT_TOKENS - 1
        assert server.answer(*CONVERSATION[:2], model=second)[1] == PROMPT_TOKENS - 1


def test_without_a_daemon(tmp_path: Path, start: Start, daemon: DaemonProcess) -> None:
    """C4: no daemon costs misses alone; both paths answer as before."""
    with start(folder(tmp_path)) as server:
        answers = {seed: server.answer(*CONVERSATION[:2], seed=seed) for seed in (None, 3)}
        daemon.kill()
        for seed, (tokens, _) in answers.items():
            assert server.answer(*CONVERSATION[:2], seed=seed) == (tokens, 0)


def test_processors_see_the_tokens_before() -> None:
    """Reused tokens stand before those that are forwarded; nothing changes where there are none."""
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    assert with_tokens_before([processor], []) == [processor]
    (wrapped,) = with_tokens_before([processor], [1, 2])
    wrapped(mx.array([3, 4], mx.uint32), mx.zeros((1, 8)))
    assert seen == [[1, 2, 3, 4]]


# -- another mlx-lm -------------------------------------------------------------------------------


def copied() -> Any:
    """A module like mlx_lm.server, to be changed."""
    module = types.SimpleNamespace(**vars(plain))
    for name in ("ModelProvider", "ResponseGenerator", "LRUPromptCache"):
        original = getattr(plain, name)
        setattr(module, name, type(name, (), dict(vars(original))))
    return module


def test_the_installed_server_is_supported() -> None:
    """The mlx-lm of these tests has what is replaced, and a faithful copy of it too."""
    check(plain)
    check(copied())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: delattr(m.ModelProvider, "_load"), "ModelProvider._load"),
        (lambda m: delattr(m.ModelProvider, "reset"), "ModelProvider.reset"),
        (lambda m: delattr(m, "LRUPromptCache"), "does not use LRUPromptCache"),
        (lambda m: setattr(m, "run", lambda: None), "its run does not use LRUPromptCache"),
        (lambda m: setattr(m, "main", print), "its main does not use ModelProvider"),
        (lambda m: delattr(m.ResponseGenerator, "_serve_single"), "stream_generate"),
        (lambda m: setattr(m.LRUPromptCache, "reorder", lambda self: None), "reorder"),
    ],
)
def test_another_server_is_refused(change: Callable[[Any], Any], said: str) -> None:
    """A server that would run uncached is not started; the text says what differs."""
    module = copied()
    change(module)
    with pytest.raises(UnsupportedServerError, match=said) as caught:
        check(module)
    assert "pip install" in str(caught.value)


def test_the_command_refuses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line ends with 1 and one line that says what to do."""
    monkeypatch.delattr(plain.ModelProvider, "_load")
    shown = CliRunner().invoke(main, ["mlx-lm-server", "--model", "x"])
    assert shown.exit_code == 1
    assert shown.output.startswith("Error: mlx-lm 0.")
    assert "ModelProvider._load" in shown.output


def start_of(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Start a server that cannot load its model: it ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "prefixcached.daemon.cli", "mlx-lm-server", "--port", "0",
         *arguments],
        capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(directory)},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "why"),
    [("/nonexistent", "there is no such folder"), ("", "config.json"), ("no/such-model", "snap")],
)
def test_a_model_that_cannot_be_loaded_ends_the_server(
    tmp_path: Path, daemon: DaemonProcess, model: str, why: str
) -> None:
    """One line says what cannot be loaded and why, with exit code 1; nothing goes on listening."""
    model = model or str(tmp_path)
    ended = start_of(tmp_path, "--socket", str(daemon.socket), "--model", model)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    # mlx_lm's other thread writes beside it.
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("Error")]
    assert said.startswith(f"Error: the model cannot be loaded (--model {model}): ")
    assert why in said


@pytest.mark.slow
def test_the_start_says_whether_the_cache_is_used(tmp_path: Path, daemon: DaemonProcess) -> None:
    """C4: one line, first of all; without a daemon why not, and what to do."""
    model = ("--model", str(tmp_path))
    first = start_of(tmp_path, "--socket", str(daemon.socket), *model).stderr.splitlines()[0]
    assert first == f"prefixcached: the cache is used: process {daemon.pid} serves {daemon.socket}"
    first = start_of(tmp_path, "--socket", str(tmp_path / "s"), *model).stderr.splitlines()[0]
    assert first.startswith(
        "prefixcached: the cache is not used until a daemon is there: no daemon"
    )
    assert "prefixcached serve" in first


def test_a_bad_variable_is_wrong_usage() -> None:
    """Whether to start a daemon is neither yes nor no: one line, exit code 2."""
    shown = CliRunner().invoke(
        main, ["mlx-lm-server", "--model", "x"], env={"PREFIXCACHED_START": "maybe"}
    )
    assert shown.exit_code == 2
    assert "PREFIXCACHED_START = 'maybe' is not allowed" in shown.output
    assert shown.output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "--decode-concurrency"),
        (["-h"], 0, "--prefill-step-size"),
        (["--socket", "x/s", "--port", "1", "--nonsense"], 2, "arguments: --nonsense\n"),
        (["--port", "many"], 2, "argument --port"),
    ],
)
def test_the_flags_are_the_servers(arguments: list[str], status: int, said: str) -> None:
    """All flags but --socket go to mlx_lm.server, which answers for them, its help included."""
    ended = subprocess.run(
        [sys.executable, "-m", "prefixcached.daemon.cli", "mlx-lm-server", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert ended.returncode == status, ended.stderr
    assert said in ended.stdout + ended.stderr
    assert "prefixcached mlx-lm-server" in ended.stdout + ended.stderr
    if status == 0:
        assert "--socket" in ended.stdout

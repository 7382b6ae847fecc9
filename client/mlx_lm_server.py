"""`mlx_lm.server` with the shared cache, and otherwise as it is installed.

`run` owns the three names of `mlx_lm.server` that it replaces, for the life of the process:

- `LRUPromptCache` gives the one `SharedPromptCache`;
- `ModelProvider` tells it which model was loaded, since a model's name does not tell its weights,
  and ends the process where the first one cannot be: the server would listen and answer nothing;
- `stream_generate`, which serves one request alone (a seed, an image, quantised KV, a draft model),
  stores the prompt when it is done, as the batched path does by itself, and shows the tokens that
  were not forwarded to logits processors.

Where the installed server lacks one of them, or would not look it up, it is not started at all:
a server that silently shares nothing helps nobody.
"""

import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn

import mlx_lm.server as plain

from prefixcached.client.cache import Cache
from prefixcached.client.generation import check_speculation, with_tokens_before
from prefixcached.client.prompt_cache import PromptCache
from prefixcached.client.shared_prompt_cache import SharedPromptCache

PROGRAM: Final = "prefixcached mlx-lm-server"
"""What the server's own usage text calls it."""

_REPLACED: Final = (
    ("run", "LRUPromptCache"),
    ("main", "ModelProvider"),
    ("ResponseGenerator._serve_single", "stream_generate"),
)
"""The functions of `mlx_lm.server` that look up what is replaced, and what they look up."""

_EXTENDED: Final = (
    "ModelProvider._load", "ModelProvider.load_default", "ModelProvider.reset",
)  # fmt: skip

_KV_FLAGS: Final = ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")
"""The server's flags that the format of KV depends on; not every version has all of them."""

_logger = logging.getLogger(__name__)


class UnsupportedServerError(RuntimeError):
    """The installed `mlx_lm.server` is not one that can be given the shared cache."""


def run(arguments: Sequence[str], cache: Cache) -> None:
    """Run `mlx_lm.server` until it ends.

    Args:
        arguments: Its command line, all of it.
        cache: The daemon's cache.

    Raises:
        UnsupportedServerError: It cannot be given the cache; nothing was started.
        SystemExit: Its own, for ``--help`` and wrong usage.
    """
    check(plain)
    shared = SharedPromptCache()
    server: Any = plain
    server.LRUPromptCache = lambda *_, **__: shared
    server.ModelProvider = binding(plain.ModelProvider, shared, cache)
    server.stream_generate = sharing(server.stream_generate, shared)
    sys.argv = [PROGRAM, *arguments]
    server.main()


def check(server: Any = plain) -> None:
    """Make sure that ``server`` looks up what `run` replaces, and asks nothing unknown of it.

    Raises:
        UnsupportedServerError: It does not; the text says what differs and what to do.
    """
    for function, name in _REPLACED:
        code = getattr(_find(server, function), "__code__", None)
        if code is None or name not in code.co_names or not hasattr(server, name):
            raise _unsupported(f"its {function} does not use {name}")
    for name in _EXTENDED:
        if not callable(_find(server, name)):
            raise _unsupported(f"it has no {name}")
    for name in vars(server.LRUPromptCache):
        is_offered = hasattr(SharedPromptCache, name) or isinstance(
            getattr(server.LRUPromptCache, name), type
        )
        if not name.startswith("_") and not is_offered:
            raise _unsupported(f"its LRUPromptCache has {name}, which is not known here")


def binding(provider: type, shared: SharedPromptCache, cache: Cache) -> type:
    """Return mlx-lm's ``provider`` of models, telling ``shared`` of each that it loads."""

    class BindingProvider(provider):  # type: ignore[misc] # a class that mypy sees as Any
        """Loads models as mlx-lm does."""

        def load_default(self) -> None:
            try:
                super().load_default()
            except Exception as error:  # noqa: BLE001, whatever it is: nothing will be served
                _end(_unloadable(self.cli_args, error))

        def _load(self, *arguments: Any, **options: Any) -> None:
            super()._load(*arguments, **options)
            if self.is_distributed:
                _logger.info("the model is spread over several processes: its KV is not shared")
                return
            shares = [_share(self.model, self.cli_args, cache)]
            if self.draft_model is not None:
                shares.append(_share(self.draft_model, self.cli_args, cache))
                try:
                    _check_speculation(shares)
                except ValueError as error:
                    _logger.warning("KV is not shared: %s", error)
                    return
            shared.bind(self.model_key, *shares)

        def reset(self) -> None:
            # Before the next model is loaded this one's memory must be free.
            shared.unbind_all()
            super().reset()

    return BindingProvider


def sharing(generate: Callable[..., Iterator[Any]], shared: SharedPromptCache) -> Any:
    """Return mlx-lm's ``generate``, sharing the KV of a prompt as soon as it is computed."""

    def stream_generate(**options: Any) -> Iterator[Any]:
        latest = shared.latest
        # A prompt with an image: the server asked for other ids than it forwards (rule N5).
        if latest is None or options.get("input_embeddings") is not None:
            return generate(**options)
        kv, report = options["prompt_cache"], options["prompt_progress_callback"]

        def progress(processed: int, total: int) -> None:
            report(processed, total)
            if 0 < processed == total - 1:
                shared.insert_cache(latest.model, latest.tokens[:-1], kv, cache_type="user")

        options["prompt_progress_callback"] = progress
        # mlx-lm's speculative decoding shows them the end of a prompt alone, reused or not.
        if options.get("draft_model") is None:
            options["logits_processors"] = with_tokens_before(
                options.get("logits_processors") or [], latest.tokens[: latest.reused]
            )
        return generate(**options)

    return stream_generate


def _share(model: Any, flags: Any, cache: Cache) -> PromptCache:
    """Return ``model``'s share of ``cache``, in the KV format that the server's flags ask for."""
    asked = {name: getattr(flags, name) for name in _KV_FLAGS if hasattr(flags, name)}
    return PromptCache(model, cache=cache, **asked)


def _unloadable(flags: Any, error: Exception) -> str:
    named = " ".join(
        f"--{name.replace('_', '-')} {value}"
        for name in ("model", "adapter_path", "draft_model")
        if (value := getattr(flags, name, None)) is not None
    )
    why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    # The hub takes a folder that is not there for one of its names, and says what is wrong with it.
    if flags.model.startswith(("/", ".", "~")) and not os.path.exists(flags.model):
        why = "there is no such folder"
    return (
        f"Error: the model cannot be loaded ({named}): {why}. A model is a folder of an MLX model, "
        "or its name on the Hugging Face hub."
    )


def _end(said: str) -> NoReturn:
    """End the process with one line. From the thread that generates nothing else would end it."""
    sys.stderr.write(f"{said}\n")
    sys.stderr.flush()
    os._exit(1)


def _check_speculation(shares: Sequence[PromptCache]) -> None:
    """Raise ValueError unless KV comes right out of mlx-lm's speculative decoding."""
    for share in shares:
        check_speculation(share)
        if share.kv_bits is not None:
            raise ValueError(
                "mlx-lm leaves rejected tokens in the caches that it quantises while it "
                "speculates: leave --kv-bits or --draft-model out"
            )


def _find(server: Any, path: str) -> Any:
    found = server
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _unsupported(what: str) -> UnsupportedServerError:
    version = importlib.metadata.version("mlx-lm")
    return UnsupportedServerError(
        f"mlx-lm {version} cannot be given the shared cache: {what}. Install the version that "
        "prefixcached was made for (`pip install 'mlx-lm==0.32.*'`), or a newer prefixcached; "
        "`mlx_lm.server` itself runs without the shared cache."
    )

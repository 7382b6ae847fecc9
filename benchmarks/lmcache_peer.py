"""LMCache's side of `against_lmcache`, run by LMCache's own interpreter through `worker`.

Its clients are used as its own adapters use them. A role is "path operation":

- *blocks*: the worker copies between its paged KV and the server's shared-memory pool, as an
  engine does (`EngineDrivenTransferContext`, what LMCache's "auto" chooses on a CPU).
- *contiguous*: the worker copies between one tensor and the pool, as the SDK does
  (`ContiguousTransferWrapper`); a retrieve gives a fresh tensor.

The third path, where the KV pages themselves lie in shared memory and the server copies
(`lmcache_driven`, which LMCache does not choose by itself on a CPU), was the fastest at neither.

Nothing of prefixcached is imported: its dependencies are not installed there.
"""

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch  # type: ignore[import-not-found, unused-ignore]
import zmq  # type: ignore[import-not-found, unused-ignore]
from lmcache.sdk.wrapper.contiguous import (  # type: ignore[import-not-found, unused-ignore]
    ContiguousTransferWrapper,
)
from lmcache.v1.multiprocess.custom_types import (  # type: ignore[import-not-found, unused-ignore]
    IPCCacheServerKey,
)
from lmcache.v1.multiprocess.transfer_context.shm import (  # type: ignore[import-not-found, unused-ignore]
    EngineDrivenContextShm,
)
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (  # type: ignore[import-not-found, unused-ignore]
    create_transfer_context,
)
from lmcache.v1.multiprocess.transport.factory import (  # type: ignore[import-not-found, unused-ignore]
    RequestClientFactory,
)

from benchmarks.harness import Case, require

ANSWER_SECONDS: Final = 120.0
"""Its longest answer is a copy; a loaded machine must not turn one into an error."""


class Peer:
    """One worker process of LMCache, with a prompt's KV registered.

    Blocks are of one chunk each, tokens before heads ([2, tokens, heads, dim] a block): its copies
    for the CPU were clearly faster with none of the other sizes and layouts tried.
    """

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self.path = path
        self.tokens: int = options["tokens"]
        heads, dim = options["heads"], options["dim"]
        self._name = f"{path} {uuid.uuid4().hex}"
        self._ids = tuple(options["prompt"])
        self._instance = uuid.uuid4().int >> 65
        self._context = zmq.Context()
        self._client = RequestClientFactory.create(options["url"], context=self._context)
        self._chunk: int = self._answer(self._client.get_chunk_size())
        require(self.tokens % self._chunk == 0, f"{self.tokens} tokens are not whole chunks")
        chunks = self.tokens // self._chunk
        # Block 0 stands for "no data" there; then the prompt's blocks, then as many to fill.
        self._source = list(range(1, chunks + 1))
        self._target = list(range(chunks + 1, 2 * chunks + 1))
        # The layout is all that the contiguous path registers: one block, as the SDK does.
        blocks = 1 if path == "contiguous" else 2 * chunks + 1
        shape = (blocks, 2, self._chunk, heads, dim)
        layers = [_random(shape) for _ in range(options["layers"])]
        self._layers = {f"layer.{index}": layer for index, layer in enumerate(layers)}
        self._transfer = create_transfer_context(
            self._layers,
            instance_id=self._instance,
            req_client=self._client,
            mode="engine_driven",
        )
        self._transfer.register(
            self._layers, self._name, 1, 1, ANSWER_SECONDS, layout_hints={"kv_layout": "NHD"}
        )
        kind = type(self._transfer.engine_driven_context)
        # Without room in /dev/shm it would quietly pickle instead.
        require(kind is EngineDrivenContextShm, f"LMCache transfers by {kind.__name__}")
        if path == "contiguous":
            self._one = _random((2, len(layers), self.tokens, heads * dim))
            self._contiguous = ContiguousTransferWrapper(
                self._transfer.engine_driven_context, self._chunk
            )

    def store(self) -> str:
        """Store the prompt's KV; return the request's id."""
        request = uuid.uuid4().hex
        key = self._key(request, 0)
        if self.path == "contiguous":
            require(self._contiguous.store(key, self._instance, self._one), "not stored")
        else:
            event = self._transfer.create_recorded_event()
            sent = self._transfer.submit_store(request, key, self._layers, [self._source], event, 1)
            require(self._answer(sent), "not stored")
        return request

    def retrieve(self) -> tuple[str, Any]:
        """Look the prompt up and retrieve all of it; return the request's id and a tensor if any.

        Into the target blocks, or into a fresh tensor where the path is *contiguous*.
        """
        request = uuid.uuid4().hex
        self._answer(self._client.lookup(self._key(request, None), 1))
        found = self._answer(self._client.wait_prefetch_status(request, ANSWER_SECONDS))
        require(found == len(self._source), f"{found} of {len(self._source)} chunks found")
        key = self._key(request, 0)
        if self.path == "contiguous":
            return request, self._contiguous.retrieve(key, self._instance)
        event = self._transfer.create_recorded_event()
        sent = self._transfer.submit_retrieve(request, key, self._layers, [self._target], event, 1)
        require(self._answer(sent), "not retrieved")
        return request, None

    def require_equal(self, retrieved: Any) -> None:
        """Raise `WrongBytes` unless what was retrieved has the bits of what was stored."""
        if self.path == "contiguous":
            require(retrieved is not None, "nothing retrieved")
            require(_same(retrieved, self._one), "the retrieved KV differs")
            return
        for name, layer in self._layers.items():
            same = _same(layer[self._target], layer[self._source])
            require(same, f"the retrieved KV of {name} differs")

    def wipe(self) -> None:
        """Overwrite the target blocks, so that an earlier retrieve cannot pass for this one."""
        if self.path != "contiguous":
            for layer in self._layers.values():
                layer[self._target[0] :].zero_()

    def clear(self) -> None:
        """Let the server forget everything."""
        self._answer(self._client.clear(True))

    def end(self, request: str) -> None:
        """End a request, which frees the server's notes on it."""
        self._answer(self._client.end_session(request))

    def close(self) -> None:
        """Unregister and disconnect."""
        self._answer(self._transfer.unregister())
        self._transfer.close()
        self._client.close()
        self._context.term()

    def _key(self, request: str, worker: int | None) -> Any:
        return IPCCacheServerKey(
            model_name=self._name, world_size=1, worker_id=worker, token_ids=self._ids,
            start=0, end=self.tokens, request_id=request, num_kv_readers=1,
        )  # fmt: skip

    def _answer(self, future: Any) -> Any:
        return future.result(timeout=ANSWER_SECONDS)


@contextlib.contextmanager
def cases(role: str, options: Mapping[str, Any]) -> Iterator[Case]:
    """Give the case of a role, "path operation"."""
    path, operation = role.split()
    peer = Peer(path, options)

    def verified() -> None:
        peer.wipe()
        request, retrieved = peer.retrieve()
        peer.end(request)
        peer.require_equal(retrieved)

    def after_store(request: str) -> None:
        peer.end(request)
        verified()

    def after_retrieve(result: tuple[str, Any]) -> None:
        request, retrieved = result
        peer.end(request)
        peer.require_equal(retrieved)

    if operation == "store":
        yield Case(role, peer.store, peer.clear, after_store)
    else:
        peer.end(peer.store())
        verified()
        yield Case(role, peer.retrieve, peer.wipe, after_retrieve)
    peer.close()


def _random(shape: tuple[int, ...]) -> Any:
    """Return random bits as bfloat16."""
    drawn = torch.randint(0, 256, (*shape[:-1], 2 * shape[-1]), dtype=torch.uint8)
    return drawn.view(torch.bfloat16)


def _same(left: Any, right: Any) -> bool:
    """Whether two bfloat16 tensors have the same bits."""
    return bool(torch.equal(left.view(torch.int16), right.view(torch.int16)))

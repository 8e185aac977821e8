"""vLLM and the numpy engine continue from each other's blocks: the protocol's promise to engines of
different makers.

In fp32 they agree on every token. In bf16 they round differently, so what is compared is each engine with
itself: the logits of a position after its own blocks, and after the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsp_client import BlockingClient, Credentials, PrefixKeys, PrefixMemory
from kvsp_client.model_dir import descriptor_of_directory
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_engines.llama import KVCache, Llama
from tests.adapters.services.cluster import until
from tests.vllm.conftest import PYTHON
from tests.vllm.kit import SCOPE_KEY, Deployment, Engine, plain_options, prompt_tokens

PREFIX = 1024
SHORT = 256
"""The prefix in bf16, which processors without AVX-512 compute slowly."""
POSITIONS = 16
BLOCK = 32
BF16_BOUND = 0.5
"""By how much logits may differ in bf16; 0.33, 0.38 and 0.44 were seen."""
RAW_LOGITS = {"logprobs_mode": "raw_logits", "max_logprobs": 64}


class Reader:
    """The numpy engine beside a client, as an engine of another maker would have them."""

    def __init__(self, client: BlockingClient, deployment: Deployment, model_dir: Path, dtype: str) -> None:
        self.client = client
        self.cache_server = deployment.cache.uri
        self.descriptor: CompatibilityDescriptor = descriptor_of_directory(model_dir, block_tokens=BLOCK)
        assert self.descriptor.kv_dtype == dtype
        self.llama = Llama(model_dir, kv_dtype=dtype)

    def keys(self, tokens: Sequence[int]) -> PrefixKeys:
        return PrefixKeys.of(Scope(SCOPE_KEY), self.descriptor, tokens)

    def fetched(self, tokens: Sequence[int]) -> tuple[KVCache, PrefixMemory]:
        """Return a cache with the blocks of these tokens that somebody has stored."""
        prefix = self.client.lookup(self.keys(tokens))
        assert prefix.tokens == len(tokens)
        memory = PrefixMemory(self.descriptor, len(prefix))
        assert self.client.fetch(prefix, memory.sections).complete
        cache = self.llama.new_cache()
        for layer in range(self.descriptor.layers):
            keys, values = memory.layer(layer)
            cache.import_layer(layer, 0, octets(keys), octets(values))
        cache.end = len(tokens)
        return cache, memory

    def computed(self, tokens: Sequence[int]) -> KVCache:
        """Return a cache with the blocks of these tokens, computed here."""
        cache = self.llama.new_cache()
        self.llama.forward(cache, tokens)
        return cache

    def store(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Store a cache's blocks."""
        names = self.keys(tokens)

        def sections(block: int, layer: int) -> tuple[bytes, bytes]:
            return cache.export_layer(layer, (block * BLOCK, (block + 1) * BLOCK))

        stored = self.client.store(self.cache_server, names, sections)
        assert stored.complete
        assert stored.stored == len(names)
        assert until(lambda: len(self.client.lookup(names)) == len(names))

    def greedy(self, cache: KVCache, tokens: Sequence[int], count: int) -> list[int]:
        """Generate from a cache and the tokens after it."""
        logits = self.llama.forward(cache, tokens)
        found = [int(logits.argmax())]
        while len(found) < count:
            found.append(int(self.llama.forward(cache, found[-1:]).argmax()))
        return found


def octets(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@pytest.fixture
def reader(deployment: Deployment) -> Iterator[Callable[[Path, str], Reader]]:
    folder = deployment.directory
    credentials = Credentials(folder / "engine.pem", folder / "engine.key", folder / "ca.pem")
    with BlockingClient(credentials, index=deployment.index.uri) as client:
        yield lambda model_dir, dtype: Reader(client, deployment, model_dir, dtype)


def engine(deployment: Deployment, model_dir: Path, logs: Path, name: str) -> Engine:
    options = deployment.options(model_dir) | RAW_LOGITS
    return Engine(PYTHON, options, logs / f"{name}.log")


def test_fp32(
    model_dir: Callable[[str], Path],
    deployment: Deployment,
    logs: Path,
    reader: Callable[[Path, str], Reader],
) -> None:
    """K and V agree to 1e-5, and what is generated from them, freely, to the token."""
    directory = model_dir("fp32")
    mine = reader(directory, "fp32")
    one, other = (prompt_tokens(directory, PREFIX + 8, skip=skip) for skip in (0, 700))
    own = mine.computed(other[:PREFIX])
    mine.store(own, other[:PREFIX])
    with engine(deployment, directory, logs, "fp32") as vllm:
        theirs = vllm.wait_ready().generate(one, tokens=24)["results"][0]
        assert theirs["cached"] == 0
        deployment.settle(vllm)
        continued = vllm.generate(other, tokens=24)["results"][0]
    assert continued["cached"] == PREFIX
    assert continued["tokens"] == mine.greedy(own, other[PREFIX:], 24)

    cache, memory = mine.fetched(one[:PREFIX])
    assert largest_difference(memory, mine.computed(one[:PREFIX])) <= 1e-5
    assert mine.greedy(cache, one[PREFIX:], 24) == theirs["tokens"]


def largest_difference(memory: PrefixMemory, cache: KVCache) -> float:
    """Return by how much K and V of a layer differ, relative to their norm, at most."""
    found = 0.0
    for layer in range(memory.descriptor.layers):
        for theirs, own in zip(memory.layer(layer), cache.export_layer(layer, (0, PREFIX)), strict=True):
            mine = np.frombuffer(own, theirs.dtype).reshape(theirs.shape).astype(np.float64)
            found = max(found, float(np.linalg.norm(theirs - mine) / np.linalg.norm(mine)))
    print(f"\nK and V differ by {found:.1e} at most")
    return found


def test_bf16_into_numpy(
    model_dir: Callable[[str], Path],
    deployment: Deployment,
    logs: Path,
    reader: Callable[[Path, str], Reader],
) -> None:
    directory = model_dir("bf16")
    mine = reader(directory, "bf16")
    prompt = prompt_tokens(directory, SHORT + POSITIONS)
    with engine(deployment, directory, logs, "bf16-writer") as vllm:
        vllm.wait_ready().generate(prompt, tokens=1)
        deployment.settle(vllm)
    cache, _ = mine.fetched(prompt[:SHORT])
    continued = mine.llama.forward(cache, prompt[SHORT:], all_logits=True)
    own = mine.llama.forward(mine.computed(prompt[:SHORT]), prompt[SHORT:], all_logits=True)
    difference = np.abs(continued - own).max(axis=1)
    print(f"\nlogits of numpy after vLLM's blocks differ by {difference.max():.2f} at most")
    assert difference.max() <= BF16_BOUND
    first, second = np.sort(own, axis=1)[:, :-3:-1].T
    clear = first - second > 2 * BF16_BOUND
    assert clear.any()
    assert (continued.argmax(axis=1) == own.argmax(axis=1))[clear].all()


def test_bf16_into_vllm(
    model_dir: Callable[[str], Path],
    deployment: Deployment,
    logs: Path,
    reader: Callable[[Path, str], Reader],
) -> None:
    directory = model_dir("bf16")
    mine = reader(directory, "bf16")
    prompt = prompt_tokens(directory, SHORT + POSITIONS, skip=700)
    mine.store(mine.computed(prompt[:SHORT]), prompt[:SHORT])
    with Engine(PYTHON, plain_options(directory) | RAW_LOGITS, logs / "bf16-own.log") as vllm:
        own = by_position(vllm.wait_ready(), prompt)
    with engine(deployment, directory, logs, "bf16-reader") as vllm:
        continued = by_position(vllm.wait_ready(), prompt)
        assert vllm.ask("counters")["own"]["loaded_tokens"] == SHORT
    clear = 0
    largest = 0.0
    for mine_, theirs in zip(own, continued, strict=True):
        both = mine_.keys() & theirs.keys()
        largest = max(largest, *(abs(mine_[token] - theirs[token]) for token in both))
        first, second, *_ = sorted(mine_.values(), reverse=True)
        if first - second > 2 * BF16_BOUND:
            clear += 1
            assert max(mine_, key=mine_.__getitem__) == max(theirs, key=theirs.__getitem__)
    print(f"\nlogits of vLLM after numpy's blocks differ by {largest:.2f} at most")
    assert largest <= BF16_BOUND
    assert clear


def by_position(vllm: Engine, prompt: list[int]) -> list[dict[str, float]]:
    """Return the largest logits after each of the last tokens of a prompt, given as it is."""
    found: list[dict[str, Any]] = []
    for end in range(SHORT + 1, SHORT + POSITIONS + 1):
        result = vllm.generate(prompt[:end], tokens=1, logprobs=64)["results"][0]
        found.append(result["top"])
    return found

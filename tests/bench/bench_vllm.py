"""Prefixes loaded into vLLM and into the numpy engine, against computing them and against plain local files.

Needs the environment that ``make test-vllm`` makes; each engine is asked alone. Wall time, since processes
share the work.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench import Row, left_out, row

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("KVSP_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
MODEL = ROOT / "build" / "vllm" / "smollm2-fp32"
LENGTHS = (1024, 4096)
REST = 16
"""Tokens after the prefix: the prompt has them too, and they are always computed."""
ROUNDS = 3


def rows() -> Iterator[Row]:
    if not PYTHON.exists():
        yield left_out("vllm", "needs the environment of make test-vllm")
        return
    if not MODEL.exists():
        from kvsp_engines.prepare import prepare_smollm2

        prepare_smollm2(MODEL, dtype="fp32")
    with tempfile.TemporaryDirectory() as directory:
        yield from vllm_rows(Path(directory))


def vllm_rows(directory: Path) -> Iterator[Row]:
    from tests.vllm.kit import Deployment

    with Deployment(directory / "deployment") as deployment:
        options = deployment.options(MODEL)
        computed, loaded = timed(deployment, options, directory / "kvsp.log")
        yield from numpy_rows(deployment)
    os.environ["KVSP_BENCH_FILES"] = str(directory)
    options["kv_transfer_config"]["kv_connector_module_path"] = "tests.vllm.file_connector"
    _, from_files = timed(None, options, directory / "files.log")
    for length in LENGTHS:
        note = f"{loaded[length] * 1000:.0f} ms, computing {computed[length] * 1000:.0f} ms"
        ratio = loaded[length] / computed[length]
        yield row(f"vllm.load_{length}.vs_compute", ratio, "ratio", at_most=0.25, note=note)
        yield row(f"vllm.load_{length}.vs_files", loaded[length] / from_files[length], "ratio")


def prompt_of(length: int, number: int) -> list[int]:
    """Return a prompt with a prefix of this length, which no prompt of another length or number begins
    with."""
    from tests.vllm.kit import prompt_tokens

    return prompt_tokens(MODEL, length + REST, skip=40 * number + 7 * LENGTHS.index(length) + 7)


def timed(deployment: Any, options: dict[str, Any], log: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return the seconds to the first token, for each length, computed and loaded."""
    from tests.vllm.kit import Engine, prompt_tokens

    computed: dict[int, float] = {}
    loaded: dict[int, float] = {}
    with Engine(str(PYTHON), options, log) as engine:
        engine.wait_ready().generate(prompt_tokens(MODEL, 64), tokens=1)
        for length in LENGTHS:
            taken: tuple[list[float], list[float]] = ([], [])
            for number in range(ROUNDS):
                prompt = prompt_of(length, number)
                for times, cached in zip(taken, (0, length), strict=True):
                    result = engine.generate(prompt, tokens=1)
                    assert result["results"][0]["cached"] == cached
                    times.append(result["seconds"])
                    if deployment is not None:
                        deployment.settle(engine)
                    engine.ask("forget")
            computed[length], loaded[length] = map(statistics.median, taken)
    return computed, loaded


def numpy_rows(deployment: Any) -> Iterator[Row]:
    """The same blocks, which vLLM has stored, into the numpy engine."""
    from kvsp_client import BlockingClient, Credentials, PrefixKeys, PrefixMemory
    from kvsp_client.model_dir import descriptor_of_directory
    from kvsp_core.identity import Scope
    from kvsp_engines.llama import Llama
    from tests.vllm.kit import SCOPE_KEY

    llama = Llama(MODEL, kv_dtype="fp32")
    descriptor = descriptor_of_directory(MODEL, block_tokens=32)
    folder = deployment.directory
    credentials = Credentials(folder / "engine.pem", folder / "engine.key", folder / "ca.pem")
    with BlockingClient(credentials, index=deployment.index.uri) as client:
        for length in LENGTHS:
            prompt = prompt_of(length, 0)
            keys = PrefixKeys.of(Scope(SCOPE_KEY), descriptor, prompt[:length])
            client.lookup(keys)  # connects
            started = time.perf_counter()
            prefix = client.lookup(keys)
            memory = PrefixMemory(descriptor, len(prefix))
            assert client.fetch(prefix, memory.sections).tokens == length
            cache = llama.new_cache()
            for layer in range(descriptor.layers):
                keys_, values = (side.reshape(-1).view("u1").data for side in memory.layer(layer))
                cache.import_layer(layer, 0, keys_, values)
            cache.end = length
            llama.forward(cache, prompt[length:])
            loaded = time.perf_counter() - started
            started = time.perf_counter()
            llama.forward(llama.new_cache(), prompt)
            computed = time.perf_counter() - started
            note = f"{loaded * 1000:.0f} ms, computing {computed * 1000:.0f} ms"
            yield row(
                f"vllm.numpy_load_{length}.vs_compute", loaded / computed, "ratio", at_most=0.25, note=note
            )

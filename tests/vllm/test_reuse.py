"""Prefixes that one vLLM engine computed, used by others: after it, beside it, and when the cache server
dies."""

from __future__ import annotations

import signal
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapters.services.cluster import until
from tests.vllm.conftest import PYTHON
from tests.vllm.kit import SALT, Baseline, Deployment, Engine, prompt_tokens

PREFIX = 1024
PROMPT = PREFIX + 16
TOKENS = 16


@pytest.fixture
def start(fp32: Path, logs: Path) -> Callable[..., Engine]:
    """Start an engine that uses a deployment; several may start at once."""

    def make(deployment: Deployment, name: str, **extra: object) -> Engine:
        return Engine(PYTHON, deployment.options(fp32, **extra), logs / f"{name}.log")

    return make


def test_one_after_the_other(
    fp32: Path, baseline: Baseline, deployment: Deployment, start: Callable[..., Engine]
) -> None:
    """The second process loads what the first computed, and says what an engine without a connector says."""
    prompt = prompt_tokens(fp32, PROMPT)
    fresh, warm = baseline.both(prompt, TOKENS)
    with start(deployment, "first") as first:
        made = first.wait_ready().generate(prompt, tokens=TOKENS)["results"][0]
        assert made == fresh
        first.ask("stop")
    assert until(lambda: deployment.records() == PROMPT // 32)
    with start(deployment, "second") as second:
        found = second.wait_ready().generate(prompt, tokens=TOKENS)["results"][0]
        assert found["tokens"] == fresh["tokens"]
        assert found == warm, "as with vLLM's own cache, to the last bit"
        assert found["cached"] == PREFIX
        counted = second.ask("counters")
        assert counted["vllm"]["external_prefix_cache_hits"] == PREFIX
        assert counted["own"]["requested_tokens"] == counted["own"]["loaded_tokens"] == PREFIX
        assert "load_failed_tokens" not in counted["own"]
        check_salts(deployment, second, prompt, fresh["tokens"])


def check_salts(deployment: Deployment, engine: Engine, prompt: list[int], tokens: list[int]) -> None:
    """Requests with a salt share with requests of the same salt only, and only where the policy has its
    scope."""
    for salt, cached in ((SALT, 0), (SALT, PREFIX), ("a salt that no policy knows", 0)):
        engine.ask("forget")
        result = engine.generate(prompt, tokens=TOKENS, salt=salt)["results"][0]
        assert (result["tokens"], result["cached"]) == (tokens, cached), salt
        deployment.settle(engine)
    assert engine.ask("counters")["own"]["lookups_refused"] == 1


def test_time_to_first_token(fp32: Path, deployment: Deployment, start: Callable[..., Engine]) -> None:
    """A prefix of 1,024 tokens is loaded in at most a quarter of the time that computing it takes."""
    computed, loaded = [], []
    with start(deployment, "timed") as engine:
        engine.wait_ready().generate(prompt_tokens(fp32, 64), tokens=1)
        for number in range(3):
            prompt = prompt_tokens(fp32, PROMPT, skip=100 + 16 * number)
            computed.append(engine.generate(prompt, tokens=1)["seconds"])
            deployment.settle(engine)
            engine.ask("forget")
            result = engine.generate(prompt, tokens=1)
            assert result["results"][0]["cached"] == PREFIX
            loaded.append(result["seconds"])
            engine.ask("forget")
    ratio = statistics.median(loaded) / statistics.median(computed)
    print(
        f"\ntime to first token, {PREFIX} tokens: computed {statistics.median(computed):.3f} s, "
        f"loaded {statistics.median(loaded):.3f} s, ratio {ratio:.3f} (aim 0.05)",
        flush=True,
    )
    assert ratio <= 0.25


def test_side_by_side(
    fp32: Path, baseline: Baseline, deployment: Deployment, start: Callable[..., Engine]
) -> None:
    """Two engines at once, each using what the other has just computed."""
    prompts = [prompt_tokens(fp32, PROMPT), prompt_tokens(fp32, PROMPT, skip=500)]
    wanted = [baseline.both(prompt, TOKENS)[0]["tokens"] for prompt in prompts]
    with start(deployment, "left") as left, start(deployment, "right") as right:
        engines = [left, right]
        for engine in engines:
            engine.wait_ready()
        for asked in (prompts, prompts[::-1]):
            for engine, prompt in zip(engines, asked, strict=True):
                engine.send("generate", prompts=[{"prompt_token_ids": prompt}], tokens=TOKENS)
            results = [engine.receive()["results"][0] for engine in engines]
            expected = [wanted[prompts.index(prompt)] for prompt in asked]
            assert [result["tokens"] for result in results] == expected
            assert [result["cached"] for result in results] == (
                [0, 0] if asked is prompts else [PREFIX, PREFIX]
            )
            for engine in engines:
                deployment.settle(engine)
        both = [engine.generate(*prompts, tokens=TOKENS)["results"] for engine in engines]
        assert all([result["tokens"] for result in results] == wanted for results in both)


def test_the_cache_server_dies(
    fp32: Path, baseline: Baseline, deployment: Deployment, start: Callable[..., Engine]
) -> None:
    """While blocks are on their way, and when the index still lists them: they are computed."""
    prompt = prompt_tokens(fp32, PROMPT)
    tokens = baseline.both(prompt, TOKENS)[0]["tokens"]
    with start(deployment, "survivor") as engine:
        engine.wait_ready().generate(prompt, tokens=TOKENS)
        deployment.settle(engine)
        engine.ask("forget")

        deployment.cache.signal(signal.SIGSTOP)
        engine.send("generate", prompts=[{"prompt_token_ids": prompt}], tokens=TOKENS)
        killer = threading.Timer(2.0, deployment.cache.kill)
        killer.start()
        result = engine.receive()["results"][0]
        killer.join()
        assert (result["tokens"], result["finish"]) == (tokens, "length")
        counted = engine.ask("counters")["own"]
        assert counted["load_failed_tokens"] == PREFIX

        engine.ask("forget")
        result = engine.generate(prompt, tokens=TOKENS)["results"][0]
        assert (result["tokens"], result["finish"]) == (tokens, "length")

        deployment.index.kill()
        engine.ask("forget")
        result = engine.generate(prompt, tokens=TOKENS)["results"][0]
        assert (result["tokens"], result["finish"]) == (tokens, "length")
        assert engine.ask("counters")["own"]["lookups_unanswered"] == 1

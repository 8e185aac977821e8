from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.certificates import Certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def foreign(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "foreign")

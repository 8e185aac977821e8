"""``kvsp pki`` makes an authority and certificates, and says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsp_services.cli import app


def test_from_nothing_to_a_certificate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call = ["pki", "issue", str(tmp_path), "--uri", "https://h1.example:8443/kvsp/"]
    assert app.run(call) == 1
    assert "kvsp pki init" in capfd.readouterr().err
    assert app.run(["pki", "init", str(tmp_path)]) == 0
    assert app.run(["pki", "init", str(tmp_path)]) == 1
    capfd.readouterr()
    assert app.run([*call, "--name", "h1", "--host", "127.0.0.1"]) == 0
    paths = [Path(line) for line in capfd.readouterr().out.splitlines()]
    assert paths == [tmp_path / "h1.pem", tmp_path / "h1.key"]
    assert all(path.is_file() for path in paths)


def test_a_certificate_that_cannot_be_renewed_keeps_its_key(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    app.run(["pki", "init", str(tmp_path)])
    call = ["pki", "issue", str(tmp_path), "--uri", "spiffe://example/ops", "--name", "ops"]
    app.run(call)
    before = (tmp_path / "ops.key").read_bytes()
    (tmp_path / "ops.pem").unlink()
    (tmp_path / "ops.pem").mkdir()
    capfd.readouterr()
    assert app.run(call) == 2
    assert capfd.readouterr().err == f"kvsp: {tmp_path}/ops.pem: Is a directory\n"
    assert (tmp_path / "ops.key").read_bytes() == before

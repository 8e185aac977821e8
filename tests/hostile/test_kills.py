"""Roles killed under load, with what they promised; and what a run leaves behind, searched for secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hostile.faults import FAULTS, faults
from tests.hostile.kills import Hurt, kills
from tests.hostile.report import Section
from tests.hostile.secrets import KEY_FILES, forms_of, look_through, secrets_of

Run = tuple[Section, Path, dict[bytes, tuple[str, str]]]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A few kills, and the secrets that were in them."""
    directory = tmp_path_factory.mktemp("hostile")
    secrets: dict[bytes, tuple[str, str]] = {}

    def before_the_end(hurt: Hurt) -> None:
        hurt.write_what_is_seen()
        secrets.update(secrets_of(hurt))

    victims = ("alpha", "controller")
    return kills(directory, 0, victims=victims, then=before_the_end, tokens=150), directory, secrets


@pytest.mark.requirement("CP-1", "CP-2", "CP-4", "MG-1", "MG-4", "BR-6", "PB-2")
def test_nothing_that_was_promised_is_lost_by_kills(short_run: Run) -> None:
    section, _, _ = short_run
    assert section.held, section.markdown()
    assert [row[3] for row in section.rows] == [0] * 3
    assert "answers whole" in section.markdown()


@pytest.mark.requirement("SE-5", "SK-5")
def test_a_run_leaves_no_secret_in_clear(short_run: Run) -> None:
    _, directory, secrets = short_run
    kinds = {kind for kind, _ in secrets.values()}
    assert kinds >= {"scope key", "block key", "KV octets", "prompt tokens", "prompt text", "session"}
    finds = look_through(directory, secrets)
    assert not finds, finds
    seen = {path.suffix for path in directory.rglob("*") if path.is_file()}
    assert {".log", ".metrics", ".html", ".sqlite", ".refusals"} <= seen, seen


@pytest.mark.parametrize("form", ["raw", "hex", "HEX", "base64", "base64url"])
def test_a_secret_in_any_form_is_found(tmp_path: Path, form: str) -> None:
    secret = bytes(range(200, 232))
    secrets = {octets: ("key", name) for name, octets in forms_of(secret)}
    for number, octets in enumerate(octets for octets, (_, name) in secrets.items() if name == form):
        (tmp_path / f"{number}.log").write_bytes(b"some text " + octets + b" and more")
    (tmp_path / KEY_FILES[0]).write_bytes(secret)
    finds = look_through(tmp_path, secrets)
    assert {find.form for find in finds} == {form}
    assert {find.path for find in finds} == set(tmp_path.glob("*.log"))


@pytest.mark.requirement("CP-2", "MG-1", "MG-4")
@pytest.mark.verify
@pytest.mark.parametrize("loop", ["trio"])
def test_forty_kills(tmp_path: Path, loop: str) -> None:
    section = kills(tmp_path, 200 if os.environ.get("KVSP_PROFILE") == "long" else 40, loop=loop)
    print(section.markdown())
    assert section.held, section.markdown()


@pytest.mark.requirement("CP-2", "BR-6", "MG-1")
@pytest.mark.verify
@pytest.mark.parametrize("group", FAULTS)
def test_faults_of_disks_files_and_links(tmp_path: Path, group: str) -> None:
    section = faults(tmp_path, group)
    skipped = [str(row[1]) for row in section.rows if str(row[1]).startswith("skipped")]
    if skipped:
        pytest.skip(skipped[0])
    assert section.held, section.markdown()

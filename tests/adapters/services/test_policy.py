"""The policy file says who may do what; a mistake in it is one line, and never opens anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsp_core.identity import component_id
from kvsp_core.resources import RoleName
from kvsp_core.roles.authorization import Permission, Policy, Relation
from kvsp_services.documents import DocumentError
from kvsp_services.policy import read_policy

SCOPE = "6d1c6481cd428737da312c089db3832a"
PRINCIPALS = '[principals]\n"https://h1.example/kvsp/" = ["holder"]\n"spiffe://example/ops" = ["operator"]\n'


def read(tmp_path: Path, text: str) -> Policy:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return read_policy(path)


HOLDER = "https://h1.example/kvsp/"


@pytest.mark.requirement("SE-1", "SK-6")
def test_a_policy_names_principals_and_scopes(tmp_path: Path) -> None:
    rules = f'[scopes.{SCOPE}]\nread = ["{HOLDER}"]\nshared = true\n'
    delegates = f'[delegates]\n"spiffe://example/ops" = ["{HOLDER}"]\n'
    policy = read(tmp_path, PRINCIPALS + rules + delegates)
    assert policy.roles(HOLDER) == {RoleName.HOLDER}
    assert policy.may(HOLDER, Permission.READ, SCOPE)
    assert policy.scope(SCOPE).shared
    assert policy.stands("spiffe://example/ops", Relation.DELEGATE, component_id(HOLDER))


def test_what_is_not_said_is_not_allowed(tmp_path: Path) -> None:
    policy = read(tmp_path, f"{PRINCIPALS}[scopes.{SCOPE}]\n")
    assert policy.roles("https://stranger.example/") == frozenset()
    assert not any(policy.may(HOLDER, permission, SCOPE) for permission in Permission)
    assert not policy.scope(SCOPE).shared
    assert not policy.stands("spiffe://example/ops", Relation.DELEGATE, component_id(HOLDER))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing: principals"),
        (
            '[principals]\n"https://h1.example/kvsp/" = ["librarian"]',
            "known are controller, front-end, holder",
        ),
        ('[principals]\n"https://h1.example/kvsp/" = ["holders"]', "did you mean holder?"),
        ('[principals]\n"https://h1.example/kvsp/" = []', "names no role"),
        ('[principals]\n"h1.example" = ["holder"]', "expected a base URI"),
        ('[principals]\n"https://h1.example/kvsp" = ["holder"]', "expected a base URI"),
        (f"{PRINCIPALS}[scopes.tenant-a]", "32 lowercase hex digits"),
        (f"{PRINCIPALS}[scopes.{SCOPE.upper()}]", "32 lowercase hex digits"),
        (f"{PRINCIPALS}[scopes.{SCOPE}]\nraed = []", "did you mean read?"),
        (
            f'{PRINCIPALS}[scopes.{SCOPE}]\nread = ["https://h2.example/"]',
            f"scopes.{SCOPE}.read[0]: https://h2",
        ),
        (f'{PRINCIPALS}[scopes.{SCOPE}]\nread = "all"', "expected a list"),
        (f'{PRINCIPALS}[scopes.{SCOPE}]\nread = ["{HOLDER}"]\npurged = true', f"scopes.{SCOPE}.read: nobody"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DocumentError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

"""The policy file says who may do what; a mistake in it is one line, and never opens anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsp_services.documents import DocumentError
from kvsp_services.policy import PolicyFile, ScopeRules, read_policy_file

SCOPE = "6d1c6481cd428737da312c089db3832a"
PRINCIPALS = '[principals]\n"https://h1.example/kvsp/" = ["holder"]\n"spiffe://example/ops" = ["operator"]\n'


def read(tmp_path: Path, text: str) -> PolicyFile:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return read_policy_file(path)


@pytest.mark.requirement("SE-1", "SK-6")
def test_a_policy_names_principals_and_scopes(tmp_path: Path) -> None:
    rules = f'[scopes.{SCOPE}]\nread = ["https://h1.example/kvsp/"]\nshared = true\n'
    policy = read(tmp_path, PRINCIPALS + rules)
    assert policy.principals["https://h1.example/kvsp/"] == ("holder",)
    assert policy.scopes == {SCOPE: ScopeRules(read=("https://h1.example/kvsp/",), shared=True)}


def test_what_is_not_said_is_not_allowed(tmp_path: Path) -> None:
    rules = read(tmp_path, f"{PRINCIPALS}[scopes.{SCOPE}]\n").scopes[SCOPE]
    assert (rules.read, rules.write, rules.publish, rules.withdraw, rules.shared) == ((), (), (), (), False)


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
        ('[principals]\n"h1.example" = ["holder"]', "not a base URI"),
        ('[principals]\n"https://h1.example/kvsp" = ["holder"]', "not a base URI"),
        (f"{PRINCIPALS}[scopes.tenant-a]", "32 lowercase hex digits"),
        (f"{PRINCIPALS}[scopes.{SCOPE.upper()}]", "32 lowercase hex digits"),
        (f"{PRINCIPALS}[scopes.{SCOPE}]\nraed = []", "did you mean read?"),
        (
            f'{PRINCIPALS}[scopes.{SCOPE}]\nread = ["https://h2.example/"]',
            f"scopes.{SCOPE}.read[0]: https://h2",
        ),
        (f'{PRINCIPALS}[scopes.{SCOPE}]\nread = "all"', "expected array"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DocumentError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

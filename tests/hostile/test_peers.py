"""Peers that are slow, broken or worse: the role stays, its memory is bounded, others are answered right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.attackers import ATTACKS
from tests.hostile.peers import Served, attack

BOUND_MIB = 256
"""What an index may have in any of this: each connection and exchange is bounded, so the whole is."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("attacked"))
    made.start()
    yield made
    made.kill()


@pytest.mark.requirement("SE-3")
@pytest.mark.parametrize("kind", ATTACKS)
def test_a_client_in_order_is_answered_whatever_others_do(served: Served, kind: str) -> None:
    count = max(1, ATTACKS[kind][1] // 20)
    with served.client() as client:
        assert not served.measured(client, 0.1).wrong
        figures, _ = attack(served, client, kind, count, 1.0)
        assert not figures.wrong
        assert figures.memory_mib < BOUND_MIB
    assert served.process is not None
    assert served.process.poll() is None
    assert "Traceback" not in served.log
    with served.client() as newcomer:
        assert not served.measured(newcomer, 0.1).wrong


@pytest.mark.requirement("SE-3")
def test_floods_are_ended(served: Served) -> None:
    with served.client() as client:
        _, said = attack(served, client, "rapid reset", 1, 1.5)
    assert int(said.split()[0]) > 0

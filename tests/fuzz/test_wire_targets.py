"""What the fuzzer found when faults were planted in the wire: each input shows nothing while there is no
fault, and shows the fault when it is planted again (fuzz/mutations)."""

from __future__ import annotations

import pytest

from tests.fuzz.test_targets import FUZZ, load


def play(name: str) -> None:
    finds = sorted((FUZZ / "finds" / name).glob("*.bin"))
    assert finds
    for find in finds:
        load(name).one_input(find.read_bytes())


@pytest.mark.requirement("HT-3")
def test_a_server_reads_frames_in_any_split() -> None:
    play("h2_server")


@pytest.mark.requirement("HT-3")
def test_a_client_takes_no_body_shorter_than_its_head_says() -> None:
    play("h2_client")


@pytest.mark.requirement("HT-2")
def test_octets_changed_under_tls_are_an_end_and_no_error() -> None:
    play("tls")

"""Peers that gave no answer, and when they are probed."""

from __future__ import annotations

from kvsp_core.machines.silent_peers import SilentPeers


def test_a_silent_peer_is_probed_at_once_and_then_from_time_to_time() -> None:
    silent = SilentPeers(retry_ms=500)
    assert silent.next_deadline_ms() is None
    silent.note_silence("a", 10)
    silent.note_silence("a", 20)  # another call of it: one probe will do
    assert ("a" in silent, "b" in silent) == (True, False)
    assert (silent.next_deadline_ms(), silent.take_due(9), silent.take_due(10)) == (10, (), ("a",))
    silent.note_silence("a", 30)  # its probe is under way
    assert (silent.next_deadline_ms(), silent.take_due(9_999)) == (None, ())
    silent.note_probe_failed("a", 40)
    assert (silent.take_due(539), silent.next_deadline_ms()) == ((), 540)
    assert silent.freeze(40) == (("a", 500),)
    assert silent.take_due(540) == ("a",)
    silent.note_answer("a")
    assert ("a" in silent, silent.next_deadline_ms()) == (False, None)


def test_a_probe_that_fails_changes_nothing_of_a_peer_that_has_answered_another_call() -> None:
    silent = SilentPeers(retry_ms=500)
    silent.note_silence("a", 0)
    silent.take_due(0)
    silent.note_answer("a")
    silent.note_probe_failed("a", 1)
    assert "a" not in silent

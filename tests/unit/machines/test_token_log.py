"""An append-only token log: what is appended costs what it is long, whatever came before."""

from __future__ import annotations

import hashlib

import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines.token_log import TokenLog, pack_tokens, unpack_tokens


def test_tokens_are_packed_in_network_byte_order() -> None:
    assert pack_tokens((1, 2**32 - 1)) == bytes.fromhex("00000001ffffffff")
    assert unpack_tokens(bytes.fromhex("00000001ffffffff")) == (1, 2**32 - 1)
    with pytest.raises(LocalProtocolError):
        unpack_tokens(b"\0\0\0\1\0")


def test_the_digest_does_not_depend_on_how_tokens_came_or_when_it_was_asked_for() -> None:
    log = TokenLog((1, 2))
    first = log.digest
    log.append((3,))
    log.append(())
    chain = bytes(32)
    for token in (1, 2, 3):
        chain = hashlib.sha256(chain + pack_tokens((token,))).digest()
    assert log.digest == chain.hex() == TokenLog((1, 2, 3)).digest != first
    assert (len(log), log[2]) == (3, 3)
    assert (log.tokens(), log.tokens(1), log.tokens(0, 1)) == ((1, 2, 3), (2, 3), (1,))


def test_agreement_is_asked_as_far_as_both_go() -> None:
    log = TokenLog((1, 2, 3))
    assert log.agrees(())
    assert log.agrees((1, 2))
    assert log.agrees((1, 2, 3, 4))
    assert log.agrees((2, 3, 9), start=1)
    assert log.agrees((9,), start=3)
    assert log.agrees((9,), start=5)
    assert not log.agrees((1, 3))
    assert not log.agrees((3,), start=1)


def test_no_token_is_shown() -> None:
    assert repr(TokenLog((4711,))) == "<TokenLog: 1 tokens>"

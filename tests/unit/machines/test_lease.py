"""The story of leases: what a holder promises, to whom, for how long, and what ends a promise."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count

import attrs
import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines import lease as m
from kvsp_core.machines.table import Cell, Kind
from kvsp_core.problems import LEASE_QUOTA, NOT_FOUND
from tests.machine_kit import cells, check_cell, problems_in

SIZE = 100
ALICE, BOB = "https://alice.example/", "https://bob.example/"


def counting_bytes() -> Callable[[int], bytes]:
    numbers = count(1)
    return lambda n: next(numbers).to_bytes(n, "big")


def table(*blocks: str, restored: tuple[str, ...] = (), **limits: int) -> m.LeaseTable:
    leases = m.LeaseTable(random_bytes=counting_bytes(), now_ms=0, max_ttl_ms=1000, **limits)
    for block in blocks:
        leases.handle(m.AddBlock(block=block, size_bytes=SIZE), 0)
    for block in restored:
        leases.handle(m.AddBlock(block=block, size_bytes=SIZE, restored=True), 0)
    return leases


def create(
    leases: m.LeaseTable, *blocks: str, client: str = ALICE, ttl_ms: int = 500, now_ms: int = 0
) -> str:
    (granted,) = leases.handle(m.CreateLease(client=client, blocks=blocks, ttl_ms=ttl_ms), now_ms)
    assert isinstance(granted, m.LeaseGranted)
    return granted.lease


def refusal(effects: tuple[m.Effect, ...]) -> object:
    (problem,) = problems_in(effects)
    return problem.type


# A lease from beginning to end


@pytest.mark.requirement("LE-1", "LE-2", "PB-4")
def test_a_leased_block_is_kept_and_a_released_one_is_not() -> None:
    leases = table("a", "b")
    assert leases.may_evict("a", 0)
    (granted,) = leases.handle(m.CreateLease(client=ALICE, blocks=("a",), ttl_ms=500), 0)
    assert granted == m.LeaseGranted(lease=granted.lease, ttl_ms=500)
    assert not leases.may_evict("a", 100)
    assert leases.may_evict("b", 100)
    with pytest.raises(LocalProtocolError, match="EvictBlock is not allowed in state protected"):
        leases.handle(m.EvictBlock(block="a"), 100)
    released = leases.handle(m.ReleaseLease(client=ALICE, lease=granted.lease), 200)
    assert released == (m.Unprotected(blocks=("a",)),)
    assert leases.handle(m.EvictBlock(block="a"), 200) == (
        m.WithdrawBlock(block="a"),
        m.FreeBlock(block="a"),
    )


@pytest.mark.requirement("LE-2", "PB-4")
def test_a_lease_holds_through_the_millisecond_in_which_it_expires() -> None:
    leases = table("a")
    create(leases, "a", ttl_ms=500, now_ms=1000)
    assert not leases.may_evict("a", 1501)
    with pytest.raises(LocalProtocolError):
        leases.handle(m.EvictBlock(block="a"), 1501)
    assert leases.next_deadline_ms() == 1502
    assert leases.may_evict("a", 1502)
    assert m.Unprotected(blocks=("a",)) in leases.handle(m.TimerFired(), 1502)


@pytest.mark.requirement("LE-1")
def test_a_lease_that_is_never_used_ends_at_its_ttl() -> None:
    leases = table("a")
    lease = create(leases, "a", ttl_ms=500)
    assert leases.handle(m.TimerFired(), 502) == (m.Unprotected(blocks=("a",)),)
    assert refusal(leases.handle(m.RenewLease(client=ALICE, lease=lease, ttl_ms=500), 502)) is NOT_FOUND
    assert len(leases.listing(502)) == 0
    assert leases.next_deadline_ms() is None


@pytest.mark.requirement("LE-2")
def test_reading_a_block_renews_nothing() -> None:
    leases = table("a")
    create(leases, "a", ttl_ms=500)
    assert leases.handle(m.StartRead(read="1", block="a"), 400) == ()
    assert leases.handle(m.EndRead(read="1"), 450) == ()
    assert leases.may_evict("a", 502)


@pytest.mark.requirement("LE-1")
def test_renewal_extends_and_never_shortens() -> None:
    leases = table("a")
    lease = create(leases, "a", ttl_ms=500)
    renew = m.RenewLease(client=ALICE, lease=lease, ttl_ms=400)
    assert leases.handle(renew, 50) == (m.LeaseGranted(lease=lease, ttl_ms=450),)
    assert not leases.may_evict("a", 501)
    assert leases.handle(renew, 400) == (m.LeaseGranted(lease=lease, ttl_ms=400),)
    assert leases.handle(m.TimerFired(), 502) == ()  # the old deadline: nothing happens
    assert not leases.may_evict("a", 801)
    assert leases.may_evict("a", 802)


@pytest.mark.requirement("LE-1")
def test_a_lease_covers_all_of_its_blocks_or_is_not_granted() -> None:
    leases = table("a", "b")
    before = leases.freeze(0)
    ask = m.CreateLease(client=ALICE, blocks=("a", "nowhere", "b"), ttl_ms=500)
    assert refusal(leases.handle(ask, 0)) is NOT_FOUND
    assert leases.freeze(0) == before
    assert leases.may_evict("a", 0)
    create(leases, "a", "b")
    assert not leases.may_evict("a", 0)
    assert not leases.may_evict("b", 0)


@pytest.mark.requirement("LE-1")
def test_a_lease_of_another_client_is_not_found() -> None:
    leases = table("a")
    lease = create(leases, "a", client=ALICE)
    before = leases.freeze(0)
    assert refusal(leases.handle(m.RenewLease(client=BOB, lease=lease, ttl_ms=5), 0)) is NOT_FOUND
    assert refusal(leases.handle(m.ReleaseLease(client=BOB, lease=lease), 0)) is NOT_FOUND
    assert leases.freeze(0) == before


@pytest.mark.requirement("LE-2")
def test_a_block_under_two_leases_is_kept_until_the_later_one_ends() -> None:
    leases = table("a")
    create(leases, "a", client=ALICE, ttl_ms=300)
    lease = create(leases, "a", client=BOB, ttl_ms=600)
    assert leases.handle(m.TimerFired(), 302) == ()
    assert not leases.may_evict("a", 302)
    assert leases.handle(m.ReleaseLease(client=BOB, lease=lease), 310) == (m.Unprotected(blocks=("a",)),)
    assert leases.may_evict("a", 310)


def test_what_a_question_found_expired_is_announced_next() -> None:
    leases = table("a")
    create(leases, "a", ttl_ms=100)
    assert len(leases.listing(102)) == 0
    assert leases.next_deadline_ms() == 0
    with pytest.raises(LocalProtocolError):
        leases.handle(m.EndRead(read="none"), 102)
    assert leases.handle(m.TimerFired(), 102) == (m.Unprotected(blocks=("a",)),)
    assert leases.next_deadline_ms() is None


def test_a_block_that_is_leased_again_is_not_announced_as_free() -> None:
    leases = table("a", "b")
    create(leases, "a", "b", ttl_ms=100)
    effects = leases.handle(m.CreateLease(client=BOB, blocks=("b",), ttl_ms=100), 102)
    assert m.Unprotected(blocks=("a",)) in effects
    assert not leases.may_evict("b", 150)


# Quotas


@pytest.mark.requirement("LE-3", "SE-3")
def test_octets_are_counted_once_for_each_client_and_block() -> None:
    leases = table("a", "b", "c", quota_bytes=2 * SIZE)
    create(leases, "a", "b", "a")
    again = create(leases, "b")
    assert leases.leased_bytes(ALICE, 0) == 2 * SIZE
    before = leases.freeze(0)
    assert refusal(leases.handle(m.CreateLease(client=ALICE, blocks=("b", "c"), ttl_ms=9), 0)) is LEASE_QUOTA
    assert leases.freeze(0) == before
    create(leases, "c", "a", client=BOB)  # another client has a quota of its own
    leases.handle(m.ReleaseLease(client=ALICE, lease=again), 0)
    assert leases.leased_bytes(ALICE, 0) == 2 * SIZE
    assert leases.leased_bytes(ALICE, 502) == 0


@pytest.mark.requirement("LE-3", "SE-3")
def test_a_ttl_above_the_maximum_is_refused_at_creation_and_renewal() -> None:
    leases = table("a")
    assert refusal(leases.handle(m.CreateLease(client=ALICE, blocks=("a",), ttl_ms=1001), 0)) is LEASE_QUOTA
    lease = create(leases, "a", ttl_ms=1000)
    before = leases.freeze(0)
    (refused,) = leases.handle(m.RenewLease(client=ALICE, lease=lease, ttl_ms=1001), 0)
    assert isinstance(refused, m.Refused)
    assert (refused.problem.type, refused.problem.max_ttl_ms) == (LEASE_QUOTA, 1000)
    assert leases.freeze(0) == before


@pytest.mark.requirement("LE-3")
def test_the_number_of_leases_is_limited_for_each_client() -> None:
    leases = table("a", max_leases=2)
    create(leases, "a")
    create(leases, "a")
    assert refusal(leases.handle(m.CreateLease(client=ALICE, blocks=("a",), ttl_ms=9), 0)) is LEASE_QUOTA
    create(leases, "a", client=BOB)


@pytest.mark.requirement("LE-1", "LE-3")
def test_new_limits_hold_for_what_is_asked_from_then_on() -> None:
    leases = table("a", "b", quota_bytes=2 * SIZE)
    create(leases, "a", ttl_ms=1000)
    leases.limit(max_ttl_ms=500, quota_bytes=SIZE)
    assert refusal(leases.handle(m.CreateLease(client=ALICE, blocks=("b",), ttl_ms=500), 0)) is LEASE_QUOTA
    assert refusal(leases.handle(m.CreateLease(client=ALICE, blocks=("a",), ttl_ms=501), 0)) is LEASE_QUOTA
    assert not leases.may_evict("a", 1000), "those there are run on"
    leases.limit(max_ttl_ms=500, quota_bytes=2 * SIZE)
    create(leases, "b")


def test_leases_that_come_and_go_leave_nothing_behind() -> None:
    leases = table("a")
    empty = leases.freeze(0)
    for _ in range(1000):
        leases.handle(m.ReleaseLease(client=ALICE, lease=create(leases, "a")), 0)
    assert leases.freeze(0) == empty


# Identifiers


@pytest.mark.requirement("LE-1")
def test_identifiers_are_unguessable() -> None:
    asked = []
    leases = m.LeaseTable(random_bytes=lambda n: asked.append(n) or bytes(range(n)), now_ms=0)
    leases.handle(m.AddBlock(block="a", size_bytes=1), 0)
    assert create(leases, "a", ttl_ms=5) == bytes(range(16)).hex()
    assert asked == [16]
    with pytest.raises(LocalProtocolError, match="random_bytes"):
        create(leases, "a", ttl_ms=5)


# Faults


@pytest.mark.requirement("LE-4")
def test_a_fault_withdraws_the_record_first_and_then_breaks_the_lease() -> None:
    leases = table("a", "b")
    lease = create(leases, "a", "b")
    effects = leases.handle(m.FailBlock(block="a"), 10)
    assert effects == (m.WithdrawBlock(block="a"), m.LeaseBroken(client=ALICE, lease=lease))
    assert leases.kind_of_block("a", 10) is m.BlockKind.WITHDRAWING
    assert leases.handle(m.EndWithdrawal(block="a"), 20) == (m.FreeBlock(block="a"),)
    assert refusal(leases.handle(m.RenewLease(client=ALICE, lease=lease, ttl_ms=500), 30)) is NOT_FOUND
    assert refusal(leases.handle(m.ReleaseLease(client=ALICE, lease=lease), 30)) is NOT_FOUND
    # The client does not know yet, so what is left of the lease is kept for as long as was promised.
    assert not leases.may_evict("b", 501)
    assert leases.may_evict("b", 502)


@pytest.mark.requirement("LE-4")
def test_the_attempt_to_withdraw_is_bounded() -> None:
    leases = table("a", withdrawal_ms=50)
    create(leases, "a")
    leases.handle(m.FailBlock(block="a"), 10)
    assert leases.next_deadline_ms() == 61
    assert leases.handle(m.TimerFired(), 60) == ()
    assert leases.handle(m.TimerFired(), 61) == (m.FreeBlock(block="a"),)
    assert leases.handle(m.EndWithdrawal(block="a"), 70) == ()  # too late to matter
    assert len(leases.listing(70)) == 0


@pytest.mark.requirement("LE-4")
def test_a_fault_of_a_free_block_withdraws_it_at_once() -> None:
    leases = table("a")
    assert leases.handle(m.FailBlock(block="a"), 0) == (m.WithdrawBlock(block="a"), m.FreeBlock(block="a"))
    assert leases.handle(m.FailBlock(block="a"), 0) == ()


def test_a_fault_of_every_block_of_a_lease_ends_it() -> None:
    leases = table("a", "b")
    create(leases, "a", "b")
    broken = [e for b in ("a", "b") for e in leases.handle(m.FailBlock(block=b), 0)]
    assert sum(isinstance(effect, m.LeaseBroken) for effect in broken) == 1
    leases.handle(m.EndWithdrawal(block="a"), 1)
    leases.handle(m.EndWithdrawal(block="b"), 1)
    assert leases.freeze(1) == table().freeze(1)


# Readers


@pytest.mark.requirement("LE-2", "PB-4")
def test_a_read_slower_than_its_lease_is_cut_before_the_memory_is_used_again() -> None:
    leases = table("a")
    create(leases, "a", ttl_ms=100)
    leases.handle(m.StartRead(read="slow", block="a"), 50)
    leases.handle(m.StartRead(read="slower", block="a"), 60)
    assert leases.is_read("a")
    effects = leases.handle(m.EvictBlock(block="a"), 102)
    assert effects[-3:] == (m.WithdrawBlock(block="a"), m.CutRead(read="slow"), m.CutRead(read="slower"))
    assert refusal(leases.handle(m.StartRead(read="new", block="a"), 103)) is NOT_FOUND
    assert leases.handle(m.EndRead(read="slow"), 103) == ()
    assert leases.handle(m.EndRead(read="slower"), 104) == (m.FreeBlock(block="a"),)
    assert not leases.is_read("a")


def test_reads_are_named_once_and_ended_once() -> None:
    leases = table("a")
    leases.handle(m.StartRead(read="1", block="a"), 0)
    with pytest.raises(LocalProtocolError, match="name each read anew"):
        leases.handle(m.StartRead(read="1", block="a"), 0)
    leases.handle(m.EndRead(read="1"), 0)
    with pytest.raises(LocalProtocolError, match="end each read once"):
        leases.handle(m.EndRead(read="1"), 0)


# After a restart


@pytest.mark.requirement("LE-2", "PB-4")
def test_a_restarted_holder_evicts_nothing_restored_for_one_maximum_ttl() -> None:
    leases = table("new", restored=("old", "older"))
    assert leases.may_evict("new", 0)
    assert not leases.may_evict("old", 1001)
    assert leases.next_deadline_ms() == 1002
    create(leases, "older", ttl_ms=800, now_ms=900)
    assert leases.handle(m.TimerFired(), 1002) == (m.Unprotected(blocks=("old",)),)
    assert leases.may_evict("old", 1002)
    assert not leases.may_evict("older", 1002)


def test_what_was_restored_becomes_free_in_the_order_in_which_it_came() -> None:
    old = tuple(f"old {n}" for n in range(40))
    assert table(restored=old).handle(m.TimerFired(), 1002) == (m.Unprotected(blocks=old),)


@pytest.mark.requirement("LE-4")
def test_a_fault_within_the_grace_withdraws_first() -> None:
    leases = table(restored=("old",))
    assert leases.handle(m.FailBlock(block="old"), 0) == (m.WithdrawBlock(block="old"),)
    assert leases.kind_of_block("old", 0) is m.BlockKind.WITHDRAWING


# The whole state


def test_a_table_is_rebuilt_from_its_frozen_state() -> None:
    leases = table("a", "b", "c", restored=("old",))
    create(leases, "a", "b")
    leases.handle(m.StartRead(read="1", block="c"), 0)
    leases.handle(m.EvictBlock(block="c"), 0)
    leases.handle(m.FailBlock(block="b"), 5)
    frozen = leases.freeze(10)
    hash(frozen)
    other = m.LeaseTable(random_bytes=counting_bytes(), now_ms=7000, max_ttl_ms=1000)
    other.thaw(frozen, 7000)
    assert other.freeze(7000) == frozen
    assert other.handle(m.EndRead(read="1"), 7001) == (m.FreeBlock(block="c"),)
    assert leases.next_deadline_ms() is not None
    with pytest.raises(LocalProtocolError, match="use a new one"):
        other.thaw(frozen, 7000)


def test_what_has_become_free_and_was_not_said_yet_is_said_by_the_rebuilt_table() -> None:
    leases = table("a")
    create(leases, "a", ttl_ms=100)
    other = m.LeaseTable(random_bytes=counting_bytes(), now_ms=7000, max_ttl_ms=1000)
    other.thaw(leases.freeze(102), 7000)
    assert other.next_deadline_ms() == 0
    assert other.handle(m.TimerFired(), 7000) == (m.Unprotected(blocks=("a",)),)


def test_nothing_confidential_is_shown() -> None:
    shown = repr((m.CreateLease(client=ALICE, blocks=("secret",), ttl_ms=1), m.FreeBlock(block="secret")))
    assert "secret" not in shown
    leases = table("secret")
    create(leases, "secret")
    with pytest.raises(LocalProtocolError) as caught:
        leases.handle(m.EvictBlock(block="secret"), 0)
    assert "secret" not in str(caught.value)


# What is legal, from the tables


@attrs.define
class Subject:
    leases: m.LeaseTable
    ask: Callable[[m.LeaseTable], Kind]
    now_ms: int = 10

    def kind(self) -> Kind:
        return self.ask(self.leases)

    def freeze(self) -> Hashable:
        return self.leases.freeze(self.now_ms)

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        return self.leases.handle(event, self.now_ms)


def events(lease: str) -> dict[type, m.Event]:
    every = (
        m.AddBlock(block="a", size_bytes=SIZE),
        m.CreateLease(client=ALICE, blocks=("a",), ttl_ms=500),
        m.RenewLease(client=ALICE, lease=lease, ttl_ms=500),
        m.ReleaseLease(client=ALICE, lease=lease),
        m.StartRead(read="new", block="a"),
        m.EndRead(read="old"),
        m.EvictBlock(block="a"),
        m.FailBlock(block="a"),
        m.EndWithdrawal(block="a"),
        m.TimerFired(),
    )
    return {type(event): event for event in every}


def in_kind(kind: Kind) -> tuple[m.LeaseTable, str]:
    """Return a table in which the block "a" or the lease on it is of this kind."""
    lease = "none"
    leases = table("a", "b")
    if kind is m.BlockKind.ABSENT:
        leases = table("b")
    elif kind in (m.BlockKind.PROTECTED, m.LeaseKind.VALID):
        lease = create(leases, "a", "b")
    elif kind is m.LeaseKind.BROKEN or kind is m.BlockKind.WITHDRAWING:
        lease = create(leases, "a", "b")
        leases.handle(m.StartRead(read="old", block="a"), 0)
        leases.handle(m.FailBlock(block="a"), 0)
    if kind in (m.BlockKind.FREE, m.BlockKind.PROTECTED, m.BlockKind.LEAVING):
        leases.handle(m.StartRead(read="old", block="a"), 0)
    if kind is m.BlockKind.LEAVING:
        leases.handle(m.EvictBlock(block="a"), 0)
    return leases, lease


@pytest.mark.requirement("LE-1")
@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(m.BLOCKS))
def test_legality_of_blocks(kind: m.BlockKind, event_type: type, cell: Cell) -> None:
    leases, lease = in_kind(kind)
    assert leases.kind_of_block("a", 10) is kind
    subject = Subject(leases, lambda t: t.kind_of_block("a", 10))
    check_cell(cell, subject=subject, event=events(lease)[event_type])


@pytest.mark.requirement("LE-1")
@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(m.LEASES))
def test_legality_of_leases(kind: m.LeaseKind, event_type: type, cell: Cell) -> None:
    leases, lease = in_kind(kind)
    assert leases.kind_of_lease(ALICE, lease, 10) is kind
    subject = Subject(leases, lambda t: t.kind_of_lease(ALICE, lease, 10))
    check_cell(cell, subject=subject, event=events(lease)[event_type])

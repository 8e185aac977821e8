"""Each safety property holds for a story that is right, and sees each way in which it can break."""

from __future__ import annotations

import pytest

from kvsp_sim.facts import (
    BlockEvicted,
    BlockNotFound,
    CheckpointAcknowledged,
    DecisionSent,
    DecisionTaken,
    Disclosed,
    Fact,
    HolderRestarted,
    IndexRestarted,
    LayersUsed,
    LeaseGranted,
    LeaseReleased,
    LeaseRenewed,
    LineSeen,
    MemberRestarted,
    OutputEnded,
    PlanAccepted,
    PlanSent,
    RangeDropped,
    RangeLoaded,
    RecordReturned,
    RecordTaken,
    RecordWithdrawn,
    SessionClosed,
    SessionOwned,
    SessionResumed,
    SessionTold,
    SessionUnknown,
    StatusAcknowledged,
    StepServed,
    StreamOpened,
    TokenDelivered,
    TokenDrawn,
    WithdrawalSent,
)
from kvsp_sim.properties import (
    AcknowledgedIsKept,
    IndexIsCurrent,
    LeasesHold,
    OneOwner,
    OneSample,
    OnlyVerifiedBlocks,
    Properties,
    Property,
    ScopesHold,
    SessionsAreFenced,
    Violation,
    extend_history,
)


def run(one: Property | Properties, *facts: Fact) -> None:
    for fact in facts:
        one.observe(fact)


def breaks(one: Property, *facts: Fact, saying: str = ".") -> None:
    """The last fact, and no earlier one, breaks the property."""
    run(one, *facts[:-1])
    with pytest.raises(Violation, match=saying) as caught:
        one.observe(facts[-1])
    assert caught.value.name == one.name


# Leases


def granted(
    lease: str = "l1", *, client: str = "c", blocks: tuple[str, ...] = ("b",), until: int = 10
) -> Fact:
    return LeaseGranted(
        holder="h",
        lease=lease,
        client=client,
        blocks=tuple((b, 64) for b in blocks),
        now_ms=0,
        until_ms=until,
    )


def evicted(at: int, block: str = "b", *, fault: bool = False, unheard: bool = False) -> Fact:
    return BlockEvicted(holder="h", block=block, now_ms=at, fault=fault, unheard=unheard)


def test_a_block_may_go_once_its_lease_has_expired_or_is_released() -> None:
    run(LeasesHold(), granted(), evicted(11))
    run(LeasesHold(), granted(), LeaseReleased(holder="h", lease="l1"), evicted(1))
    run(LeasesHold(), granted(), evicted(5, "another"))


def test_a_block_may_not_go_in_the_last_millisecond_of_its_lease() -> None:
    breaks(LeasesHold(), granted(), evicted(10), saying="leased until 10 ms")


def test_one_valid_lease_of_several_protects() -> None:
    breaks(LeasesHold(), granted(), granted("l2", client="d", until=20), evicted(15), saying="d leased")


def test_a_renewal_prolongs_and_never_shortens() -> None:
    renewed = LeaseRenewed(holder="h", lease="l1", now_ms=5, until_ms=30)
    breaks(LeasesHold(), granted(), renewed, evicted(30))
    shorter = LeaseRenewed(holder="h", lease="l1", now_ms=5, until_ms=6)
    breaks(LeasesHold(), granted(), shorter, evicted(10))


def test_a_fault_needs_the_withdrawal_first() -> None:
    published = RecordTaken(holder="h", block="b", until_ms=99)
    run(LeasesHold(), published, granted(), WithdrawalSent(holder="h", block="b"), evicted(5, fault=True))
    breaks(LeasesHold(), published, granted(), evicted(5, fault=True), saying="before withdrawing")
    run(LeasesHold(), published, granted(), evicted(5, fault=True, unheard=True))  # it waits for the index
    breaks(LeasesHold(), published, granted(), evicted(5, unheard=True), saying="leased until")
    run(LeasesHold(), granted(), evicted(5, fault=True))  # never published
    run(LeasesHold(), granted(), evicted(5, fault=True), evicted(6))  # a copy stored later is not leased


def test_a_restarted_holder_keeps_what_it_restored() -> None:
    back = HolderRestarted(holder="h", shift_ms=-1000, restored=frozenset({"b"}))
    breaks(LeasesHold(), granted(), back, evicted(-990))
    run(LeasesHold(), granted(), back, evicted(-989))
    run(LeasesHold(), granted(), HolderRestarted(holder="h"), evicted(5))  # it was lost, and stored again


def test_quota_counts_each_block_once_a_client() -> None:
    run(LeasesHold(quota_bytes=64), granted(), granted("l2"), granted("l3", client="d", blocks=("x",)))
    breaks(LeasesHold(quota_bytes=64), granted(), granted("l2", blocks=("x",)), saying="128 octets")


def test_an_identifier_is_not_used_twice() -> None:
    breaks(LeasesHold(), granted(), granted(), saying="second one")


# The index

TAKEN = RecordTaken(holder="h", block="b", until_ms=10)


def returned(at: int) -> Fact:
    return RecordReturned(holder="h", block="b", now_ms=at)


def test_the_index_returns_records_until_they_expire_or_are_withdrawn() -> None:
    run(IndexIsCurrent(), TAKEN, returned(10))
    breaks(IndexIsCurrent(), TAKEN, returned(11), saying="1 ms after it expired")
    breaks(IndexIsCurrent(), TAKEN, RecordWithdrawn(holder="h", block="b"), returned(1), saying="withdrawn")
    run(IndexIsCurrent(), TAKEN, RecordWithdrawn(holder="h", block="b"), TAKEN, returned(1))
    breaks(IndexIsCurrent(), TAKEN, IndexRestarted(), returned(1))


def test_the_index_loses_no_record_before_it_expires() -> None:
    missed = BlockNotFound(block="b", now_ms=9)
    breaks(IndexIsCurrent(), TAKEN, missed, saying="of h, which it has taken, 1 ms before it expires")
    run(IndexIsCurrent(), missed, TAKEN, BlockNotFound(block="b", now_ms=10))
    run(IndexIsCurrent(), TAKEN, RecordWithdrawn(holder="h", block="b"), missed)
    run(IndexIsCurrent(), TAKEN, IndexRestarted(), missed)


# Output

START = extend_history(b"", 7)
OPENED = StreamOpened(stream="s", history=START, expected=2)
DRAWN = (TokenDrawn(history=START, token=1), TokenDrawn(history=extend_history(START, 1), token=2))


def line(index: int, token: int, epoch: int = 1) -> Fact:
    return LineSeen(stream="s", epoch=epoch, index=index, token=token)


def delivered(index: int, token: int) -> Fact:
    return TokenDelivered(stream="s", index=index, token=token)


RIGHT = (OPENED, *DRAWN, line(0, 1), line(1, 2), delivered(0, 1), delivered(1, 2))


def test_output_is_delivered_in_order_once() -> None:
    run(OneSample(), *RIGHT, OutputEnded(stream="s", count=2))


def test_output_twice_early_or_after_the_end() -> None:
    breaks(OneSample(), *RIGHT, delivered(1, 2), saying="twice")
    breaks(OneSample(), OPENED, *DRAWN, line(1, 2), delivered(1, 2), saying="too early")
    breaks(OneSample(), *RIGHT, OutputEnded(stream="s", count=2), delivered(2, 1), saying="after the end")
    breaks(OneSample(), *RIGHT, OutputEnded(stream="s", count=2), OutputEnded(stream="s", count=2))


def test_output_that_is_lost() -> None:
    breaks(OneSample(), *RIGHT[:-1], OutputEnded(stream="s", count=2), saying="1 were delivered")
    breaks(OneSample(), *RIGHT[:-1], OutputEnded(stream="s", count=1), saying="2 were due")


def test_output_of_two_samples_mixed() -> None:
    other = TokenDrawn(history=START, token=5)  # another instance drew another token first
    breaks(OneSample(), OPENED, *DRAWN, other, line(0, 5), delivered(0, 5), line(1, 2), delivered(1, 2))


def test_output_of_an_old_epoch() -> None:
    story = (OPENED, *DRAWN, line(0, 1), delivered(0, 1), line(1, 2, epoch=2))
    run(OneSample(), *story, line(1, 2, epoch=1), delivered(1, 2))
    story = (OPENED, *DRAWN, line(0, 1, epoch=2), delivered(0, 1), line(1, 2, epoch=1))
    breaks(OneSample(), *story, delivered(1, 2), saying="older than one already seen")


# Sessions


def owned(epoch: int, instance: str) -> Fact:
    return SessionOwned(session="s", epoch=epoch, instance=instance)


def checkpoint(epoch: int, instance: str, *generated: int) -> Fact:
    return CheckpointAcknowledged(session="s", epoch=epoch, instance=instance, generated=generated)


def test_one_instance_owns_an_epoch() -> None:
    run(SessionsAreFenced(), owned(1, "a"), owned(2, "b"), checkpoint(2, "b", 1))
    breaks(SessionsAreFenced(), owned(1, "a"), owned(1, "b"), saying="a and b own epoch 1")
    breaks(SessionsAreFenced(), owned(2, "a"), owned(1, "b"), saying="after 2")


def test_a_checkpoint_of_an_old_epoch_or_of_another_instance() -> None:
    breaks(SessionsAreFenced(), owned(1, "a"), owned(2, "b"), checkpoint(1, "a", 1), saying="b owns epoch 2")
    breaks(SessionsAreFenced(), owned(1, "a"), checkpoint(1, "b", 1))
    run(SessionsAreFenced(), owned(2, "a"), SessionClosed(session="s"), owned(1, "b"))


def test_epochs_of_instances_do_not_go_back() -> None:
    run(SessionsAreFenced(), *(StatusAcknowledged(instance="a", epoch=e) for e in (1, 1, 2)))
    breaks(SessionsAreFenced(), *(StatusAcknowledged(instance="a", epoch=e) for e in (2, 1)))


def test_what_was_acknowledged_is_kept() -> None:
    resumed = SessionResumed(session="s", epoch=2, generated=(1, 2))
    run(AcknowledgedIsKept(), checkpoint(1, "a", 1), checkpoint(1, "a", 1, 2), checkpoint(1, "a", 1), resumed)
    breaks(AcknowledgedIsKept(), checkpoint(1, "a", 1, 2, 3), resumed, saying="2 tokens, 3 were acknowledged")
    breaks(AcknowledgedIsKept(), checkpoint(1, "a", 1), checkpoint(2, "a", 2, 3), saying="contradicts")
    breaks(AcknowledgedIsKept(), checkpoint(1, "a"), SessionUnknown(session="s"), saying="unknown")
    told = SessionTold(session="s", offset=0)
    breaks(AcknowledgedIsKept(), checkpoint(1, "a", 1), told, saying="0 tokens are recorded, 1 were")
    run(AcknowledgedIsKept(), told, SessionTold(session="s", offset=4), checkpoint(1, "a", 1))
    run(AcknowledgedIsKept(), checkpoint(1, "a"), SessionClosed(session="s"), SessionUnknown(session="s"))


# Shard maps: version 1 is all with a; version 2 gives the second half to b


def plan(version: int, member: str, **ranges: tuple[tuple[int, int], ...]) -> Fact:
    return PlanSent(map_id="m", version=version, member=member, **ranges)


def accepted(version: int, *members: str) -> tuple[Fact, ...]:
    return tuple(PlanAccepted(map_id="m", version=version, member=member) for member in members)


def decided(version: int, commit: bool = True) -> Fact:
    return DecisionSent(map_id="m", version=version, commit=commit)


def dropped(member: str, start: int, end: int) -> Fact:
    return RangeDropped(map_id="m", member=member, tokens=(start, end))


def served(version: int, member: str, start: int, end: int) -> Fact:
    return StepServed(map_id="m", version=version, member=member, ranges=((start, end),))


FIRST = (plan(1, "a", assign=((0, 8),)), *accepted(1, "a"), decided(1))
SECOND = (plan(2, "a", retain=((0, 4),), release=((4, 8),)), plan(2, "b", fetch=((4, 8),)))
PREPARED = (*FIRST, *SECOND, *accepted(2, "a", "b"))


def test_a_move_commits() -> None:
    loaded = RangeLoaded(map_id="m", member="b", tokens=(4, 8))
    taken = (DecisionTaken(map_id="m", version=2, member=m, commit=True) for m in "ab")
    run(OneOwner(), *FIRST, *SECOND, loaded, *accepted(2, "a", "b"), decided(2), dropped("a", 4, 8), *taken)


def test_a_move_aborts_and_the_next_one_has_another_number() -> None:
    run(OneOwner(), *PREPARED, decided(2, False), dropped("b", 4, 8), plan(3, "b", fetch=((4, 8),)))
    breaks(OneOwner(), *FIRST, *SECOND, decided(2, False), SECOND[1], saying="after its decision")


def test_who_was_told_nothing_is_left_behind() -> None:
    owner = OneOwner()
    run(owner, *PREPARED)
    assert owner.left_behind("b")  # it waits for the decision
    run(owner, decided(2), DecisionTaken(map_id="m", version=2, member="b", commit=True))
    assert not owner.left_behind("b")
    run(owner, *(plan(3, "c", assign=((0, 8),)), *accepted(3, "c"), decided(3)))
    assert owner.left_behind("b")  # what it holds is over
    run(owner, MemberRestarted(member="b"))
    assert not owner.left_behind("b")


@pytest.mark.requirement("RS-6")
def test_each_owner_holds_its_version_until_it_restarts() -> None:
    owner = OneOwner()
    run(owner, *PREPARED, decided(2), DecisionTaken(map_id="m", version=2, member="a", commit=True))
    assert list(owner.owned()) == [("m", 2, "a", ((0, 4),)), ("m", 2, "b", ((4, 8),))]
    (what,) = owner.without_owner()
    assert what.startswith("b owns positions 4 to 8 in version 2")
    run(owner, DecisionTaken(map_id="m", version=2, member="b", commit=True))
    assert not list(owner.without_owner())
    run(owner, MemberRestarted(member="a"))
    (what,) = owner.without_owner()
    assert what.startswith("a owns positions 0 to 4")


def test_a_commit_without_all() -> None:
    breaks(OneOwner(), *FIRST, *SECOND, *accepted(2, "a"), decided(2), saying="b has not acknowledged")


def test_a_commit_taken_over_by_who_holds_no_plan() -> None:
    taken = DecisionTaken(map_id="m", version=2, member="b", commit=True)
    run(OneOwner(), *PREPARED, decided(2), taken, taken)
    breaks(OneOwner(), *PREPARED, decided(2), MemberRestarted(member="b"), taken, saying="not acknowledged")
    breaks(OneOwner(), *FIRST, *SECOND, taken, saying="not acknowledged")


def test_a_commit_and_an_abort() -> None:
    breaks(OneOwner(), *PREPARED, decided(2), decided(2, False), saying="both committed and aborted")


def test_a_range_released_before_the_decision() -> None:
    breaks(OneOwner(), *PREPARED, dropped("a", 4, 8), saying="authoritative")
    breaks(OneOwner(), *PREPARED, dropped("b", 4, 8), saying="may still be committed")


def test_positions_without_owner_or_with_two() -> None:
    hole = (plan(2, "a", retain=((0, 4),)), plan(2, "b", fetch=((5, 8),)))
    breaks(OneOwner(), *FIRST, *hole, *accepted(2, "a", "b"), decided(2), saying="position 4 with no owner")
    twice = (plan(2, "a", retain=((0, 5),)), plan(2, "b", fetch=((4, 8),)))
    breaks(OneOwner(), *FIRST, *twice, *accepted(2, "a", "b"), decided(2), saying="two owners")
    short = (plan(2, "a", retain=((0, 4),)),)
    breaks(OneOwner(), *FIRST, *short, *accepted(2, "a"), decided(2), saying="position 4 with no owner")


def test_two_plans_of_one_version() -> None:
    breaks(OneOwner(), plan(1, "a", assign=((0, 8),)), plan(1, "a", assign=((0, 4),)), saying="planned twice")


def test_a_late_plan_after_a_newer_one() -> None:
    breaks(OneOwner(), *PREPARED, *accepted(1, "a"), saying="after it had seen 2")
    aborted = DecisionTaken(map_id="m", version=3, member="a", commit=False)  # of an attempt it did not see
    run(OneOwner(), *PREPARED, aborted, *accepted(2, "a"))  # the very plan it holds, again
    run(OneOwner(), *PREPARED, MemberRestarted(member="a"), *accepted(1, "a"))


def test_a_retained_range_moves_no_octet() -> None:
    loaded = RangeLoaded(map_id="m", member="a", tokens=(0, 4))
    breaks(OneOwner(), *FIRST, *SECOND, loaded, saying="retains")
    breaks(OneOwner(), *PREPARED, decided(2), loaded, saying="retains")
    run(OneOwner(), *PREPARED, decided(2, False), loaded)  # of a version that never was


def test_steps_are_served_by_owners_in_the_current_version() -> None:
    run(OneOwner(), *FIRST, served(1, "a", 0, 8))
    breaks(OneOwner(), *PREPARED, served(2, "b", 4, 8), saying="not committed")
    breaks(OneOwner(), *FIRST, served(1, "b", 0, 8), saying="does not own")
    taken = DecisionTaken(map_id="m", version=2, member="a", commit=True)
    breaks(OneOwner(), *PREPARED, decided(2), taken, served(1, "a", 4, 8), saying="newer one")


# Scopes and blocks


def test_scopes() -> None:
    scopes = ScopesHold({"c": frozenset({"x"})}, (b"\x01" * 32,))
    scopes.observe(Disclosed(client="c", scope="x"))
    breaks(scopes, Disclosed(client="c", scope="y"))
    breaks(scopes, Disclosed(client="d", scope="x"))
    breaks(scopes, Disclosed(client="c", scope="x", allowed=False), saying="put out of")
    scopes.check_octets(b"{}")
    for octets in (b"\x01" * 32, b'{"k": "' + b"01" * 32 + b'"}'):
        with pytest.raises(Violation, match="Scope Key"):
            scopes.check_octets(b"some " + octets)


def test_blocks_are_verified_and_not_mixed() -> None:
    blocks = OnlyVerifiedBlocks()
    blocks.observe(LayersUsed(instance="i", layers=("d1", "d1")))
    breaks(blocks, LayersUsed(instance="i", layers=("d1", None)), saying="layer 1")
    breaks(blocks, LayersUsed(instance="i", layers=("d1", "d2")), saying="mixed")


# All together


def test_all_together_and_frozen() -> None:
    ours = Properties(quota_bytes=1000)
    before = hash(ours.freeze())
    run(ours, *RIGHT, *PREPARED, granted(), TAKEN, owned(1, "a"), checkpoint(1, "a", 1))
    run(ours, LayersUsed(instance="i", layers=("d",)), Disclosed(client="c", scope="x"))
    assert hash(ours.freeze()) != before
    with pytest.raises(Violation):
        ours.observe(evicted(10))


def test_frozen_times_are_what_remains() -> None:
    early, late = LeasesHold(), LeasesHold()
    early.observe(granted(until=10))
    late.observe(
        LeaseGranted(holder="h", lease="l1", client="c", blocks=(("b", 64),), now_ms=90, until_ms=100)
    )
    assert early.freeze(0) == late.freeze(90)
    assert early.freeze(1) != late.freeze(90)


def test_a_failure_names_a_session_only_as_far_as_a_reader_needs() -> None:
    session = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
    owned = SessionOwned(session=session, epoch=2, instance="a")
    with pytest.raises(Violation) as caught:
        run(SessionsAreFenced(), owned, SessionOwned(session=session, epoch=2, instance="b"))
    assert "session 6f1d~: a and b own epoch 2" in str(caught.value)
    assert session not in str(caught.value)

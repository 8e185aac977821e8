"""Where a request goes, what that costs, and why (section "Placement Inputs"; PL-1, PL-2, decision W25).

Plain functions over records: the estimates of the protocol, one `Candidate` for each instance, a `Policy`
that chooses among them, and for each block that cannot be loaded the reason. The index uses the same
estimates to answer a lookup with targets (LK-2).

A block is loadable where its sources cover all layers with one replica digest. It is taken from the source
that finishes it first, given what that source has been asked for already; each layer at the slower of link
and tier; sources work in parallel. Only the leading blocks that are resident or loadable count: what comes
after a gap is computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, Protocol, TypeAlias

import attrs

from kvsp_core.records import InstanceStatus, Link, ReplicaRecord

__all__ = [
    "Candidate",
    "FetchEstimate",
    "Known",
    "LowestCost",
    "Miss",
    "MissReason",
    "Placement",
    "Policy",
    "Prompt",
    "Replica",
    "SourceLoad",
    "evaluate",
    "explain_miss",
    "explain_misses",
    "fetch_estimate",
    "mean_service_us",
    "place",
    "recompute_us",
]


class _Residency(Protocol):
    @property
    def layers(self) -> tuple[int, int]: ...
    @property
    def read_mbit_per_s(self) -> int | None: ...


class Replica(Protocol):
    """What the estimates need of a replica; a `ReplicaRecord` has it."""

    @property
    def holder(self) -> str:
        """The base URI of who has it."""
        ...

    @property
    def digest(self) -> str:
        """Replicas are parts of one whole only where this is equal."""
        ...

    @property
    def size(self) -> int:
        """Octets of all K and V sections."""
        ...

    @property
    def layer_digests(self) -> Sequence[str] | None:
        """One for each layer of the block, or None."""
        ...

    @property
    def residency(self) -> Sequence[_Residency]:
        """Which layers are in which tier."""
        ...


Sources: TypeAlias = Sequence[Replica]
"""The replicas of one block."""


# Estimates


@attrs.frozen(kw_only=True)
class SourceLoad:
    """What an instance would load from one source."""

    holder: str
    size_bytes: int
    fetch_us: int


@attrs.frozen(kw_only=True)
class FetchEstimate:
    """What it takes to make the leading blocks of a prompt resident at an instance."""

    blocks: int
    """How many leading blocks are resident or loadable."""
    resident_blocks: int
    """How many of those are resident already, and cost nothing."""
    fetch_us: int
    loads: tuple[SourceLoad, ...]


def _layer_count(sources: Sources) -> int:
    """Return the layers of a block as its replicas show them, for where the descriptor is not known."""
    return max(
        (
            len(replica.layer_digests or ()) or max(entry.layers[1] + 1 for entry in replica.residency)
            for replica in sources
        ),
        default=0,
    )


def _covers(layers: int, ranges: Iterable[tuple[int, int]]) -> bool:
    position = 0
    for first, last in sorted(ranges):
        if first <= position:
            position = max(position, last + 1)
    return position >= layers


def _is_whole(replica: Replica, layers: int) -> bool:
    if len(replica.residency) == 1:
        return replica.residency[0].layers == (0, layers - 1)
    return _covers(layers, (entry.layers for entry in replica.residency))


class _Plan:
    """Assigns blocks to sources, one after the other; remembers how busy each source is."""

    def __init__(self, instance: str, links: Iterable[Link]) -> None:
        self.instance = instance
        self.links = {link.holder: link for link in links if link.mbit_per_s > 0}
        self.busy_us: dict[str, float] = {}
        self.size_bytes: dict[str, float] = {}
        # The blocks of one holder mostly look alike: keep the last answer for each.
        self._last: dict[str, tuple[int, Sequence[_Residency], float]] = {}

    def layer_us(self, replica: Replica, entry: _Residency, layers: int) -> float:
        """Return the time one layer takes from this tier: Mbit/s are bits per microsecond."""
        rate = self.links[replica.holder].mbit_per_s
        if entry.read_mbit_per_s:
            rate = min(rate, entry.read_mbit_per_s)
        return 8 * replica.size / layers / rate

    def whole_us(self, replica: Replica, layers: int) -> float:
        last = self._last.get(replica.holder)
        if last is not None and last[0] == replica.size and last[1] == replica.residency:
            return last[2]
        us = sum(
            (entry.layers[1] - entry.layers[0] + 1) * self.layer_us(replica, entry, layers)
            for entry in replica.residency
        )
        self._last[replica.holder] = (replica.size, replica.residency, us)
        return us

    def finish_us(self, holder: str, more_us: float) -> float:
        return self.links[holder].rtt_us + self.busy_us.get(holder, 0.0) + more_us

    def take(self, holder: str, us: float, size_bytes: float) -> None:
        self.busy_us[holder] = self.busy_us.get(holder, 0.0) + us
        self.size_bytes[holder] = self.size_bytes.get(holder, 0.0) + size_bytes

    def is_resident(self, sources: Sources, layers: int) -> bool:
        return any(replica.holder == self.instance and _is_whole(replica, layers) for replica in sources)

    def assign(self, sources: Sources, layers: int) -> bool:
        """Give a block to the source that finishes it first; False where no sources cover it."""
        best: Replica | None = None
        best_us = best_finish_us = 0.0
        for replica in sources:
            if replica.holder not in self.links or not _is_whole(replica, layers):
                continue
            us = self.whole_us(replica, layers)
            finish_us = self.finish_us(replica.holder, us)
            if best is None or finish_us < best_finish_us:
                best, best_us, best_finish_us = replica, us, finish_us
        if best is not None:
            self.take(best.holder, best_us, best.size)
            return True
        return self._assign_in_parts(sources, layers)

    def _assign_in_parts(self, sources: Sources, layers: int) -> bool:
        """Put a block together from layer ranges of several sources with one digest."""
        by_digest: dict[str, list[Replica]] = {}
        for replica in sources:
            if replica.holder in self.links:
                by_digest.setdefault(replica.digest, []).append(replica)
        best: dict[str, tuple[float, float]] | None = None
        best_finish_us = 0.0
        for replicas in by_digest.values():
            parts = self._parts(replicas, layers)
            if parts is None:
                continue
            finish_us = max(self.finish_us(holder, us) for holder, (us, _) in parts.items())
            if best is None or finish_us < best_finish_us:
                best, best_finish_us = parts, finish_us
        for holder, (us, size_bytes) in (best or {}).items():
            self.take(holder, us, size_bytes)
        return best is not None

    def _parts(self, replicas: Sequence[Replica], layers: int) -> dict[str, tuple[float, float]] | None:
        """Return for each holder the time and octets of the layers it gives, or None where one is nowhere."""
        edges = {0, layers}
        for replica in replicas:
            for entry in replica.residency:
                edges |= {entry.layers[0], min(entry.layers[1] + 1, layers)}
        parts: dict[str, tuple[float, float]] = {}
        bounds = sorted(edge for edge in edges if edge <= layers)
        for first, end in itertools.pairwise(bounds):
            choice: tuple[float, str, float, float] | None = None
            for replica in replicas:
                for entry in replica.residency:
                    if not entry.layers[0] <= first < entry.layers[1] + 1:
                        continue
                    had_us, had_bytes = parts.get(replica.holder, (0.0, 0.0))
                    us = had_us + (end - first) * self.layer_us(replica, entry, layers)
                    size_bytes = had_bytes + replica.size * (end - first) / layers
                    option = (self.finish_us(replica.holder, us), replica.holder, us, size_bytes)
                    choice = option if choice is None else min(choice, option)
            if choice is None:
                return None
            parts[choice[1]] = choice[2:]
        return parts


def fetch_estimate(
    instance: str, links: Iterable[Link], blocks: Iterable[Sources], *, layers: int | None = None
) -> FetchEstimate:
    """Estimate what it takes to make the leading blocks of a prompt resident at an instance.

    `blocks` holds the replicas of each block in prefix order, `layers` the layers of a block; without it
    they are taken from what the replicas show. Blocks behind the first that is neither resident nor loadable
    are not counted.
    """
    plan = _Plan(instance, links)
    count = resident = 0
    for sources in blocks:
        block_layers = layers or _layer_count(sources)
        if plan.is_resident(sources, block_layers):
            resident += 1
        elif not sources or not plan.assign(sources, block_layers):
            break
        count += 1
    loads = tuple(
        SourceLoad(
            holder=holder,
            size_bytes=round(plan.size_bytes[holder]),
            fetch_us=round(plan.finish_us(holder, 0.0)),
        )
        for holder in sorted(plan.busy_us)
    )
    return FetchEstimate(
        blocks=count,
        resident_blocks=resident,
        fetch_us=max((load.fetch_us for load in loads), default=0),
        loads=loads,
    )


def recompute_us(tokens: int, prefill_tokens_per_s: int) -> int | None:
    """Return the time to compute the KV of these tokens, or None where the rate is not known."""
    if tokens == 0:
        return 0
    return round(1_000_000 * tokens / prefill_tokens_per_s) if prefill_tokens_per_s > 0 else None


_SAMPLE_WEIGHT: Final = 1 / 8


def mean_service_us(mean_us: int, sample_us: int) -> int:
    """Return the moving average of service times after one more sample (decision W25)."""
    return round(mean_us + _SAMPLE_WEIGHT * (sample_us - mean_us))


# Candidates


@attrs.frozen(kw_only=True)
class Prompt:
    """What a request brings: its length, and the replicas of each of its leading complete blocks."""

    tokens: int
    block_tokens: int
    layers: int | None = None
    blocks: Sequence[Sources] = attrs.field(default=(), repr=False)


@attrs.frozen(kw_only=True)
class Candidate:
    """What a request would cost at one instance, and how that comes about. Times in microseconds."""

    instance: str
    refused: str = ""
    """Why the instance may not take the request; empty where it may."""
    queued: int
    warmth: float = 1.0
    """Below 1 while the instance starts slowly: its cost counts the more."""
    resident_tokens: int
    fetched_tokens: int = 0
    """What would be loaded; 0 where computing everything that is not resident is cheaper."""
    recomputed_tokens: int
    fetch_us: int = 0
    recompute_us: int | None
    """For `recomputed_tokens`; None where the prefill rate is not known."""
    recompute_all_us: int | None
    wait_us: int
    cost_us: int | None
    """None where it cannot be estimated; such an instance comes last."""
    loads: tuple[SourceLoad, ...] = ()

    @property
    def explanation(self) -> str:
        """Say in one line what the request would cost here and why."""
        if self.refused:
            return self.refused
        if self.cost_us is None:
            return "cost unknown: no prefill rate is reported"
        return (
            f"{self.cost_us} us: {self.wait_us} waiting, "
            f"{self.fetch_us} loading {self.fetched_tokens} tokens, "
            f"{self.recompute_us} computing {self.recomputed_tokens}; {self.resident_tokens} are here already"
        )


def evaluate(
    status: InstanceStatus, prompt: Prompt, *, mean_service_us: int, warmth: float = 1.0, refused: str = ""
) -> Candidate:
    """Work out what a request costs at an instance (PL-1).

    `mean_service_us` is the mean service time there. `refused` is a reason of the caller's for which the
    instance may not take the request; an instance that is not active is refused anyway.
    """
    if not refused and status.state != "active":
        refused = f"its state is {status.state}"
    rate, block_tokens = status.prefill_tokens_per_s, prompt.block_tokens
    wait_us = status.queued * mean_service_us
    resident = _leading_resident(status.instance, prompt) * block_tokens
    all_us = recompute_us(prompt.tokens - resident, rate)
    computes = Candidate(
        instance=status.instance,
        refused=refused,
        queued=status.queued,
        warmth=warmth,
        resident_tokens=resident,
        recomputed_tokens=prompt.tokens - resident,
        recompute_us=all_us,
        recompute_all_us=all_us,
        wait_us=wait_us,
        cost_us=None if all_us is None else wait_us + all_us,
    )
    estimate = fetch_estimate(status.instance, status.links, prompt.blocks, layers=prompt.layers)
    rest = prompt.tokens - estimate.blocks * block_tokens
    rest_us = recompute_us(rest, rate)
    if rest_us is None or (all_us is not None and all_us < estimate.fetch_us + rest_us):
        return computes
    return attrs.evolve(
        computes,
        resident_tokens=estimate.resident_blocks * block_tokens,
        fetched_tokens=(estimate.blocks - estimate.resident_blocks) * block_tokens,
        recomputed_tokens=rest,
        fetch_us=estimate.fetch_us,
        recompute_us=rest_us,
        cost_us=wait_us + estimate.fetch_us + rest_us,
        loads=estimate.loads,
    )


def _leading_resident(instance: str, prompt: Prompt) -> int:
    count = 0
    for sources in prompt.blocks:
        layers = prompt.layers or _layer_count(sources)
        if not any(replica.holder == instance and _is_whole(replica, layers) for replica in sources):
            break
        count += 1
    return count


# Choosing


class Policy(Protocol):
    """Chooses the instance of a request; an embedder replaces it (PL-2)."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return one of the candidates that may take the request, or None where none is acceptable.

        All candidates are given, in order of their base URI; those with `refused` set must not be chosen.
        """
        ...


@attrs.frozen
class LowestCost:
    """Choose the lowest cost.

    The cost of an instance that is still warming up is divided by its warmth. Of equal costs the one with
    fewer requests queued is taken, then the one with more tokens resident, then the first by base URI. An
    instance whose cost cannot be estimated comes after all others. With `acceptable_us`, nothing dearer is
    chosen (PL-3).
    """

    acceptable_us: int | None = None

    def choose(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate of lowest cost, or None where none is acceptable."""
        allowed = [candidate for candidate in candidates if not candidate.refused]
        best = min(allowed, key=self._order, default=None)
        if best is None or self.acceptable_us is None or best.cost_us is None:
            return best
        return best if best.cost_us <= self.acceptable_us else None

    @staticmethod
    def _order(candidate: Candidate) -> tuple[bool, float, int, int, str]:
        unknown = candidate.cost_us is None
        cost_us = (candidate.cost_us or 0) / max(candidate.warmth, 1e-6)
        return unknown, cost_us, candidate.queued, -candidate.resident_tokens, candidate.instance


# Misses


class MissReason(Enum):
    """Why a block of a prompt cannot be loaded."""

    NO_REPLICA = "no replica"
    OTHER_COMPAT_ID = "other compat ID"
    OTHER_SCOPE = "other scope"
    EXPIRED = "expired"
    PARTIAL_LAYERS = "partial layers"
    BEHIND_A_GAP = "behind a gap"


@attrs.frozen
class Known:
    """What somebody who may see it knows of a block: a record, and whether it has run out."""

    record: ReplicaRecord
    expired: bool = False


@attrs.frozen(kw_only=True)
class Miss:
    """A run of blocks that cannot be loaded for one reason: block indices, half open."""

    blocks: tuple[int, int]
    reason: MissReason


def explain_miss(
    known: Iterable[Known], *, compat_id: str, scope_id: str, layers: int | None = None
) -> MissReason | None:
    """Say why a block is not loadable, or None where it is.

    `known` is all that is known under its key. Of several reasons the one that came closest to a hit is
    given. Only who may see the other scope's records is given any, so the answer tells nobody of another
    tenant.
    """
    fitting: dict[str, list[ReplicaRecord]] = {}
    closest = [MissReason.NO_REPLICA]
    order = [MissReason.NO_REPLICA, MissReason.OTHER_SCOPE, MissReason.OTHER_COMPAT_ID, MissReason.EXPIRED]
    for entry in known:
        if entry.record.scope_id != scope_id:
            closest.append(MissReason.OTHER_SCOPE)
        elif entry.record.compat_id != compat_id:
            closest.append(MissReason.OTHER_COMPAT_ID)
        elif entry.expired:
            closest.append(MissReason.EXPIRED)
        else:
            fitting.setdefault(entry.record.digest, []).append(entry.record)
    for records in fitting.values():
        count = layers or _layer_count(records)
        if _covers(count, (entry.layers for record in records for entry in record.residency)):
            return None
    return MissReason.PARTIAL_LAYERS if fitting else max(closest, key=order.index)


def explain_misses(
    blocks: Sequence[Iterable[Known]], *, compat_id: str, scope_id: str, layers: int | None = None
) -> tuple[Miss, ...]:
    """Say for each block of a prompt that is not loaded why not, as runs; blocks behind the first miss are
    behind a gap where they could be loaded otherwise."""
    misses: list[Miss] = []
    gap = False
    for index, known in enumerate(blocks):
        reason = explain_miss(known, compat_id=compat_id, scope_id=scope_id, layers=layers)
        if reason is None and gap:
            reason = MissReason.BEHIND_A_GAP
        if reason is None:
            continue
        gap = True
        if misses and misses[-1].reason is reason and misses[-1].blocks[1] == index:
            misses[-1] = Miss(blocks=(misses[-1].blocks[0], index + 1), reason=reason)
        else:
            misses.append(Miss(blocks=(index, index + 1), reason=reason))
    return tuple(misses)


# Placement


@attrs.frozen(kw_only=True)
class Placement:
    """Where a request goes, or None, and why: every candidate, cheapest first, and every miss."""

    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    misses: tuple[Miss, ...] = ()

    def explain(self) -> tuple[str, ...]:
        """Say it in lines for people. Block keys, tokens and scopes are not in them."""
        chosen = self.chosen.instance if self.chosen else "nobody: no instance is acceptable"
        return (
            f"goes to {chosen}",
            *(f"{candidate.instance}: {candidate.explanation}" for candidate in self.candidates),
            *(f"blocks {miss.blocks[0]}..{miss.blocks[1] - 1}: {miss.reason.value}" for miss in self.misses),
        )


def place(
    prompt: Prompt,
    instances: Iterable[InstanceStatus],
    *,
    mean_service_us: Mapping[str, int],
    default_service_us: int,
    policy: Policy | None = None,
    warmth: Mapping[str, float] | None = None,
    refused: Mapping[str, str] | None = None,
    misses: tuple[Miss, ...] = (),
) -> Placement:
    """Choose the instance of a request and explain the choice (PL-2).

    The mean service time, warmth and reason for refusal of an instance are looked up by its base URI. The
    policy is `LowestCost` where none is given.
    """
    candidates = tuple(
        evaluate(
            status,
            prompt,
            mean_service_us=mean_service_us.get(status.instance, default_service_us),
            warmth=(warmth or {}).get(status.instance, 1.0),
            refused=(refused or {}).get(status.instance, ""),
        )
        for status in sorted(instances, key=lambda status: status.instance)
    )
    chosen = (policy or LowestCost()).choose(candidates)
    dearest = max((c.cost_us for c in candidates if c.cost_us is not None), default=0) + 1
    ranked = sorted(candidates, key=lambda c: (bool(c.refused), dearest if c.cost_us is None else c.cost_us))
    return Placement(chosen=chosen, candidates=tuple(ranked), misses=misses)

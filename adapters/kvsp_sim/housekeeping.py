"""What is done to the processes of a simulated deployment while they serve: some are told to stop and come
back, tiers delete what they have kept for as long as they may, limits change, an instance or a front end is
put out of a scope and let in again, a scope is purged, and an instance is started while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import attrs

from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.controller import Controller
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.index import Index
from kvsp_core.roles.instance import Instance
from kvsp_core.roles.role import Effect
from kvsp_sim.faults import draw_clock
from kvsp_sim.host import Cluster, Host, Instruction
from kvsp_sim.overheard import Places
from kvsp_sim.randomness import Randomness
from kvsp_sim.rest import Rest

__all__ = ["Housekeeping", "Usual"]

_LOOK_US: Final = 20_000
_PATIENCE_US: Final = 3_000_000
"""How long a process that was told to stop may take before it is killed."""
_AWAY_US: Final = 500_000
_OUT_US: Final = 2_000_000
"""How long an instance or a front end may be out of a scope."""
_RELOAD_US: Final = 50_000
"""Within what time all processes go by a new policy."""


@attrs.frozen(kw_only=True)
class Usual:
    """The limits of a deployment, which only become less, and are what they were once all has healed."""

    lease_ms: int
    quota_bytes: int
    replica_ttl_ms: int
    index_ttl_ms: int
    lookup_keys: int


class Housekeeping:
    """Does all this; `mean_us` is the mean time between two acts. `rules` are those of each scope, which it
    changes; `policy` makes a policy of them, which holds for all who start from then on. `again` makes a
    second process of an instance, where there may be one.
    """

    def __init__(
        self,
        cluster: Cluster,
        places: Places,
        usual: Usual,
        random: Randomness,
        *,
        mean_us: int,
        rest: Rest,
        again: Callable[[str], Host] | None,
        policy: Callable[[], Policy],
        rules: dict[str, ScopeRules],
        front_ends: Sequence[str],
    ) -> None:
        self.rules = rules
        """What each scope allows now."""
        self._cluster = cluster
        self._places = places
        self._usual = usual
        self._random = random
        self._mean_us = mean_us
        self._truths = rest
        self._again = again
        self._replaced: Host | None = None
        self._policy = policy
        self._front_ends = front_ends
        own = [scope_id for scope_id, allowed in rules.items() if allowed.read and not allowed.shared]
        self._tenants = own[:2]  # a third one, where there is one, is that of others
        self._out: dict[str, ScopeRules] = {}
        self._stopping: dict[str, int] = {}  # who was told to stop, and in which life
        self._over = False
        self._newest = policy()
        self._acts: tuple[Callable[[], None], ...] = (
            *(self._stop_one,) * 3,
            *(self._expire,) * 3,
            self._limit,
            *(self._put_out,) * 4,
            *(self._purge,) * (2 * random.chance(0.5)),
            *(self._replace,) * random.chance(0.5),
        )
        self._later()

    def rest(self) -> None:
        """Have all be as usual: who was told to stop comes back at once."""
        self._over = True
        self._retire()
        for base_uri, life in self._stopping.items():
            host = self._cluster.hosts[base_uri]
            if host.life == life:
                host.process.crash()
                self._start(host)
        for scope_id, rules in self._out.items():
            self.rules[scope_id] = rules
        self._reload()
        for host in self._cluster.hosts.values():
            self._set_limits(host, 1, self._usual.lookup_keys)

    def _later(self) -> None:
        self._cluster.world.after(self._random.between(1, 2 * self._mean_us), self._act)

    def _act(self) -> None:
        if not self._over:
            self._random.pick(self._acts)()
            self._later()

    def _keeper(self) -> Host:
        return self._cluster.hosts[self._random.pick(self._places.keepers)]

    # Stopping

    def _stop_one(self) -> None:
        host = self._keeper()
        if host.process.up and not host.process.paused and self._stopping.get(host.base_uri) != host.life:
            self._cluster.counts["stops"] += 1
            self._stopping[host.base_uri] = host.life
            host.deliver(Instruction("stop", lambda role, now_ms: role.stop(now_ms)))
            self._watch(host, host.life, self._cluster.world.now_us + _PATIENCE_US)

    def _watch(self, host: Host, life: int, until_us: int) -> None:
        if self._over or host.life != life:
            return
        role = host.role
        assert isinstance(role, Holder | Instance)
        world = self._cluster.world
        if role.safe_to_stop or world.now_us >= until_us:
            self._cluster.counts["stopped in order"] += role.safe_to_stop
            host.process.crash()
            world.after(self._random.spread(500, _AWAY_US), self._start, host)
        else:
            world.after(_LOOK_US, self._watch, host, life, until_us)

    def _start(self, host: Host) -> None:
        if not host.process.up:
            host.process.set_clock(draw_clock(self._random))
            host.process.start()

    def _replace(self) -> None:
        """Have an instance started a second time while its first process runs on, which nobody finds."""
        host = self._cluster.hosts[self._random.pick(self._places.instances)]
        if self._again is None or self._replaced is not None or not host.process.up:
            return
        self._cluster.counts["instances replaced"] += 1
        self._replaced = host
        host.process.retired = True
        self._cluster.witness.replaced(host)
        # What it was about to answer would count as said by the new one.
        self._cluster.network.break_all(host.process.name)
        new = self._again(host.base_uri)
        new.life = host.life
        new.process.set_clock(draw_clock(self._random))
        new.process.start()
        self._cluster.world.after(self._random.spread(10_000, _OUT_US), self._retire)

    def _retire(self) -> None:
        if self._replaced is not None and self._replaced.process.up:
            self._replaced.process.crash()

    # Blocks

    def _expire(self) -> None:
        """Have a keeper delete the blocks of a tier that are older than others, of which it may know less."""
        host = self._keeper()
        tier = self._random.pick(list(host.tiers.values()))
        names = tuple(tier.blocks)[: self._random.between(0, 3)]
        self._truths.too_old.update((host.base_uri, name.block_key) for name in names)
        self._cluster.counts["blocks that are too old"] += len(names)
        host.deliver(Instruction("expire", lambda role, now_ms: role.expire(tier.name, names, now_ms)))

    # Limits

    def _limit(self) -> None:
        for host in self._cluster.hosts.values():
            if self._random.chance(0.3):
                least = self._random.pick((1, 2, 8))
                self._set_limits(host, least, max(1, self._usual.lookup_keys // least))

    def _set_limits(self, host: Host, part: int, lookup_keys: int) -> None:
        usual, role = self._usual, host.role
        limit: Callable[..., None]
        if isinstance(role, Holder | Instance):
            limit = partial(
                role.limit,
                max_lease_ttl_ms=usual.lease_ms // part,
                lease_quota_bytes=usual.quota_bytes // part,
                replica_ttl_ms=usual.replica_ttl_ms // part,
            )
        elif isinstance(role, Index):
            limit = partial(role.limit, max_ttl_ms=usual.index_ttl_ms, max_lookup_keys=lookup_keys)
        elif isinstance(role, Controller):
            limit = partial(role.limit, min_active=1, prefetch=part != 2, open_by_checkpoint=part == 8)
        else:
            return

        def do(_: Any, now_ms: int) -> tuple[Effect, ...]:
            limit()
            return ()

        host.deliver(Instruction("limits", do))

    # The policy

    def _put_out(self) -> None:
        """Put an instance or a front end out of a scope for a while."""
        scope_id = self._random.pick(self._tenants)
        if scope_id in self._out or scope_id == self._truths.purged:
            return
        rules = self._out[scope_id] = self.rules[scope_id]
        who = self._random.pick(("instances", "front ends"))
        one = self._random.pick(self._places.instances if who == "instances" else self._front_ends)
        out: Any = frozenset({one})
        self._cluster.counts[f"{who} out of a scope"] += 1
        self._cluster.witness.put_out.add((one, scope_id))
        self.rules[scope_id] = attrs.evolve(
            rules,
            read=rules.read - out,
            write=rules.write - out,
            publish=rules.publish - out,
            withdraw=rules.withdraw - out,
        )
        self._reload()
        longest_us = _OUT_US if who == "instances" else _OUT_US // 10  # users have nothing meanwhile
        self._cluster.world.after(self._random.spread(1_000, longest_us), self._let_in, scope_id)

    def _let_in(self, scope_id: str) -> None:
        rules = self._out.pop(scope_id, None)
        if rules is not None and scope_id != self._truths.purged and not self._over:
            self.rules[scope_id] = rules
            self._reload()

    def _purge(self) -> None:
        """Have a tenant's scope purged, for good."""
        if self._truths.purged is None:
            scope_id = self._truths.purged = self._cluster.witness.purged = self._tenants[1]
            self._cluster.counts["scopes purged"] += 1
            self._out.pop(scope_id, None)
            self.rules[scope_id] = ScopeRules(purged=True)
            self._reload()

    def _reload(self) -> None:
        """Have each process go by the policy within a while, as the policy is then."""
        self._newest = self._policy()

        def do(role: Any, now_ms: int) -> tuple[Effect, ...]:
            if not hasattr(role, "policy"):
                return ()
            role.policy = self._newest
            return role.purge(now_ms) if hasattr(role, "purge") else ()

        for host in self._cluster.hosts.values():
            delay_us = 0 if self._over else self._random.below(_RELOAD_US)
            host.later(delay_us, host.deliver, Instruction("policy", do))

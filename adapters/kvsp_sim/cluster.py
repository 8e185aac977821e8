"""A simulated deployment that runs: one index, one controller, holders, instances and front ends, each a
process of its own, with users and faults.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Final

import attrs

from kvsp_core.heads import Response
from kvsp_core.limits import MAX_REPLICA_TTL_MS
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.instance import Instance
from kvsp_sim.deployment import (
    CONTROLLER,
    HOST,
    LOCAL,
    OPERATOR,
    OUTSIDER,
    STRANGER,
    Deployment,
    Options,
)
from kvsp_sim.disk import StorageFaults, Tier, rotten
from kvsp_sim.engine import KINDS, EngineSpeed, SimulatedEngine
from kvsp_sim.exchange import Exchange
from kvsp_sim.faults import PROFILES, Chaos, draw_clock
from kvsp_sim.host import Cluster, Host, Instruction, RoleFactory
from kvsp_sim.housekeeping import Housekeeping, Usual
from kvsp_sim.http2 import Http2
from kvsp_sim.network import Network, NetworkFaults
from kvsp_sim.operators import Operator, Resharding
from kvsp_sim.properties import Properties
from kvsp_sim.randomness import Randomness
from kvsp_sim.rest import Rest
from kvsp_sim.strangers import Stranger
from kvsp_sim.trace import Trace
from kvsp_sim.users import Users
from kvsp_sim.witness import Witness
from kvsp_sim.workload import Workload
from kvsp_sim.world import World

__all__ = ["SimulatedCluster"]

_NEVER_MS: Final = 10**9
_KEPT: Final = 0.25
"""How often processes are stopped in order, and limits and policies change, while requests are served."""


class SimulatedCluster:
    """A deployment that runs, with users and faults."""

    def __init__(self, seed: int, options: Options, trace: Trace) -> None:
        self.options = options
        self.world = World(seed, trace)
        self._random = self.world.randomness.split("cluster")
        self.deployment = deployment = Deployment(options, self._random)
        self.network_faults = NetworkFaults()
        self.storage_faults: dict[str, StorageFaults] = {}
        self.properties = Properties(
            quota_bytes=deployment.room.quota_bytes,
            allowed=deployment.allowed(),
            scope_keys=deployment.scope_keys,
        )
        witness = Witness(
            self.properties, indexes=deployment.places.index.uris, block_bytes=deployment.block.data_bytes
        )
        witness.strangers = frozenset((STRANGER, OUTSIDER))
        self._overheard = witness.overheard
        carry = Http2(self._random.split("http2")) if options.wire == "h2" else Exchange
        self.cluster = Cluster(self.world, Network(self.world, self.network_faults), witness, carry)
        self.counts = self.cluster.counts
        self.users: list[Users] = []
        self._leaving: list[Host] = []
        self._add_roles()
        self._add_company(self._random.split("company"))
        self.rest = self._at_rest()
        """What has to be true once all has healed."""
        self._housekeeping = self._keep_house(self._random.split("housekeeping"))
        for process in self.cluster.processes.values():
            process.set_clock(draw_clock(process.randomness))
            process.start()
        self._make_liars()
        self._wear_out_a_disk()
        self._chaos = Chaos(
            self.cluster,
            self.network_faults,
            self.storage_faults,
            PROFILES[options.faults],
            self.world.randomness.split("faults"),
            mean_us=self._random.pick((5_000, 15_000, 50_000)),
            persisting=("controller",),
            keeping=tuple(host.name for host in self.cluster.hosts.values() if host.tiers),
        )

    def _at_rest(self) -> Rest:
        deployment = self.deployment
        return Rest(
            self.cluster,
            deployment.places,
            self.properties,
            room=2 * (deployment.room.instance_bytes // deployment.block.size_bytes),
            lists_all=deployment.scarcity.lists_all,
            sees_records_expire=self._random.split("rest").chance(0.3),
            producers=deployment.producers,
        )

    # Who is there

    def _add_roles(self) -> None:
        deployment, places = self.deployment, self.deployment.places
        for number, base_uri in enumerate(places.index.uris):
            self._add(f"index {number}" if number else "index", base_uri, partial(deployment.index, base_uri))
        self._add("controller", CONTROLLER, deployment.controller)
        for number, base_uri in enumerate(places.holders):
            self._add(f"holder {number}", base_uri, partial(deployment.holder, base_uri), tiers=True)
        for number, base_uri in enumerate(places.instances):
            self._add_instance(f"instance {number}", base_uri, number)
        for number, base_uri in enumerate(deployment.front_ends):
            self._add_front_end(number, base_uri)
        if deployment.company.outsider:
            self._add_instance("outsider", OUTSIDER, len(places.instances))

    def _add(
        self,
        name: str,
        base_uri: str,
        factory: RoleFactory,
        *,
        tiers: bool = False,
        engine: bool = False,
        **more: object,
    ) -> Host:
        process = self.cluster.process(name)
        room = self.deployment.room
        faults = self.storage_faults[name] = StorageFaults()
        faults.busy = self.deployment.variety.busy if self.options.faults in ("all", "storage") else 0.0
        kept = [
            Tier(
                self.world,
                process.randomness.split(tier),
                faults,
                name=tier,
                capacity_bytes=room.instance_bytes if engine else room.holder_bytes,
                survives=tier == LOCAL,
            )
            for tier in ((HOST, LOCAL) if tiers else ())
        ]
        return Host(
            process,
            base_uri,
            factory,
            storage=faults,
            tiers=kept,
            engine=self._engine if engine else None,
            **more,  # type: ignore[arg-type]
        )

    def _add_instance(self, name: str, base_uri: str, number: int) -> Host:
        factory = partial(self.deployment.instance, base_uri, number)
        return self._add(name, base_uri, factory, tiers=True, engine=True)

    def _add_again(self, base_uri: str) -> Host:
        """Add a second process of an instance, to which calls go from now on."""
        number = self.deployment.places.instances.index(base_uri)
        return self._add_instance(f"instance {number} again", base_uri, number)

    def _engine(self, host: Host) -> SimulatedEngine:
        pace = self.deployment.pace
        number = (*self.deployment.places.instances, OUTSIDER).index(host.base_uri)
        return SimulatedEngine(
            name=host.base_uri,
            descriptor=self.deployment.descriptor,
            kind=number % KINDS,
            speed=EngineSpeed(
                token_us=pace.token_us,
                decode_us=pace.decode_us,
                failure=pace.engine_failure,
                burst=self.deployment.variety.burst,
            ),
            randomness=host.randomness.split("engine", host.life),
            buffers=host.buffers,
            deliver=host.deliver,
            later=host.later,
            observe=host.witness.observe,
        )

    def _add_front_end(self, number: int, base_uri: str) -> None:
        deployment = self.deployment
        random = self._random.split("users", number)
        users = Users(
            Workload(
                random.split("workload"), deployment.descriptor.block_tokens, deployment.variety.stretch
            ),
            random,
            count=self.options.users,
            thinking_us=deployment.pace.thinking_us,
            tenants=deployment.scopes[:2],
            shared=deployment.scopes[2],
            overheard=self._overheard,
            undisturbed=self.options.faults in ("none", "engines"),
        )
        self.users.append(users)
        self._add(
            f"front end {number}",
            base_uri,
            partial(deployment.front_end, base_uri),
            own_effects=users.effects(),
            on_start=users.started,
            on_crash=users.crashed,
        )

    def _add_company(self, random: Randomness) -> None:
        """Have an operator, a stranger and contexts that are resharded, where they were drawn."""
        deployment, places = self.deployment, self.deployment.places
        company = deployment.company
        operator = Operator(
            OPERATOR,
            places,
            self._overheard,
            random.split("operator"),
            mean_ms=company.mean_ms if company.operator else _NEVER_MS,
            lease_ms=deployment.times.lease_ms,
            asks_more=deployment.variety.asks_more,
        )
        self._add("operator", OPERATOR, lambda _: operator)
        self._operator = operator
        self._stranger: Stranger | None = None
        if company.stranger:
            stranger = Stranger(
                STRANGER, places, self._overheard, random.split("stranger"), mean_ms=company.mean_ms
            )
            self._add("stranger", STRANGER, lambda _: stranger)
            self._stranger = stranger
        self._resharding = Resharding(
            self.cluster.hosts[CONTROLLER],
            places,
            self._overheard,
            random.split("reshards"),
            mean_us=3_000 * (company.mean_ms if company.reshards else _NEVER_MS),
        )

    def _keep_house(self, random: Randomness) -> Housekeeping | None:
        deployment = self.deployment
        if not random.chance(_KEPT):
            return None
        usual = Usual(
            lease_ms=deployment.times.lease_ms,
            quota_bytes=deployment.room.quota_bytes,
            replica_ttl_ms=deployment.times.replica_ttl_ms,
            index_ttl_ms=MAX_REPLICA_TTL_MS,
            lookup_keys=deployment.scarcity.lookup_keys,
        )
        mean_us = random.pick((100_000, 400_000))
        return Housekeeping(
            self.cluster,
            deployment.places,
            usual,
            random,
            mean_us=mean_us,
            rest=self.rest,
            again=self._add_again if self.options.wire == "messages" else None,
            policy=deployment.make_policy,
            rules=deployment.rules,
            front_ends=deployment.front_ends,
        )

    # What goes wrong all along

    def _make_liars(self) -> None:
        """Have holders and instances serve other octets than their records say, with a digest that fits
        them."""
        random = self._random.split("liar")
        if self.options.faults == "none" or not random.chance(0.5):
            return

        def lie(body: bytes, response: Response) -> tuple[bytes, Response]:
            if not response.is_success or not body or not random.chance(0.5):
                return body, response
            self.counts["lies"] += 1
            wrong = rotten(body, random)
            return wrong, attrs.evolve(response, repr_digest=hashlib.sha256(wrong).hexdigest())

        for base_uri in self.deployment.places.keepers:
            if random.chance(0.4):
                self.cluster.hosts[base_uri].lies = lie

    def _wear_out_a_disk(self) -> None:
        """Have the tiers of an instance give out wrong octets all along, whatever else happens."""
        random = self._random.split("disk")
        if "rots" in PROFILES[self.options.faults] and random.chance(0.3):
            worn = self.storage_faults[f"instance {random.below(self.options.instances)}"]
            worn.rots, worn.swapped = 0.2, 0.1

    # The end

    def heal(self) -> None:
        """End all faults, and have users ask for nothing more."""
        if self._housekeeping is not None:
            self._housekeeping.rest()
        self._chaos.heal()
        for host in self.cluster.hosts.values():
            host.lies = None
        for users in self.users:
            users.be_quiet()
        if self._stranger is not None:
            self._stranger.leave()
        self.cluster.hosts[OPERATOR].deliver(Instruction("settle", Operator.settle))
        self._resharding.rest()

    def unended(self) -> str:
        """Return what was begun and has not ended, or an empty string.

        First all requests have to end, though engines may hang for good; then those are restarted. Then
        prefetches, reshards and leases have to end, and what is then true of a deployment (`kvsp_sim.rest`)
        has to come true. Then all shard maps end. Then those who hold blocks leave, some in good order and
        some at once, and every record has to leave the index, withdrawn or expired.
        """
        for host in self.cluster.hosts.values():
            if host.requests:
                return f"{len(host.requests)} requests have no end at {host.name}"
        waiting = sum(users.waiting for users in self.users)
        if waiting:
            return f"{waiting} users still wait for output"
        if self._chaos.restart_hung():
            return "instances whose engines hang are being restarted"
        if not self._leaving:
            left = self._operator.unended() or self._end_maps()
            left = left or self._resharding.unended() or self._operator.unended_maps()
            left = left or self.rest.missing(with_maps=False)
            if left:
                return left
            self._leave()
        for host in self._leaving:
            role = host.role
            if not isinstance(role, Holder | Instance):
                continue
            if not role.safe_to_stop:
                behind = self.properties.one_owner.left_behind(host.base_uri)
                why = ": it was not told what became of its ranges" if behind else ""
                return f"{host.name} is not ready to stop{why}"
            host.process.crash()  # as a process ends that has nothing left to do
        for part in self.deployment.places.index.uris:
            if (records := self._operator.records.get(part)) is None:
                return f"{part} was not asked yet"
            if records:
                return f"{part} holds {records} records"
        return ""

    def _end_maps(self) -> str:
        """Have all shard maps end, once all is at rest; return what is missing of that."""
        if not self._resharding.ending and not (left := self.rest.missing(with_maps=True)):
            self._resharding.end()
            self._operator.end_maps()
            return ""
        return "" if self._resharding.ending else left

    def _leave(self) -> None:
        """Have all who hold blocks leave: some are told to stop, the others crash for good."""
        self._operator.records.clear()
        for base_uri in self.deployment.places.keepers:
            host = self.cluster.hosts[base_uri]
            if self._random.chance(0.5):
                self._leaving.append(host)
                host.deliver(Instruction("stop", lambda role, now_ms: role.stop(now_ms)))
            else:
                host.process.crash()

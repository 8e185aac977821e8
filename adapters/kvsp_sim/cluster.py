"""A simulated deployment: one index, one controller, holders, instances and front ends, each a process of
its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import attrs

from kvsp_core.container import ContainerHeader
from kvsp_core.heads import Response
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.machines.fleet import Fleet
from kvsp_core.machines.lease import LeaseTable
from kvsp_core.machines.placement import Candidate, LowestCost
from kvsp_core.machines.replica_index import ReplicaIndex
from kvsp_core.machines.session import SessionTimes
from kvsp_core.records import Link
from kvsp_core.resources import RoleName
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.controller import Controller, ControllerSettings
from kvsp_core.roles.controller_placement import PlacementSettings
from kvsp_core.roles.descriptors import Descriptors
from kvsp_core.roles.front_end import FrontEnd
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.index import Index
from kvsp_core.roles.instance import Instance, InstanceSettings
from kvsp_core.roles.role import Role
from kvsp_core.roles.work import Numbers
from kvsp_sim.disk import StorageFaults, Tier, rotten
from kvsp_sim.engine import KINDS, EngineSpeed, SimulatedEngine
from kvsp_sim.exchange import Exchange
from kvsp_sim.faults import PROFILES, Chaos, draw_clock
from kvsp_sim.host import Cluster, Host, Instruction, Start
from kvsp_sim.http2 import Http2
from kvsp_sim.network import Network, NetworkFaults
from kvsp_sim.operators import Operator, Resharding
from kvsp_sim.overheard import Places
from kvsp_sim.properties import Properties
from kvsp_sim.randomness import Randomness
from kvsp_sim.rest import Rest
from kvsp_sim.scarcity import Scarcity
from kvsp_sim.strangers import Stranger
from kvsp_sim.trace import Trace
from kvsp_sim.users import Users
from kvsp_sim.witness import Witness
from kvsp_sim.workload import Workload
from kvsp_sim.world import World

__all__ = ["DESCRIPTOR", "WIRES", "Options", "SimulatedCluster"]

INDEX: Final = "https://index.example/"
OPERATOR: Final = "https://operator.example/"
STRANGER: Final = "https://stranger.example/"
"""A client without a part in any scope."""
OUTSIDER: Final = "https://outsider.example/"
"""An instance without one."""
CONTROLLER: Final = "https://controller.example/"

DESCRIPTOR: Final = CompatibilityDescriptor.from_members(
    {
        "model": "simulated",
        "model_digest": f"sha-256:{0:064x}",
        "tokenizer_digest": f"sha-256:{1:064x}",
        "layers": 2,
        "kv_heads": 1,
        "head_dim": 4,
        "kv_dtype": "fp16",
        "positional": "rope",
        "block_tokens": 4,
        "layout": "kvsp-layout-1",
    }
)
BLOCK_BYTES: Final = ContainerHeader.for_layers(DESCRIPTOR).data_bytes
_LARGE_BLOCKS: Final = CompatibilityDescriptor.from_members({**DESCRIPTOR.members(), "head_dim": 2_048})
"""Its blocks are larger than the smallest window of an HTTP/2 stream."""

WIRES: Final = ("messages", "h2")
"""What may carry calls: messages, or the octets of HTTP/2."""

HOST: Final = "host"
LOCAL: Final = "local-storage"

_ENGINE_FAILURES: Final = MappingProxyType(
    {**dict.fromkeys(("all", "processes"), (0.0, 0.0, 0.003)), "engines": (0.0, 0.003, 0.01)}
)
"""How often engines fail under a profile of faults, of which a seed draws one."""

_QUARANTINE_MS: Final = 5_000
"""How long the index refuses a replica that was withdrawn as bad: short, so that it is seen to be over."""

_NEIGHBOURS: Final = 8
"""To how many holders, and to how many instances, an instance reports a link."""


@attrs.frozen(kw_only=True)
class Options:
    """What a simulation is made of; with the seed it decides everything."""

    steps: int = 2_000
    instances: int = 3
    holders: int = 2
    users: int = 4
    faults: str = "all"
    wire: str = "messages"

    def as_text(self) -> str:
        """Return the options as ``kvsp simulate`` takes them."""
        given = attrs.asdict(self)
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())


@attrs.frozen(kw_only=True)
class _Times:
    """Durations of the deployment, short, so that all that can time out does; longer ones leave room for more
    than statuses and refreshes.
    """

    status_ttl_ms: int
    replica_ttl_ms: int
    lease_ms: int
    call_ms: int


@attrs.frozen(kw_only=True)
class _Pace:
    """How fast engines are, and how long a user thinks. A slow engine makes fetching worth more than
    computing, and its sessions are there when something fails.
    """

    token_us: int
    decode_us: int
    thinking_us: int
    engine_failure: float


class SimulatedCluster:
    """A deployment that runs, with users and faults."""

    def __init__(self, seed: int, options: Options, trace: Trace) -> None:
        self.options = options
        self.world = World(seed, trace)
        self._random = self.world.randomness.split("cluster")
        random = self._random.split("limits")
        self._leaving: list[Host] = []
        self._times = _Times(
            status_ttl_ms=random.pick((200, 500, 1_500)),
            replica_ttl_ms=random.pick((1_000, 3_000, 8_000)),
            lease_ms=random.pick((1_000, 1_000, 2_000)),
            call_ms=random.pick((50, 150, 500)),
        )
        random = self._random.split("pace")
        self._pace = _Pace(
            token_us=random.pick((20, 200, 2_000)),
            decode_us=random.pick((3_000, 10_000, 30_000)),
            thinking_us=random.pick((30_000, 200_000, 1_000_000)),
            engine_failure=random.pick(often) if (often := _ENGINE_FAILURES.get(options.faults)) else 0.0,
        )
        is_http2 = options.wire == "h2"
        self._carry = Http2(self._random.split("http2")) if is_http2 else Exchange
        large = is_http2 and self._random.split("blocks").chance(0.3)
        self._descriptor = _LARGE_BLOCKS if large else DESCRIPTOR
        # Room for few blocks or many, and for few leased ones.
        block = ContainerHeader.for_layers(self._descriptor)
        self._capacity_bytes = block.size_bytes * random.pick((5, 10, 40))
        # Where instances have less, what others keep is loaded again.
        self._own_bytes = min(
            self._capacity_bytes, block.size_bytes * self._random.split("room").pick((3, 40, 40))
        )
        self._quota_bytes = block.data_bytes * random.pick((8, 30, 200))
        self._scarcity = Scarcity.drawn(self._random.split("scarcity"))
        # Where requests are spread, blocks are loaded from others.
        self._spreads = self._random.split("placement").chance(0.5)
        keys = tuple(random.octets(32) for _ in range(4))
        self._scopes = tuple(map(Scope, keys[:3]))
        self._elsewhere = Scope(keys[3])
        """A scope of others, in which those without a part in these may have one."""
        self._names = _Names(options)
        who = self._random.split("company")
        self._has_outsider, has_stranger = who.chance(0.3), who.chance(0.5)
        has_operator, reshards = who.chance(0.7), who.chance(0.5)
        self._others = frozenset((STRANGER, OUTSIDER)) if who.chance(0.6) else frozenset[str]()
        self.network_faults = NetworkFaults()
        self.storage_faults: dict[str, StorageFaults] = {}
        policy = self._policy()
        self.properties = Properties(quota_bytes=self._quota_bytes, allowed=self._allowed(), scope_keys=keys)
        witness = Witness(self.properties, index=INDEX, block_bytes=block.data_bytes)
        self.cluster = Cluster(self.world, Network(self.world, self.network_faults), witness, self._carry)
        self.counts = self.cluster.counts
        self.users: list[Users] = []
        self._places = self._names.places(self._scopes, self._descriptor)
        self._overheard = witness.overheard
        witness.strangers = frozenset((STRANGER, OUTSIDER))
        self._build(policy)
        self._add_company(who, operator=has_operator, stranger=has_stranger, reshards=reshards)
        self.rest = Rest(
            self.cluster,
            self._places,
            self.properties,
            room=2 * (self._own_bytes // block.size_bytes),
            lists_all=self._scarcity.lists_all,
            sees_records_expire=self._random.split("rest").chance(0.3),
        )
        """What has to be true once all has healed."""
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

    def _add_company(self, random: Randomness, *, operator: bool, stranger: bool, reshards: bool) -> None:
        """Have an operator, a stranger and contexts that are resharded, where they were drawn."""
        mean_ms = random.pick((20, 60, 200))
        self._operator = self._add_operator(mean_ms if operator else 10**9, random.split("operator"))
        self._stranger = self._add_stranger(mean_ms, random.split("stranger")) if stranger else None
        self._resharding = Resharding(
            self.cluster.hosts[CONTROLLER],
            self._places,
            self._overheard,
            random.split("reshards"),
            mean_us=3_000 * mean_ms if reshards else 10**12,
        )

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

        for base_uri in self._places.keepers:
            if random.chance(0.4):
                self.cluster.hosts[base_uri].lies = lie

    def _wear_out_a_disk(self) -> None:
        """Have the tiers of an instance give out wrong octets all along, whatever else happens."""
        random = self._random.split("disk")
        if "rots" in PROFILES[self.options.faults] and random.chance(0.3):
            worn = self.storage_faults[f"instance {random.below(self.options.instances)}"]
            worn.rots, worn.swapped = 0.2, 0.1

    def heal(self) -> None:
        """End all faults, and have users ask for nothing more."""
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

        First all requests, prefetches, reshards and leases have to end, and what is then true of a deployment
        (`kvsp_sim.rest`) has to come true. Then all shard maps end. Then those who hold blocks leave, some in
        good order and some at once, and every record has to leave the index, withdrawn or expired.
        """
        for host in self.cluster.hosts.values():
            if host.requests:
                return f"{len(host.requests)} requests have no end at {host.name}"
        waiting = sum(users.waiting for users in self.users)
        if waiting:
            return f"{waiting} users still wait for output"
        if not self._leaving:
            left = self._operator.unended() or self._end_maps() or self._resharding.unended()
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
        if self._operator.records is None:
            return "the index was not asked yet"
        return f"the index holds {self._operator.records} records" if self._operator.records else ""

    def _end_maps(self) -> str:
        """Have all shard maps end, once all is at rest; return what is missing of that."""
        if not self._resharding.ending and not (left := self.rest.missing(with_maps=True)):
            self._resharding.end()
            return ""
        return "" if self._resharding.ending else left

    def _leave(self) -> None:
        """Have all who hold blocks leave: some are told to stop, the others crash for good."""
        self._operator.records = None
        for base_uri in self._places.keepers:
            host = self.cluster.hosts[base_uri]
            if self._random.chance(0.5):
                self._leaving.append(host)
                host.deliver(Instruction("stop", lambda role, now_ms: role.stop(now_ms)))
            else:
                host.process.crash()

    # Who is there

    def _policy(self) -> Policy:
        names = self._names
        principals = {
            INDEX: (RoleName.INDEX,),
            CONTROLLER: (RoleName.CONTROLLER,),
            **dict.fromkeys(names.holders, (RoleName.HOLDER,)),
            **dict.fromkeys(names.instances, (RoleName.INSTANCE, RoleName.HOLDER)),
            **dict.fromkeys(names.front_ends, (RoleName.FRONT_END,)),
            OPERATOR: (RoleName.OPERATOR, RoleName.CONTROLLER, RoleName.INSTANCE),
            STRANGER: (RoleName.FRONT_END, RoleName.HOLDER, RoleName.INSTANCE),
            OUTSIDER: (RoleName.INSTANCE, RoleName.HOLDER),
        }
        keepers = frozenset((*names.holders, *names.instances))
        readers = frozenset(principals) - {INDEX, STRANGER, OUTSIDER}
        menders: frozenset[str] = frozenset((*keepers, CONTROLLER))
        rules = ScopeRules(read=readers, write=keepers, publish=keepers, withdraw=menders)  # type: ignore[arg-type]
        shared = attrs.evolve(rules, shared=True)
        by_scope = zip(self._scopes, (rules, rules, shared), strict=True)
        scopes = {scope.scope_id: allowed for scope, allowed in by_scope}
        others = self._others
        elsewhere = ScopeRules(read=others, write=others, publish=others, withdraw=others)  # type: ignore[arg-type]
        scopes[self._elsewhere.scope_id] = elsewhere
        return Policy(principals, scopes)

    def _allowed(self) -> dict[str, frozenset[str]]:
        scopes = frozenset(scope.scope_id for scope in self._scopes)
        names = self._names
        return dict.fromkeys(
            (CONTROLLER, OPERATOR, *names.holders, *names.instances, *names.front_ends), scopes
        )

    def _build(self, policy: Policy) -> None:
        names = self._names
        self._add("index", INDEX, partial(self._index, policy))
        self._add("controller", CONTROLLER, partial(self._controller, policy))
        for number, base_uri in enumerate(names.holders):
            self._add(f"holder {number}", base_uri, partial(self._holder, policy, base_uri), tiers=True)
        for number, base_uri in enumerate(names.instances):
            self._add(
                f"instance {number}",
                base_uri,
                partial(self._instance, policy, base_uri, number),
                tiers=True,
                engine=True,
            )
        for number, base_uri in enumerate(names.front_ends):
            self._add_front_end(number, base_uri, policy)
        if self._has_outsider:
            scopes = (self._elsewhere,) if self._others else ()
            factory = partial(self._instance, policy, OUTSIDER, len(names.instances), scopes=scopes)
            self._add("outsider", OUTSIDER, factory, tiers=True, engine=True)

    def _add(
        self,
        name: str,
        base_uri: str,
        factory: object,
        *,
        tiers: bool = False,
        engine: bool = False,
        **more: object,
    ) -> Host:
        process = self.cluster.process(name)
        faults = self.storage_faults[name] = StorageFaults()
        kept = [
            Tier(
                self.world,
                process.randomness.split(tier),
                faults,
                name=tier,
                capacity_bytes=self._own_bytes if engine else self._capacity_bytes,
                survives=tier == LOCAL,
            )
            for tier in ((HOST, LOCAL) if tiers else ())
        ]
        return Host(
            process,
            base_uri,
            factory,  # type: ignore[arg-type]
            storage=faults,
            tiers=kept,
            engine=self._engine if engine else None,
            **more,  # type: ignore[arg-type]
        )

    def _engine(self, host: Host) -> SimulatedEngine:
        number = (*self._names.instances, OUTSIDER).index(host.base_uri)
        return SimulatedEngine(
            name=host.base_uri,
            descriptor=self._descriptor,
            kind=number % KINDS,
            speed=EngineSpeed(
                token_us=self._pace.token_us,
                decode_us=self._pace.decode_us,
                failure=self._pace.engine_failure,
            ),
            randomness=host.randomness.split("engine", host.life),
            buffers=host.buffers,
            deliver=host.deliver,
            later=host.later,
            observe=host.witness.observe,
        )

    # Roles

    def _descriptors(self) -> Descriptors:
        known = Descriptors()
        known.add(self._descriptor)
        return known

    def _index(self, policy: Policy, start: Start) -> Role:
        scarcity = self._scarcity
        table = ReplicaIndex(
            max_keys=scarcity.lookup_keys,
            client_bytes=scarcity.index_client_bytes,
            quarantine_ms=_QUARANTINE_MS,
        )
        return Index(base_uri=INDEX, policy=policy, replica_index=table, descriptors=self._descriptors())

    def _controller(self, policy: Policy, start: Start) -> Role:
        times = self._times
        placement = PlacementSettings(
            index_uris=(INDEX,),
            classes=dict.fromkeys(self._names.instances, "simulated"),
            descriptors={self._descriptor.compat_id: self._descriptor},
            default_service_us=100_000,
            call_timeout_ms=times.call_ms,
            policy=_Spread(start.random_bytes) if self._spreads else LowestCost(),
        )
        settings = ControllerSettings(
            placement=placement,
            times=SessionTimes(
                placed_ms=2_000, idle_ms=2_000, wait_ms=3_000, resume_ms=1_000, kept_ms=10_000
            ),
            prefetch_deadline_ms=100,
            prefetch_lease_ms=times.lease_ms,
            call_timeout_ms=times.call_ms,
            placement_wait_ms=1_000,
            max_sessions=self._scarcity.sessions,
            max_pending_placements=self._scarcity.pending_placements,
        )
        return Controller(
            base_uri=CONTROLLER,
            policy=policy,
            settings=settings,
            random_bytes=start.random_bytes,
            stored=start.stored,
            fleet=Fleet(retry_ms=100, warm_up_ms=500),
        )

    def _holder_of(
        self, policy: Policy, base_uri: str, start: Start, numbers: Numbers | None = None
    ) -> Holder:
        # Numbers are shared with the instance beside.
        capacity_bytes = self._capacity_bytes if numbers is None else self._own_bytes
        limits = TierLimits(capacity_bytes=capacity_bytes, read_mbit_per_s=1_000)
        return Holder(
            base_uri=base_uri,
            policy=policy,
            tiers={HOST: limits, LOCAL: limits},
            random_bytes=start.random_bytes,
            now_ms=start.now_ms,
            index_uris=(INDEX,),
            replica_ttl_ms=self._times.replica_ttl_ms,
            lease_table=LeaseTable(
                random_bytes=start.random_bytes,
                now_ms=start.now_ms,
                max_ttl_ms=self._times.lease_ms,
                quota_bytes=self._quota_bytes,
                max_leases=self._scarcity.leases_per_client,
            ),
            descriptors=self._descriptors(),
            numbers=numbers,
            max_incoming=self._scarcity.incoming_blocks,
        )

    def _holder(self, policy: Policy, base_uri: str, start: Start) -> Role:
        return self._holder_of(policy, base_uri, start)

    def _instance(
        self,
        policy: Policy,
        base_uri: str,
        number: int,
        start: Start,
        *,
        scopes: tuple[Scope, ...] | None = None,
    ) -> Role:
        times = self._times
        numbers = Numbers()
        names = self._names
        settings = InstanceSettings(
            base_uri=base_uri,
            controller_uri=CONTROLLER,
            index_uris=(INDEX,),
            epoch=start.wall_ms + start.life,
            copy_holder=names.holders[number % len(names.holders)] if names.holders else None,
            batch_size=self._scarcity.batch_size,
            prefill_tokens_per_s=1_000_000 // self._pace.token_us,
            decode_tokens_per_s=max(1, 1_000_000 // self._pace.decode_us),
            links=tuple(
                Link(holder=holder, mbit_per_s=1_000, rtt_us=300)
                for holder in (*_near(names.holders, number), *_near(names.instances, number + 1))
                if holder != base_uri
            ),
            status_ttl_ms=times.status_ttl_ms,
            copy_lease_ms=times.lease_ms,
            resume_load_ms=200,
            call_timeout_ms=times.call_ms,
            fetch_timeout_ms=2 * times.call_ms,
            session_kept_ms=5_000,
            prefetch=self._scarcity.prefetch,
        )
        return Instance(
            settings,
            models={self._descriptor.compat_id: self._descriptor},
            scopes={s.scope_id: s for s in (self._scopes if scopes is None else scopes)},
            blocks=self._holder_of(policy, base_uri, start, numbers),
            numbers=numbers,
            policy=policy,
            random_bytes=start.random_bytes,
            now_ms=start.now_ms,
        )

    def _add_front_end(self, number: int, base_uri: str, policy: Policy) -> None:
        random = self._random.split("users", number)
        users = Users(
            Workload(random.split("workload"), self._descriptor.block_tokens),
            random,
            count=self.options.users,
            thinking_us=self._pace.thinking_us,
            tenants=self._scopes[:2],
            shared=self._scopes[2],
            overheard=self._overheard,
            undisturbed=self.options.faults in ("none", "engines"),
        )
        self.users.append(users)
        self._add(
            f"front end {number}",
            base_uri,
            partial(self._front_end, policy, base_uri),
            own_effects=users.effects(),
            on_start=users.started,
            on_crash=users.crashed,
        )

    def _add_operator(self, mean_ms: int, random: Randomness) -> Operator:
        operator = Operator(
            OPERATOR, self._places, self._overheard, random, mean_ms=mean_ms, lease_ms=self._times.lease_ms
        )
        self._add("operator", OPERATOR, lambda _: operator)
        return operator

    def _add_stranger(self, mean_ms: int, random: Randomness) -> Stranger:
        stranger = Stranger(STRANGER, self._places, self._overheard, random, mean_ms=mean_ms)
        self._add("stranger", STRANGER, lambda _: stranger)
        return stranger

    def _front_end(self, policy: Policy, base_uri: str, start: Start) -> Role:
        return FrontEnd(  # type: ignore[return-value]
            base_uri=base_uri,
            policy=policy,
            controller=CONTROLLER,
            descriptor=self._descriptor,
            scopes=self._scopes,
            call_ms=self._times.call_ms,
            placement_call_ms=self._times.call_ms,  # too short for some: an answer may find nobody there
            silence_ms=300,
            placement_ms=10_000,
            patience_ms=15_000,
        )


def _near(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Return a few of many, others for each number: no instance has a link to everybody."""
    start = number % len(names) if len(names) > _NEIGHBOURS else 0
    return (*names[start:], *names[:start])[:_NEIGHBOURS]


@attrs.frozen
class _Spread:
    """A policy of an embedder: any instance that may take the request, whatever it costs."""

    random_bytes: Callable[[int], bytes] = attrs.field(repr=False)

    def choose(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return one of the candidates, or None where none may take the request."""
        allowed = [candidate for candidate in candidates if not candidate.refused]
        return allowed[self.random_bytes(1)[0] % len(allowed)] if allowed else None


class _Names:
    """Base URIs of a deployment."""

    def __init__(self, options: Options) -> None:
        self.holders = tuple(f"https://holder{n}.example/" for n in range(options.holders))
        self.instances = tuple(f"https://instance{n}.example/" for n in range(options.instances))
        self.front_ends = ("https://front0.example/",)

    def places(self, scopes: tuple[Scope, ...], descriptor: CompatibilityDescriptor) -> Places:
        """Return who is where."""
        return Places(
            index=INDEX,
            controller=CONTROLLER,
            holders=self.holders,
            instances=self.instances,
            scopes={scope.scope_id: scope for scope in scopes},
            descriptor=descriptor,
        )

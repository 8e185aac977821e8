"""A simulated deployment on paper: what a seed draws of it, who is where, what each may do, and the roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvsp_core.container import ContainerHeader
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.index_parts import IndexParts
from kvsp_core.limits import ENGINE_SILENCE_MS
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
from kvsp_sim.engine import KINDS
from kvsp_sim.host import Start
from kvsp_sim.overheard import Places
from kvsp_sim.randomness import Randomness
from kvsp_sim.scarcity import Scarcity
from kvsp_sim.variety import Variety

__all__ = ["DESCRIPTOR", "WIRES", "Deployment", "Options"]

INDEX: Final = "https://index.example/"
CONTROLLER: Final = "https://controller.example/"
OPERATOR: Final = "https://operator.example/"
STRANGER: Final = "https://stranger.example/"
"""A client without a part in any scope."""
OUTSIDER: Final = "https://outsider.example/"
"""An instance without one."""

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

    @classmethod
    def drawn(cls, random: Randomness) -> _Times:
        return cls(
            status_ttl_ms=random.pick((200, 500, 1_500)),
            replica_ttl_ms=random.pick((2_000, 4_000, 8_000)),
            lease_ms=random.pick((1_000, 1_000, 2_000)),
            call_ms=random.pick((50, 150, 500)),
        )


@attrs.frozen(kw_only=True)
class _Patience:
    """How long an engine may report nothing, a session send no checkpoint, an instance take to resume one,
    and a user get no token.
    """

    engine_silence_ms: int = ENGINE_SILENCE_MS
    idle_ms: int = 2_000
    resume_ms: int = 1_000
    user_ms: int = 15_000


_PATIENCE: Final = MappingProxyType(
    {"engines": _Patience(engine_silence_ms=400, idle_ms=60_000, resume_ms=6_000, user_ms=30_000)}
)
"""Where engines are all that fails, nobody gives up before an engine that hangs is noticed, or before a front
end comes back, which waits for 2 s at most."""


@attrs.frozen(kw_only=True)
class _Pace:
    """How fast engines are, and how long a user thinks. A slow engine makes fetching worth more than
    computing, and its sessions are there when something fails.
    """

    token_us: int
    decode_us: int
    thinking_us: int
    engine_failure: float

    @classmethod
    def drawn(cls, random: Randomness, faults: str) -> _Pace:
        return cls(
            token_us=random.pick((20, 200, 2_000)),
            decode_us=random.pick((3_000, 10_000, 30_000)),
            thinking_us=random.pick((30_000, 200_000, 1_000_000)),
            engine_failure=random.pick(often) if (often := _ENGINE_FAILURES.get(faults)) else 0.0,
        )


@attrs.frozen(kw_only=True)
class _Room:
    """How many octets tiers hold, and how many a client may lease: few blocks or many."""

    holder_bytes: int
    instance_bytes: int
    """Where instances have less, what others keep is loaded again."""
    quota_bytes: int

    @classmethod
    def drawn(cls, random: Randomness, own: Randomness, block: ContainerHeader) -> _Room:
        holder_bytes = block.size_bytes * random.pick((5, 10, 40))
        return cls(
            holder_bytes=holder_bytes,
            instance_bytes=min(holder_bytes, block.size_bytes * own.pick((3, 40, 40))),
            quota_bytes=block.data_bytes * random.pick((8, 30, 200)),
        )


@attrs.frozen(kw_only=True)
class _Company:
    """Who takes part beside the roles."""

    outsider: bool
    stranger: bool
    operator: bool
    reshards: bool
    others_have_a_scope: bool
    """Whether stranger and outsider have a scope of their own."""
    mean_ms: int
    """How often an operator or a stranger does something."""

    @classmethod
    def drawn(cls, random: Randomness) -> _Company:
        return cls(
            outsider=random.chance(0.3),
            stranger=random.chance(0.5),
            operator=random.chance(0.7),
            reshards=random.chance(0.5),
            others_have_a_scope=random.chance(0.6),
            mean_ms=random.pick((20, 60, 200)),
        )


class Deployment:
    """What a seed draws of a deployment, and its roles.

    The methods named after roles build one, of what is left of its former life.
    """

    def __init__(self, options: Options, random: Randomness) -> None:
        self.options = options
        self.times = _Times.drawn(random.split("limits"))
        self.patience = _PATIENCE.get(options.faults, _Patience())
        pace = random.split("pace")
        self.pace = _Pace.drawn(pace, options.faults)
        large = options.wire == "h2" and random.split("blocks").chance(0.3)
        self.descriptor = _LARGE_BLOCKS if large else DESCRIPTOR
        self.block = ContainerHeader.for_layers(self.descriptor)
        self.room = _Room.drawn(pace, random.split("room"), self.block)
        self.scarcity = Scarcity.drawn(random.split("scarcity"))
        self.variety = variety = Variety.drawn(random.split("variety"))
        self._spreads = random.split("placement").chance(0.5)  # then blocks are loaded from others
        self.scope_keys = tuple(pace.octets(32) for _ in range(4))
        self.scopes = tuple(map(Scope, self.scope_keys[:3]))
        self._elsewhere = Scope(self.scope_keys[3])
        """A scope of others, in which those without a part in these may have one."""
        self.company = _Company.drawn(random.split("company"))
        self.front_ends = ("https://front0.example/",)
        self.places = Places(
            index=IndexParts((INDEX, *(f"https://index{n}.example/" for n in range(1, variety.index_parts)))),
            controller=CONTROLLER,
            holders=tuple(f"https://holder{n}.example/" for n in range(options.holders)),
            instances=tuple(f"https://instance{n}.example/" for n in range(options.instances)),
            scopes={scope.scope_id: scope for scope in self.scopes},
            descriptor=self.descriptor,
        )
        self.producers = self.places.instances[: variety.producers]
        self.rules = self._rules()
        """What each scope allows now."""
        self._policy = self.make_policy()

    # Who may do what

    def make_policy(self) -> Policy:
        """Return the policy as it is now, which who starts from now on goes by."""
        principals = {
            **dict.fromkeys(self.places.index.uris, (RoleName.INDEX,)),
            CONTROLLER: (RoleName.CONTROLLER,),
            **dict.fromkeys(self.places.holders, (RoleName.HOLDER,)),
            **dict.fromkeys(self.places.instances, (RoleName.INSTANCE, RoleName.HOLDER)),
            **dict.fromkeys(self.front_ends, (RoleName.FRONT_END,)),
            OPERATOR: (RoleName.OPERATOR, RoleName.CONTROLLER, RoleName.INSTANCE),
            STRANGER: (RoleName.FRONT_END, RoleName.HOLDER, RoleName.INSTANCE),
            OUTSIDER: (RoleName.INSTANCE, RoleName.HOLDER),
        }
        self._policy = Policy(principals, self.rules)
        return self._policy

    def _rules(self) -> dict[str, ScopeRules]:
        keepers: Any = frozenset(self.places.keepers)
        readers = keepers | {CONTROLLER, OPERATOR, *self.front_ends}
        rules = ScopeRules(read=readers, write=keepers, publish=keepers, withdraw=keepers | {CONTROLLER})
        shared = attrs.evolve(rules, shared=True)
        producers: Any = self.producers
        rules = attrs.evolve(rules, producers=producers)
        by_scope = zip(self.scopes, (rules, rules, shared), strict=True)
        scopes = {scope.scope_id: allowed for scope, allowed in by_scope}
        others: Any = (STRANGER, OUTSIDER) if self.company.others_have_a_scope else ()
        elsewhere = ScopeRules(read=others, write=others, publish=others, withdraw=others)
        scopes[self._elsewhere.scope_id] = elsewhere
        return scopes

    def allowed(self) -> dict[str, frozenset[str]]:
        """Return the scopes of which each client may get something; who is not in it, none."""
        parties = (CONTROLLER, OPERATOR, *self.places.keepers, *self.front_ends)
        return dict.fromkeys(parties, frozenset(self.places.scopes))

    # Roles

    def _descriptors(self) -> Descriptors:
        known = Descriptors()
        if self.variety.knows_models:
            known.add(self.descriptor)
        return known

    def index(self, base_uri: str, start: Start) -> Role:
        """Return a part of the index."""
        table = ReplicaIndex(
            max_keys=self.scarcity.lookup_keys,
            client_bytes=self.scarcity.index_client_bytes,
            quarantine_ms=_QUARANTINE_MS,
        )
        return Index(
            base_uri=base_uri, policy=self._policy, replica_index=table, descriptors=self._descriptors()
        )

    def controller(self, start: Start) -> Role:
        """Return the controller."""
        times, variety, places = self.times, self.variety, self.places
        placement = PlacementSettings(
            index_uris=places.index.uris,
            classes={} if variety.says_numerics else dict.fromkeys(places.instances, "simulated"),
            descriptors={one.compat_id: one for one in (self.descriptor,) if variety.knows_models},
            default_service_us=100_000,
            call_timeout_ms=times.call_ms,
            policy=_Spread(start.random_bytes) if self._spreads else LowestCost(),
        )
        settings = ControllerSettings(
            placement=placement,
            times=SessionTimes(
                placed_ms=2_000,
                idle_ms=self.patience.idle_ms,
                wait_ms=3_000,
                resume_ms=self.patience.resume_ms,
                kept_ms=10_000,
            ),
            prefetch_deadline_ms=100,
            prefetch_lease_ms=times.lease_ms,
            call_timeout_ms=times.call_ms,
            placement_wait_ms=1_000,
            open_by_checkpoint=variety.opens_by_checkpoint,
            max_sessions=self.scarcity.sessions,
            max_resumes=self.scarcity.resumes,
            max_pending_placements=self.scarcity.pending_placements,
        )
        return Controller(
            base_uri=CONTROLLER,
            policy=self._policy,
            settings=settings,
            random_bytes=start.random_bytes,
            stored=start.stored,
            fleet=Fleet(retry_ms=100, warm_up_ms=500),
        )

    def holder(self, base_uri: str, start: Start) -> Role:
        """Return a holder."""
        return self._holder(base_uri, start, self.room.holder_bytes)

    def _holder(
        self, base_uri: str, start: Start, capacity_bytes: int, numbers: Numbers | None = None
    ) -> Holder:
        limits = TierLimits(capacity_bytes=capacity_bytes, read_mbit_per_s=1_000)
        return Holder(
            base_uri=base_uri,
            policy=self._policy,
            tiers={HOST: limits, LOCAL: limits},
            random_bytes=start.random_bytes,
            now_ms=start.now_ms,
            index_uris=self.places.index.uris,
            replica_ttl_ms=self.times.replica_ttl_ms,
            lease_table=LeaseTable(
                random_bytes=start.random_bytes,
                now_ms=start.now_ms,
                max_ttl_ms=self.times.lease_ms,
                quota_bytes=self.room.quota_bytes,
                max_leases=self.scarcity.leases_per_client,
            ),
            descriptors=self._descriptors(),
            numbers=numbers,
            max_incoming=self.scarcity.incoming_blocks,
        )

    def instance(self, base_uri: str, number: int, start: Start) -> Role:
        """Return an instance, and the holder beside it, with which it shares its numbers."""
        scopes = self.scopes
        if base_uri == OUTSIDER:
            scopes = (self._elsewhere,) if self.company.others_have_a_scope else ()
        numbers = Numbers()
        return Instance(
            self._instance_settings(base_uri, number, start),
            models={self.descriptor.compat_id: self.descriptor},
            scopes={scope.scope_id: scope for scope in scopes},
            blocks=self._holder(base_uri, start, self.room.instance_bytes, numbers),
            numbers=numbers,
            policy=self._policy,
            random_bytes=start.random_bytes,
            now_ms=start.now_ms,
        )

    def _instance_settings(self, base_uri: str, number: int, start: Start) -> InstanceSettings:
        holders, instances = self.places.holders, self.places.instances
        return InstanceSettings(
            base_uri=base_uri,
            controller_uri=CONTROLLER,
            index_uris=self.places.index.uris,
            epoch=start.wall_ms + start.life,
            copy_holder=holders[number % len(holders)] if holders else None,
            batch_size=self.scarcity.batch_size,
            prefill_tokens_per_s=1_000_000 // self.pace.token_us,
            decode_tokens_per_s=max(1, 1_000_000 // self.pace.decode_us),
            links=tuple(
                Link(holder=holder, mbit_per_s=1_000, rtt_us=300)
                for holder in (*_near(holders, number), *_near(instances, number + 1))
                if holder != base_uri
            ),
            status_ttl_ms=self.times.status_ttl_ms,
            report_to_index=self.variety.reports_to_index,
            numerics=f"kind {number % KINDS}" if self.variety.says_numerics else None,
            sleep_after_ms=self.variety.sleep_after_ms,
            copy_lease_ms=self.times.lease_ms,
            resume_load_ms=200,
            call_timeout_ms=self.times.call_ms,
            fetch_timeout_ms=2 * self.times.call_ms,
            session_kept_ms=5_000,
            engine_silence_ms=self.patience.engine_silence_ms,
            prefetch=self.scarcity.prefetch,
        )

    def front_end(self, base_uri: str, start: Start) -> Role:
        """Return a front end."""
        return FrontEnd(  # type: ignore[return-value]
            base_uri=base_uri,
            policy=self._policy,
            controller=CONTROLLER,
            descriptor=self.descriptor,
            scopes=self.scopes,
            call_ms=self.times.call_ms,
            placement_call_ms=self.times.call_ms,  # too short for some: an answer may find nobody there
            silence_ms=300,
            placement_ms=10_000,
            patience_ms=self.patience.user_ms,
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

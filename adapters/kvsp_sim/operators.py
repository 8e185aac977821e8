"""Who runs a simulated deployment: an operator, who asks and gives orders over the protocol, and the program
around the controller, which splits contexts over instances.

Once all is healed both see to it that what was begun ends, and say what has not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import attrs

from kvsp_core.answers import read_answer
from kvsp_core.errors import KVSPError
from kvsp_core.ext_messages import AttendRequest, IndexInfo, LeaseListing, SplitRequest
from kvsp_core.identity import component_id
from kvsp_core.machines.reshard_plan import divide
from kvsp_core.messages import (
    DirectiveStatus,
    LeaseGranted,
    LeaseRenewal,
    LeaseRequest,
    LookupRequest,
    StateChange,
)
from kvsp_core.records import Shard, ShardMap
from kvsp_core.resources import (
    Attend,
    ChangeInstanceState,
    CreateLease,
    DeleteSession,
    DescribeIndex,
    EndShardMap,
    GetBlock,
    GetDirective,
    GetSession,
    GetShardMap,
    HeadBlock,
    ListInstances,
    ListLeases,
    ListSessions,
    Lookup,
    Operation,
    ReleaseLease,
    RenewLease,
    SplitContext,
)
from kvsp_core.roles.controller import Controller
from kvsp_core.roles.controller_store import MapContext
from kvsp_core.roles.role import AnswerReceived, CallFailed, Effect, Input
from kvsp_core.roles.work import Work
from kvsp_sim.host import Host, Instruction
from kvsp_sim.overheard import Overheard, Places
from kvsp_sim.property import shortened
from kvsp_sim.randomness import Randomness

__all__ = ["Operator", "Resharding"]

_CALL_MS: Final = 1_000
_ASKING_MS: Final = 500
"""How often it is asked whether all has ended."""
_LEASES: Final = 4
_OVER: Final = ("complete", "partial", "failed")

Purpose = Callable[[AnswerReceived], None]


class Operator:
    """Drains, puts to sleep and wakes instances, lists what there is, ends sessions and attends to shards.

    It has the roles of a controller and of an instance too, so that it may ask how far a directive is, and
    attend. `mean_ms` is the mean time between two requests, `lease_ms` the longest lease that is granted. One
    that `asks_more` splits contexts itself, and asks an index what it would take to load them.
    """

    def __init__(
        self,
        base_uri: str,
        places: Places,
        overheard: Overheard,
        random: Randomness,
        *,
        mean_ms: int,
        lease_ms: int,
        asks_more: bool = False,
    ) -> None:
        self.base_uri = base_uri
        self.leases: dict[str, int | None] = {}
        """Leases of each keeper of blocks, once it has been asked; None where it was not heard."""
        self.directives: dict[tuple[str, str], str] = {}
        """Those that have been seen under way, and their states."""
        self.records: dict[str, int | None] = {}
        """How many records each part of the index holds, once it was asked; None where it was not heard."""
        self._places = places
        self._overheard = overheard
        self._random = random
        self._mean_ms = mean_ms
        self._lease_ms = lease_ms
        self._work = Work()
        self._due_ms = 0
        self._settling = False
        self._leased: dict[str, str] = {}  # lease -> holder
        self._split: list[tuple[str, SplitRequest]] = []
        self._unended_maps: set[str] | None = None
        more = (self._lookup, *(self._split_one,) * 3, self._about_a_map) if asks_more else ()
        self._acts: tuple[Callable[[], None], ...] = (
            self._change_a_state,
            self._change_a_state,
            self._list,
            self._about_a_session,
            self._ask_for_a_block,
            *(self._lease,) * 6,
            *(self._attend,) * 3,
            self._directive,
            *more,
        )

    # The role

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin, after a while."""
        self._due_ms = now_ms + self._random.between(1, 2 * self._mean_ms)
        return ()

    def next_deadline_ms(self) -> int | None:
        """Return when the next request is due."""
        return self._due_ms

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in; return the calls to make."""
        match item:
            case AnswerReceived(call_id):
                purpose: Purpose | None = self._work.calls.pop(call_id, None)
                if purpose is not None and item.response.status in (200, 201, 404):
                    purpose(item)
            case CallFailed(call_id):
                self._work.calls.pop(call_id, None)
            case _ if now_ms >= self._due_ms:
                if self._settling:
                    self._due_ms = now_ms + _ASKING_MS
                    self._ask_all()
                else:
                    self._due_ms = now_ms + self._random.between(1, 2 * self._mean_ms)
                    self._random.pick(self._acts)()
            case _:
                pass
        return self._work.take()

    # While faults happen

    def _call(
        self, base_uri: str, operation: Operation, body: object = None, purpose: Purpose = lambda _: None
    ) -> None:
        self._work.call(base_uri, operation, body, purpose=purpose, timeout_ms=_CALL_MS)

    def _change_a_state(self) -> None:
        instance = self._random.pick(self._places.instances)
        state = self._random.pick(("active", "active", "draining", "sleeping"))
        self._call(
            self._places.controller, ChangeInstanceState(component_id(instance)), StateChange(state=state)
        )

    def _list(self) -> None:
        places = self._places
        choices: tuple[tuple[Operation, str], ...] = (
            (ListInstances(), places.controller),
            (ListSessions(), places.controller),
            (DescribeIndex(), places.index.uris[0]),
            (ListLeases(), self._random.pick(places.keepers)),
        )
        operation, base_uri = self._random.pick(choices)
        self._call(base_uri, operation)

    def _about_a_session(self) -> None:
        if self._overheard.sessions:
            session, _ = self._random.pick(self._overheard.sessions)
            ends = self._random.chance(0.2)
            self._call(self._places.controller, DeleteSession(session) if ends else GetSession(session))

    def _ask_for_a_block(self) -> None:
        random, places = self._random, self._places
        if not self._overheard.prompts:
            return
        scope_id, tokens = random.pick(self._overheard.prompts)
        keys = places.keys(scope_id, tokens)
        if not keys:
            return
        kind: type[HeadBlock | GetBlock] = HeadBlock if random.chance(0.5) else GetBlock
        operation = kind(
            places.descriptor.compat_id,
            scope_id,
            random.pick(keys),
            layers=random.pick((None, (0, 0), (1, 1), (0, 1), (2, 3))),
            codec=random.pick((None, 1, 7)),
        )
        self._call(random.pick(places.keepers), operation)

    def _lease(self) -> None:
        """Lease a block for a while, or have a lease end sooner, later or at once."""
        random = self._random
        if not self._leased or random.chance(0.5):
            if self._overheard.blocks:
                holder, key = random.pick(self._overheard.blocks)
                body = LeaseRequest(block_keys=(key,), ttl_ms=random.spread(10, self._lease_ms))
                self._call(holder, CreateLease(), body, partial(self._leased_at, holder))
            return
        lease = random.pick(list(self._leased))
        if random.chance(0.7):
            renewal = LeaseRenewal(ttl_ms=random.spread(10, self._lease_ms))
            self._call(self._leased[lease], RenewLease(lease), renewal)
        else:
            self._call(self._leased.pop(lease), ReleaseLease(lease))

    def _leased_at(self, holder: str, item: AnswerReceived) -> None:
        granted = _read(LeaseGranted, item)
        if granted is not None:
            self._leased[granted.lease] = holder
            if len(self._leased) > _LEASES:
                del self._leased[next(iter(self._leased))]

    def _attend(self) -> None:
        random, heard = self._random, self._overheard
        if not heard.members:
            return
        map_id, member = random.pick(heard.members)
        version = max(1, heard.maps.get(map_id, 1) - random.pick((0, 0, 0, 1)))
        if random.chance(0.1):
            member = random.pick(self._places.instances)
        self._call(member, Attend(map_id), AttendRequest(version=version, layer=0, queries=bytes(16)))

    def _directive(self) -> None:
        if self._overheard.directives:
            instance, directive = self._random.pick(self._overheard.directives)
            self._call(instance, GetDirective(directive))

    def _lookup(self) -> None:
        """Ask a part of the index what it would take to load a prompt, where that part knows of it."""
        if not self._overheard.prompts:
            return
        scope_id, tokens = self._random.pick(self._overheard.prompts)
        compat_id, keys = self._places.descriptor.compat_id, self._places.keys(scope_id, tokens)
        targets = tuple(self._places.instances)
        for part, share in self._places.index.shares(
            LookupRequest(scope_id=scope_id, compat_id=compat_id, block_keys=keys, targets=targets)
        ).items():
            self._call(part, Lookup(), share)

    def _split_one(self) -> None:
        """Split a context, or one that was split before, over some instances."""
        random, places = self._random, self._places
        if not self._overheard.prompts:
            return
        if len(self._split) < 2:
            scope_id, tokens = random.pick(self._overheard.prompts)
            split = SplitRequest(
                compat_id=places.descriptor.compat_id,
                scope_id=scope_id,
                block_keys=places.keys(scope_id, tokens),
                block_tokens=places.descriptor.block_tokens,
                token_count=len(tokens),
                instances=places.instances[:1],
            )
            self._split.append((f"asked{len(self._split)}", split))
        map_id, split = random.pick(self._split)
        instances = tuple(random.shuffled(places.instances)[: random.between(1, 3)])
        self._call(places.controller, SplitContext(map_id), attrs.evolve(split, instances=instances))

    def _about_a_map(self) -> None:
        map_id = self._random.pick([*self._overheard.maps, "unheard"])
        self._call(self._places.controller, GetShardMap(map_id))

    # Once all is healed

    def settle(self, now_ms: int) -> tuple[Effect, ...]:
        """Wake everybody, and ask from now on what has not ended."""
        self._settling = True
        self._due_ms = now_ms + _ASKING_MS
        for instance in self._places.instances:
            self._call(
                self._places.controller,
                ChangeInstanceState(component_id(instance)),
                StateChange(state="active"),
            )
        self.directives = dict.fromkeys(self._overheard.directives, "not asked")
        return self._work.take()

    def _ask_all(self) -> None:
        for keeper in self._places.keepers:
            if self.leases.get(keeper) != 0:
                self._call(keeper, ListLeases(), purpose=partial(self._leases_listed, keeper))
        for instance, directive in self.directives:
            self._call(
                instance,
                GetDirective(directive),
                purpose=partial(self._directive_told, (instance, directive)),
            )
        for map_id in sorted(self._unended_maps or ()):
            self._call(self._places.controller, EndShardMap(map_id), purpose=partial(self._map_told, map_id))
        for part in self._places.index.uris:
            self._call(part, DescribeIndex(), purpose=partial(self._index_told, part))

    def _leases_listed(self, keeper: str, item: AnswerReceived) -> None:
        listing = _read(LeaseListing, item)
        self.leases[keeper] = None if listing is None else len(listing.leases)

    def _directive_told(self, key: tuple[str, str], item: AnswerReceived) -> None:
        status = _read(DirectiveStatus, item)
        if status is None or status.state in _OVER:
            self.directives.pop(key, None)
        else:
            self.directives[key] = status.state

    def _map_told(self, map_id: str, item: AnswerReceived) -> None:
        if item.response.status == 404 and self._unended_maps is not None:
            self._unended_maps.discard(map_id)

    def _index_told(self, part: str, item: AnswerReceived) -> None:
        info = _read(IndexInfo, item)
        self.records[part] = None if info is None else info.records

    def end_maps(self) -> None:
        """Have the maps end that were asked for, as soon as each can be."""
        self._unended_maps = {map_id for map_id, _ in self._split}

    def unended_maps(self) -> str:
        """Return which of them have not ended, or an empty string."""
        return (
            f"{len(self._unended_maps)} maps that were asked for have not ended" if self._unended_maps else ""
        )

    def unended(self) -> str:
        """Return what was not seen to end, or an empty string."""
        for (instance, directive), state in self.directives.items():
            return f"prefetch directive {shortened(directive)} at {instance} is {state}"
        for keeper in self._places.keepers:
            if left := self.leases.get(keeper, -1):
                return f"{keeper} has {left} leases" if left > 0 else f"{keeper} did not list its leases"
        return ""


T = TypeVar("T")


def _read(kind: type[T], item: AnswerReceived) -> T | None:
    try:
        found = read_answer(kind, item.response, item.body)
    except KVSPError:
        return None
    return found if isinstance(found, kind) else None


@attrs.define
class _Map:
    context: MapContext
    tokens: int
    begun: bool = False


class Resharding:
    """Splits contexts over instances and splits them anew, as the program around the controller `host`.

    `mean_us` is the mean time between two changes.
    """

    def __init__(
        self, host: Host, places: Places, overheard: Overheard, random: Randomness, *, mean_us: int
    ) -> None:
        self._host = host
        self._places = places
        self._overheard = overheard
        self._random = random
        self._mean_us = mean_us
        self._maps: dict[str, _Map] = {}
        self._over: dict[str, _Map] = {}
        """Those that were seen to end; where that was not durable, the controller has them again."""
        self._count = 0
        self._rests = False
        self.ending = False
        """Whether all maps are to end."""
        self._later()

    def _later(self) -> None:
        delay_us = 500_000 if self.ending else self._random.between(1, 2 * self._mean_us)
        self._host.world.after(delay_us, self._act)

    def _act(self) -> None:
        if self.ending and not self._maps:
            return
        if self._rests and not self.ending:
            self._later()
            return
        self._host.deliver(Instruction("reshard", self._end_all if self.ending else self._change))
        self._later()

    def rest(self) -> None:
        """Leave all maps as they are."""
        self._rests = True

    def end(self) -> None:
        """End all maps, as soon as each can be."""
        self.ending = True
        self._maps = {**self._over, **self._maps}

    def unended(self) -> str:
        """Return what has not ended, or an empty string."""
        return f"{len(self._maps)} shard maps have not ended" if self._maps else ""

    def _end_all(self, controller: Controller, now_ms: int) -> tuple[Effect, ...]:
        effects: tuple[Effect, ...] = ()
        for map_id, split in list(self._maps.items()):
            if controller.shard_map(map_id) is None:
                del self._maps[map_id]
            else:
                effects += self._reshard(controller, map_id, (), split, now_ms)
        return effects

    def _change(self, controller: Controller, now_ms: int) -> tuple[Effect, ...]:
        random = self._random
        if len(self._maps) < 2 and self._overheard.prompts:
            map_id = self._new_map()
        elif self._maps:
            map_id = random.pick(list(self._maps))
        else:
            return ()
        split = self._maps[map_id]
        current = controller.shard_map(map_id)
        if current is None:
            if split.begun:  # it has ended, or the controller stopped before it was durable
                self._over[map_id] = self._maps.pop(map_id)
                return ()
            current = ShardMap(map=map_id, version=0, shards=())
        shards: tuple[Shard, ...] = ()
        if not current.shards or random.chance(0.8):
            names = random.shuffled(self._places.instances)[: random.between(1, 3)]
            shards = divide(current, split.tokens, names, block_tokens=split.context.block_tokens)
        return self._reshard(controller, map_id, shards, split, now_ms)

    def _new_map(self) -> str:
        self._count += 1
        scope_id, tokens = self._random.pick(self._overheard.prompts)
        context = MapContext(
            compat_id=self._places.descriptor.compat_id,
            scope_id=scope_id,
            block_keys=self._places.keys(scope_id, tokens),
            block_tokens=self._places.descriptor.block_tokens,
        )
        map_id = f"map{self._count}"
        self._maps[map_id] = _Map(context, len(tokens))
        return map_id

    def _reshard(
        self, controller: Controller, map_id: str, shards: tuple[Shard, ...], split: _Map, now_ms: int
    ) -> tuple[Effect, ...]:
        try:
            effects = controller.reshard(map_id, shards, split.context, now_ms)
        except KVSPError:
            return ()  # not now: a change is under way, or an instance is not active
        split.begun = True
        self._host.cluster.counts["reshards begun"] += 1
        return effects

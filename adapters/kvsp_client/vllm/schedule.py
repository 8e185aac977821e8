"""What to load and what to store: the scheduler's side of the connector, without vLLM and without I/O.

vLLM asks how much of a prompt is found elsewhere, allocates blocks, and says in every step what it
computes. A `Plan` tells the worker's side of that step which blocks to fill before and which to copy after
it. Requests and scheduler outputs are vLLM's own objects, read by attribute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from kvsp_client import ClientError, Prefix, PrefixKeys, Unavailable
from kvsp_client.vllm.engine_descriptor import NotShared, Sharing
from kvsp_core.block_keys import BlockKeyChain

__all__ = ["Load", "Lookups", "Plan", "Schedule", "Store"]

PAUSE_S: Final = 5.0
"""How long the index is not asked after it did not answer: each request would wait for it in vain."""


@attrs.frozen
class Load:
    """Blocks of vLLM's cache to fill with a prefix that was found, in order."""

    prefix: Prefix = attrs.field(repr=False)
    blocks: tuple[int, ...]


@attrs.frozen
class Store:
    """Blocks of vLLM's cache that are complete after the step, and their names, in order."""

    keys: PrefixKeys = attrs.field(repr=False)
    blocks: tuple[int, ...]


@attrs.frozen
class Plan:
    """What the worker's side does in a step."""

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()


class Lookups:
    """Asks the index, and leaves it alone for a while after it did not answer.

    `find` is the client's lookup, `clock` tells seconds, `count` takes what happened.
    """

    def __init__(
        self, find: Callable[[PrefixKeys], Prefix], *, clock: Callable[[], float], count: Counter[str]
    ) -> None:
        self._find = find
        self._clock = clock
        self._count = count
        self._silent_until = float("-inf")

    def __call__(self, keys: PrefixKeys) -> Prefix | None:
        """Return the longest prefix that the index knows; None where it could not be asked."""
        if self._clock() < self._silent_until:
            self._count["lookups_left_out"] += 1
            return None
        self._count["lookups"] += 1
        try:
            return self._find(keys)
        except ClientError as error:
            if isinstance(error, Unavailable):
                self._count["lookups_unanswered"] += 1
                self._silent_until = self._clock() + PAUSE_S
            else:
                self._count["lookups_refused"] += 1
            return None


@attrs.define(eq=False)
class _Tracked:
    """A request whose blocks are shared."""

    request: Any
    descriptor: Any
    scope_id: str
    chain: BlockKeyChain
    keys: list[str] = attrs.field(factory=list)
    """Of the complete blocks of tokens fed to the chain."""
    found: Prefix | None = None
    """What the index knew when last asked; None before, and once it has been used."""
    first: int = 0
    """Blocks of it that vLLM has itself."""
    load: tuple[Prefix, int] | None = None
    """What the next plan loads: a prefix, and the number of its first block."""
    blocks: list[int] = attrs.field(factory=list)
    """vLLM's block table of the request."""
    computed: int = 0
    """Tokens that were computed before the last step."""
    offered: int = 0
    """Leading blocks that the index knows or that were offered to be stored."""

    @property
    def block_tokens(self) -> int:
        tokens: int = self.descriptor.block_tokens
        return tokens

    def names(self, start: int, stop: int) -> PrefixKeys:
        """Return the names of blocks [start, stop) of the request's tokens."""
        done, need = len(self.keys), stop
        if done < need:
            tokens = self.request.all_token_ids[done * self.block_tokens : need * self.block_tokens]
            self.keys += [key.hex() for key in self.chain.feed(tokens)]
        return PrefixKeys(
            descriptor=self.descriptor, scope_id=self.scope_id, keys=tuple(self.keys[start:stop])
        )


class Schedule:
    """The requests that vLLM schedules, as far as their blocks are shared.

    `loads` and `stores` say which of both this engine does; `say` is told, once for each reason, why a
    request is not shared.
    """

    def __init__(
        self,
        sharing: Sharing,
        lookup: Callable[[PrefixKeys], Prefix | None],
        *,
        count: Counter[str],
        say: Callable[[str], None],
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        self._sharing = sharing
        self._lookup = lookup
        self._count = count
        self._say = say
        self._loads = loads
        self._stores = stores
        self._tracked: dict[str, _Tracked] = {}
        self._not_shared: dict[str, Any] = {}
        """The request of each name that is not shared."""
        self._said: set[str] = set()

    # Before a request is scheduled

    def matched_tokens(self, request: Any, computed: int) -> int:
        """Return how many tokens beyond the first `computed` can be loaded, in whole blocks.

        vLLM asks again in every step in which it has no room for the request; the index is asked once.
        """
        tracked = self._track(request)
        if tracked is None or not self._loads:
            return 0
        size = tracked.block_tokens
        tracked.first = -(-computed // size)
        usable = (len(request.all_token_ids) - 1) // size  # vLLM computes at least the last token
        if usable <= tracked.first:
            return 0
        if tracked.found is None:
            tracked.found = self._lookup(tracked.names(0, usable))
        if tracked.found is None:
            return 0
        tracked.offered = max(tracked.offered, len(tracked.found))
        return max(0, min(len(tracked.found), usable) - tracked.first) * size

    def _track(self, request: Any) -> _Tracked | None:
        """Return what is known of a request; None where it is not shared.

        It is looked at again where another one of that name has just ended, and where images came later on,
        with further input of a session.
        """
        name = request.request_id
        known = self._tracked.get(name)
        if known is not None and known.request is request and not request.mm_features:
            return known
        if self._not_shared.get(name) is request:
            return None
        self._forget(name)
        try:
            scope, descriptor = self._sharing.of(request)
        except NotShared as reason:
            self._not_shared[name] = request
            self._count[f"not_shared_{reason.label}"] += 1
            if str(reason) not in self._said and len(self._said) < 64:
                self._said.add(str(reason))
                self._say(f"a request's blocks are not shared: {reason}")
            return None
        tracked = _Tracked(request, descriptor, scope.scope_id, BlockKeyChain(scope, descriptor))
        self._tracked[name] = tracked
        return tracked

    def _forget(self, name: str) -> None:
        self._tracked.pop(name, None)
        self._not_shared.pop(name, None)

    def allocated(self, request: Any, external_tokens: int) -> None:
        """Take note that vLLM has blocks for a request, and how many tokens it wants loaded into them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        count, found = external_tokens // tracked.block_tokens, tracked.found
        if count and found is not None:
            tracked.load = (found.part(tracked.first, tracked.first + count), tracked.first)
            self._count["requested_tokens"] += count * tracked.block_tokens
        tracked.found = None

    # A step

    def plan(self, output: Any) -> Plan:
        """Return what the worker's side has to do in the step that vLLM has scheduled."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._table(new.req_id, new.block_ids, replace=True)
            computed[new.req_id] = new.num_computed_tokens
        running = output.scheduled_cached_reqs
        for number, name in enumerate(running.req_ids):
            self._table(name, running.new_block_ids[number], replace=name in running.resumed_req_ids)
            computed[name] = running.num_computed_tokens[number]
        loads, stores = [], []
        for name, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is not None:
                tracked = self._track(tracked.request)
            if tracked is None or name not in computed:
                continue
            if tracked.load is not None:
                prefix, first = tracked.load
                tracked.load = None
                loads.append(Load(prefix, tuple(tracked.blocks[first : first + len(prefix)])))
            if self._stores and (store := self._complete(tracked, computed[name], scheduled)) is not None:
                stores.append(store)
        begun = {new.req_id for new in output.scheduled_new_reqs}
        for name in output.finished_req_ids - begun:
            self._forget(name)
        return Plan(tuple(loads), tuple(stores))

    def _table(self, name: str, blocks: Sequence[Sequence[int]] | None, *, replace: bool) -> None:
        tracked = self._tracked.get(name)
        if tracked is None:
            return
        if replace:
            tracked.blocks = []
        if blocks is not None:
            tracked.blocks += blocks[0]

    def _complete(self, tracked: _Tracked, computed: int, scheduled: int) -> Store | None:
        """Return the blocks that this step completes, of tokens that are certain: drafts may yet be
        rejected."""
        size = tracked.block_tokens
        if computed < tracked.computed:  # a load failed, or the request was preempted: it is computed again
            tracked.offered = min(tracked.offered, computed // size)
        tracked.computed = computed
        until = min(computed + scheduled, len(tracked.request.all_token_ids)) // size
        until = min(until, len(tracked.blocks))
        start = tracked.offered
        if until <= start:
            return None
        tracked.offered = until
        return Store(tracked.names(start, until), tuple(tracked.blocks[start:until]))

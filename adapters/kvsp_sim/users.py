"""Users of a simulated front end: each asks for one output after the other, and is told of tokens and
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs

from kvsp_core.identity import Scope
from kvsp_core.limits import MAX_ENGINE_FAILURES
from kvsp_core.roles.front_end import (
    Abandon,
    Generate,
    GenerationEnded,
    GenerationFailed,
    GenerationPlaced,
    TokenReady,
)
from kvsp_sim.facts import OutputEnded, StreamOpened, TokenDelivered
from kvsp_sim.host import Host
from kvsp_sim.overheard import Overheard
from kvsp_sim.property import Violation
from kvsp_sim.randomness import Randomness
from kvsp_sim.workload import Wish, Workload

__all__ = ["Users"]


_BY_OTHERS: Final = (
    "the session was ended by somebody else",
    "no instance takes the request",
    "the session has sent no checkpoint for too long",
)
"""What operators can do to a request, who end sessions and drain all instances, and what comes of a queue
that is longer than the short time that a session may be idle here."""


@attrs.define
class _Open:
    wish: Wish
    user: int
    life: int
    engine_failures: int
    """Of all engines, when it last got anywhere."""


class Users:
    """`count` users of a front end, who think for up to `thinking_us` before each request. `tenants` and
    `shared` are the scopes of the deployment. An engine that fails costs no user the output, unless engines
    fail `MAX_ENGINE_FAILURES` times on it in a row; where engines are all that fails (`undisturbed`), nothing
    else does either.
    """

    def __init__(
        self,
        workload: Workload,
        random: Randomness,
        *,
        count: int,
        thinking_us: int,
        tenants: tuple[Scope, ...],
        shared: Scope,
        overheard: Overheard,
        undisturbed: bool,
    ) -> None:
        self._workload = workload
        self._random = random
        self._count = count
        self._thinking_us = thinking_us
        self._tenants = tenants
        self._shared = shared
        self._overheard = overheard
        self._undisturbed = undisturbed
        self._host: Host
        self._open: dict[int, _Open] = {}
        self._last = 0
        self._quiet = False

    def effects(self) -> Mapping[type, Callable[..., None]]:
        """Return what to do with the effects that are for users."""
        return {
            GenerationPlaced: lambda _: None,
            TokenReady: self._token,
            GenerationEnded: self._ended,
            GenerationFailed: self._failed,
        }

    def started(self, host: Host) -> None:
        """The front end is up: users come, after a while each."""
        self._host = host
        for user in range(self._count):
            host.later(self._random.below(self._thinking_us), self._ask, user)

    def crashed(self) -> None:
        """The front end is gone: who waited for output is told so by the connection."""
        self._host.cluster.counts["requests lost with their front end"] += len(self._open)
        self._open.clear()

    def be_quiet(self) -> None:
        """Nobody asks for more."""
        self._quiet = True

    @property
    def waiting(self) -> int:
        """How many wait for output."""
        return len(self._open)

    def _ask(self, user: int) -> None:
        if self._quiet:
            return
        wish = self._workload.next()
        self._last += 1
        number = self._last
        host = self._host
        self._open[number] = _Open(wish, user, host.life, self._engine_failures())
        host.witness.stream_opened(number, wish.prompt)
        host.witness.observe(StreamOpened(stream=number, history=wish.history(), expected=wish.output_tokens))
        host.cluster.counts["requests"] += 1
        scope_id = self._tenants[wish.tenant].scope_id
        self._overheard.prompts.append((scope_id, wish.prompt))
        shared = ((self._shared.scope_id, wish.shared_tokens),) if wish.shared_tokens else ()
        host.deliver(
            Generate(
                generation=number,
                scope_id=scope_id,
                prompt=wish.prompt,
                sampler=wish.sampler,
                shared=shared,
            )
        )
        if self._random.chance(0.05):
            host.later(self._random.spread(1_000, 2_000_000), self._abandon, number)

    def _abandon(self, number: int) -> None:
        if number in self._open:
            self._host.cluster.counts["requests abandoned"] += 1
            self._over(number)
            self._host.deliver(Abandon(number))

    def _token(self, effect: TokenReady) -> None:
        if opened := self._open.get(effect.generation):
            opened.engine_failures = self._engine_failures()
            self._host.witness.observe(
                TokenDelivered(stream=effect.generation, index=effect.index, token=effect.token)
            )
            self._host.cluster.counts["tokens delivered"] += 1

    def _ended(self, effect: GenerationEnded) -> None:
        opened = self._open.get(effect.generation)
        if opened is not None:
            self._host.witness.observe(OutputEnded(stream=effect.generation))
            self._host.cluster.counts["requests served"] += 1
            self._over(effect.generation)

    def _failed(self, effect: GenerationFailed) -> None:
        if opened := self._open.get(effect.generation):
            self._host.cluster.counts[f"requests failed: {effect.detail}"] += 1
            scope_id, witness = self._tenants[opened.wish.tenant].scope_id, self._host.witness
            if scope_id != witness.purged and (self._host.base_uri, scope_id) not in witness.put_out:
                self._check_failed(effect, self._engine_failures() - opened.engine_failures)
            self._over(effect.generation)

    def _check_failed(self, effect: GenerationFailed, engine_failures: int) -> None:
        by_engines = "attempts failed" in effect.detail
        # The first may have happened before the last token came, which had been on its way.
        if by_engines and engine_failures < MAX_ENGINE_FAILURES - 1:
            detail = f"engines failed {engine_failures} times, and a user was told: {effect.detail}"
            raise Violation("engines_cost_no_output", detail)
        if self._undisturbed and not by_engines and effect.detail not in _BY_OTHERS:
            raise Violation("engines_cost_no_output", f"without a cause a user was told: {effect.detail}")

    def _engine_failures(self) -> int:
        return self._host.cluster.counts["kvsp_engine_failures"]

    def _over(self, number: int) -> None:
        opened = self._open.pop(number)
        self._host.later(self._random.below(self._thinking_us), self._ask, opened.user)

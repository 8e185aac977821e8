"""A controller, instances and a front end with one user, for the explorer: all of them the shipped roles.

The user wants a few tokens after a prompt that fills no block. An output token that completes a block is
covered by a checkpoint at once, any other when the output ends or after a while. Nothing is cached,
prefetched or copied: there is no index, and the engines do not offer their blocks. Statuses are sent once,
unless the timer of an instance fires.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.limits import MAX_RESUME_ATTEMPTS
from kvsp_core.machines.fleet import Fleet
from kvsp_core.machines.session import SessionTimes
from kvsp_core.records import Sampler
from kvsp_core.resources import RoleName
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.controller import Controller, ControllerSettings
from kvsp_core.roles.controller_placement import PlacementSettings
from kvsp_core.roles.engine import (
    Abort,
    Pause,
    Prefilled,
    Proceed,
    SequenceEnded,
    StartSequence,
    TokensDecoded,
)
from kvsp_core.roles.front_end import (
    FrontEnd,
    Generate,
    GenerationEnded,
    GenerationFailed,
    GenerationPlaced,
    TokenReady,
)
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.instance import Instance, InstanceSettings
from kvsp_core.roles.work import Numbers
from kvsp_sim.deployment import DESCRIPTOR
from kvsp_sim.explored_node import ExploredNode
from kvsp_sim.facts import OutputEnded, StreamOpened, TokenDelivered, TokenDrawn
from kvsp_sim.host import Start
from kvsp_sim.messages import Question
from kvsp_sim.session_properties import extend_history

__all__ = [
    "ABSENT",
    "CONTROLLER",
    "FRONT_END",
    "MODEL",
    "SCOPE",
    "USER_EFFECTS",
    "SessionGroup",
    "ask",
    "epoch_of",
]

CONTROLLER: Final = "https://controller/"
FRONT_END: Final = "https://front/"
ABSENT: Final = "https://index/"
"""There is no index: a call to it fails."""

MODEL: Final = CompatibilityDescriptor.from_members({**DESCRIPTOR.members(), "block_tokens": 2})
SCOPE: Final = Scope(bytes(range(32)))
_PROMPT: Final = (7,)
_STREAM: Final = 1


class TinyEngine:
    """Draws one token after the other, each different from those of any other engine, until `output` are
    there. It offers no blocks. When a token is drawn is an event of its own.
    """

    def __init__(self, node: ExploredNode, first_token: int, output: int) -> None:
        self._node = node
        self._next_token = first_token + 16 * node.life
        self._output = output
        self._sequences: dict[int, tuple[bytes, int]] = {}  # what was drawn so far, and how many tokens
        self._paused: set[int] = set()

    def execute(self, command: object) -> None:
        """Carry out a command."""
        match command:
            case StartSequence(sequence=sequence, tokens=tokens, sampler=sampler):
                history = b""
                for token in tokens:
                    history = extend_history(history, token)
                self._sequences[sequence] = history, sampler.step
                self._node.deliver(Prefilled(sequence))
                self._go_on(sequence, sampler.step)
            case Abort(sequence):
                self._sequences.pop(sequence, None)
                self._paused.discard(sequence)
                # What is drawn for a sequence that is gone does nothing, and its number does not come again.
                self._node.pending[:] = [job for job in self._node.pending if job[1] != (sequence,)]
            case Pause(sequence):
                self._paused.add(sequence)
            case Proceed(sequence):
                self._paused.discard(sequence)
                self._node.later(0, self._draw, sequence)

    def _draw(self, sequence: int) -> None:
        if sequence not in self._sequences or sequence in self._paused:
            return
        history, step = self._sequences[sequence]
        token = self._next_token + step
        self._node.observe(TokenDrawn(history=history, token=token))
        self._sequences[sequence] = extend_history(history, token), step + 1
        self._node.deliver(TokensDecoded(sequence, step, (token,)))
        self._go_on(sequence, step + 1)

    def _go_on(self, sequence: int, step: int) -> None:
        if step >= self._output:
            self._node.deliver(SequenceEnded(sequence, "length"))
        else:
            self._node.later(0, self._draw, sequence)


@lru_cache(maxsize=4096)
def epoch_of(question: Question) -> tuple[str, int] | None:
    """Return for a checkpoint and for a resume which session it is about and its epoch, for any other call
    None.

    Who has gone on to a newer epoch takes nothing from how a call of an older one ends: an instance has begun
    another run of the session, and a controller looks whether the epoch is still its own.
    """
    path = question.request.path
    if not path.startswith("sessions/") or not path.endswith(("/checkpoint", "/resume")):
        return None
    return path, json.loads(question.body)["epoch"]


# The user


def ask(output: int, node: ExploredNode) -> None:
    """Have the user of a front end ask for output."""
    node.witness.stream_opened(_STREAM, _PROMPT)
    history = b""
    for token in _PROMPT:
        history = extend_history(history, token)
    node.observe(StreamOpened(stream=_STREAM, history=history, expected=output))
    node.waiting |= {_STREAM}
    wish = Generate(
        generation=_STREAM,
        scope_id=SCOPE.scope_id,
        prompt=_PROMPT,
        sampler=Sampler(method="random", seed=0, step=0, deterministic=False),
    )
    node.deliver(wish)  # type: ignore[arg-type]  # an input that only a front end has


def _token(node: ExploredNode, effect: TokenReady) -> None:
    node.observe(TokenDelivered(stream=effect.generation, index=effect.index, token=effect.token))


def _ended(node: ExploredNode, effect: GenerationEnded) -> None:
    node.observe(OutputEnded(stream=effect.generation))
    node.waiting -= {effect.generation}


def _failed(node: ExploredNode, effect: GenerationFailed) -> None:
    node.waiting -= {effect.generation}


USER_EFFECTS: Final[Mapping[type, Callable[..., None]]] = MappingProxyType(
    {
        GenerationPlaced: lambda *_: None,
        TokenReady: _token,
        GenerationEnded: _ended,
        GenerationFailed: _failed,
    }
)


# The roles


@attrs.frozen
class SessionGroup:
    """How the roles of a group with these instances are built.

    Clocks move by timers only, so durations say which timer is next: an instance that is silent is found
    before anything that waits for it gives up, the first instance before the second.
    """

    instances: tuple[str, ...]
    output: int = 2
    attempts: int = MAX_RESUME_ATTEMPTS
    policy: Policy = attrs.field(init=False)

    @policy.default
    def _policy(self) -> Policy:
        everyone: Any = (CONTROLLER, FRONT_END, *self.instances)
        principals = {
            CONTROLLER: (RoleName.CONTROLLER,),
            FRONT_END: (RoleName.FRONT_END,),
            **dict.fromkeys(self.instances, (RoleName.INSTANCE, RoleName.HOLDER)),
        }
        return Policy(principals, {SCOPE.scope_id: ScopeRules(read=everyone, write=everyone)})

    def controller(self, start: Start) -> Controller:
        """Return the controller."""
        placement = PlacementSettings(
            index_uris=(),
            classes=dict.fromkeys(self.instances, "tiny"),
            descriptors={MODEL.compat_id: MODEL},
        )
        times = SessionTimes(
            placed_ms=50_000,
            idle_ms=60_000,
            wait_ms=70_000,
            resume_ms=40_000,
            kept_ms=90_000,
            attempts=self.attempts,
        )
        settings = ControllerSettings(
            placement=placement, times=times, prefetch=False, placement_wait_ms=80_000
        )
        return Controller(
            base_uri=CONTROLLER,
            policy=self.policy,
            settings=settings,
            random_bytes=start.random_bytes,
            stored=start.stored,
            fleet=Fleet(warm_up_ms=0),
        )

    def instance(self, base_uri: str, start: Start) -> Instance:
        """Return an instance, with a holder beside it that has no tiers."""
        numbers = Numbers()
        policy = self.policy
        blocks = Holder(
            base_uri=base_uri,
            policy=policy,
            tiers={},
            random_bytes=start.random_bytes,
            now_ms=start.now_ms,
            numbers=numbers,
        )
        settings = InstanceSettings(
            base_uri=base_uri,
            controller_uri=CONTROLLER,
            index_uris=(ABSENT,),
            epoch=start.life,
            prefill_tokens_per_s=1_000,
            decode_tokens_per_s=100,
            status_ttl_ms=3_000 + 2_000 * self.instances.index(base_uri),
        )
        return Instance(
            settings,
            models={MODEL.compat_id: MODEL},
            scopes={SCOPE.scope_id: SCOPE},
            blocks=blocks,
            numbers=numbers,
            policy=policy,
            random_bytes=start.random_bytes,
            now_ms=start.now_ms,
        )

    def engine(self, node: ExploredNode) -> TinyEngine:
        """Return the engine of an instance."""
        number = self.instances.index(node.base_uri)
        return TinyEngine(node, 100 * (number + 1), self.output)

    def front_end(self, _: Start) -> FrontEnd:
        """Return the front end."""
        return FrontEnd(
            base_uri=FRONT_END,
            policy=self.policy,
            controller=CONTROLLER,
            descriptor=MODEL,
            scopes=(SCOPE,),
            patience_ms=1_000,
            placement_ms=1_000,
        )

"""The instances of a controller: what they report, and what they are asked to be (ST-2, ST-4, LC-1, LC-5,
decisions W14 and W15).

`Instances` answers reports and operators' wishes, and calls instances for the states that the fleet wants.
What the end of an instance means for sessions and shard maps is the controller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, assert_never

import attrs

from kvsp_core.answers import read_outcome
from kvsp_core.identity import component_id
from kvsp_core.machines import fleet as fleets
from kvsp_core.machines.fleet import Fleet
from kvsp_core.machines.session import Owner
from kvsp_core.messages import StateChange, StatusAnswer
from kvsp_core.problems import BAD_REQUEST, INVALID_STATE, NOT_FOUND, Problem
from kvsp_core.records import InstanceStatus
from kvsp_core.resources import ChangeInstanceState, ChangeState, ReportStatus
from kvsp_core.roles.controller_store import epoch_drop, epoch_write
from kvsp_core.roles.role import AnswerReceived, CallFailed, Persist
from kvsp_core.roles.serving import Asked, answer, refuse
from kvsp_core.roles.work import Work

__all__ = ["Instances", "StateCall"]

_UNKNOWN_INSTANCE: Final = Problem(NOT_FOUND, "no such instance reports here")
_NO_SUCH_STATE: Final = Problem(INVALID_STATE, "state: an instance can be asked to be active or draining")


@attrs.frozen
class StateCall:
    """Asks an instance for a state."""

    instance: str


class Instances:
    """The instances that report to one controller.

    `lost` is told of each incarnation that has ended, `back` of each instance that reports anew or again, and
    `forgotten` of each that is gone and not to come back, as `may_report` says. `min_active` of them stay
    awake whatever they ask; a new value holds from the next wish on.
    """

    def __init__(
        self,
        work: Work,
        fleet: Fleet,
        *,
        lost: Callable[[Owner, int], None],
        back: Callable[[str, int], None],
        forgotten: Callable[[str], None],
        may_report: Callable[[str], bool],
        min_active: int,
        call_timeout_ms: int,
    ) -> None:
        self._work = work
        self._fleet = fleet
        self._lost = lost
        self._back = back
        self._forgotten = forgotten
        self._may_report = may_report
        self.min_active = min_active
        self._call_timeout_ms = call_timeout_ms
        self._base_uris: dict[str, str] = {}  # by the identifier in paths
        self._changed = False

    def take_changed(self) -> bool:
        """Return whether an instance that may take work has perhaps come since the last time."""
        changed, self._changed = self._changed, False
        return changed

    def restore(self, instance: str, epoch: int, now_ms: int) -> None:
        """Take up an instance that was stored."""
        self._base_uris[component_id(instance)] = instance
        self._fleet.handle(fleets.RestoreInstance(instance, epoch), now_ms)

    def forget_retired(self, now_ms: int) -> None:
        """Forget the instances that have failed and may not report any more."""
        for instance in self._fleet.instances():
            if not self._may_report(instance):
                self._do(self._fleet.handle(fleets.ForgetInstance(instance), now_ms), now_ms)

    def report(self, asked: Asked, now_ms: int) -> None:
        """Serve PUT status."""
        status, operation = asked.body, asked.operation
        assert isinstance(status, InstanceStatus)
        assert isinstance(operation, ReportStatus)
        if component_id(status.instance) != operation.instance_id:
            problem = Problem(BAD_REQUEST, "instance: is not the instance of the path")
            self._work.emit(refuse(asked.request_id, problem))
            return
        self._base_uris.setdefault(operation.instance_id, status.instance)
        event = fleets.ReceiveStatus(status, accept_sleep=self._may_sleep(status))
        self._do(self._fleet.handle(event, now_ms), now_ms, asked.request_id)

    def _may_sleep(self, status: InstanceStatus) -> bool:
        if status.requested_state is None:
            return False
        others = (other for other in self._fleet.assignable() if other.instance != status.instance)
        awake = sum(not self._fleet.is_failing(other.instance) for other in others)
        return awake >= self.min_active

    def change_state(self, asked: Asked, now_ms: int) -> None:
        """Serve an operator's wish to drain or to wake an instance (decision W33)."""
        operation, body = asked.operation, asked.body
        assert isinstance(operation, ChangeInstanceState)
        assert isinstance(body, StateChange)
        instance = self._base_uris.get(operation.instance_id)
        if instance is None:
            self._work.emit(refuse(asked.request_id, _UNKNOWN_INSTANCE))
            return
        match body.state:
            case "active":
                event: fleets.Event = fleets.WakeInstance(instance)
            case "draining" | "sleeping":
                event = fleets.DrainInstance(instance)
            case _:
                self._work.emit(refuse(asked.request_id, _NO_SUCH_STATE))
                return
        effects = self._fleet.handle(event, now_ms)
        self._do(effects, now_ms, asked.request_id)
        if not any(isinstance(effect, fleets.Refused) for effect in effects):
            state = self._fleet.wanted_of(instance) or self._fleet.kind_of(instance).value
            self._work.emit(answer(asked.request_id, StatusAnswer(state=state)))
        self._changed = True

    def wake_one(self, compat_id: str, may_serve: Callable[[str], bool], now_ms: int) -> None:
        """Have a sleeping instance become active that computes this, where there is one and none is being
        woken; one whose engine fails only where there is no other."""
        sleeping = []
        for instance in self._fleet.instances():
            status = self._fleet.status_of(instance)
            if status is None or (status.compat_ids and compat_id not in status.compat_ids):
                continue
            if not may_serve(instance):
                continue
            if self._fleet.wanted_of(instance) == fleets.MemberKind.ACTIVE.value:
                return
            if self._fleet.kind_of(instance) is fleets.MemberKind.SLEEPING:
                sleeping.append((self._fleet.is_failing(instance), instance))
        if sleeping:
            self._do(self._fleet.handle(fleets.WakeInstance(min(sleeping)[1]), now_ms), now_ms)

    def tick(self, now_ms: int) -> None:
        """Let the deadlines that have come take effect."""
        self._do(self._fleet.handle(fleets.TimerFired(), now_ms), now_ms)

    def state_answered(self, call: StateCall, item: AnswerReceived | CallFailed, now_ms: int) -> None:
        """Take in how an instance has answered a wish."""
        problem = read_outcome(item.response, item.body) if isinstance(item, AnswerReceived) else None
        refused = problem is not None and problem.type == INVALID_STATE
        event = fleets.EndStateRequest(call.instance, refused)
        self._do(self._fleet.handle(event, now_ms), now_ms)

    def _do(self, effects: Iterable[fleets.Effect], now_ms: int, request_id: int | None = None) -> None:
        """Do what the fleet wants; its answer goes to this request."""
        for effect in effects:
            match effect:
                case fleets.PersistEpoch(instance, epoch):
                    self._work.emit(Persist((epoch_write(instance, epoch),)))
                case fleets.DropEpoch(instance):
                    self._work.emit(Persist((epoch_drop(instance),)))
                    self._base_uris.pop(component_id(instance), None)
                    self._forgotten(instance)
                case fleets.AnswerStatus(state):
                    if request_id is not None:
                        self._work.emit(answer(request_id, StatusAnswer(state=state)))
                case fleets.Refused(problem):
                    if request_id is not None:
                        self._work.emit(refuse(request_id, problem))
                case fleets.InstanceFailed(instance, epoch):
                    self._work.observe("kvsp_instances_failed")
                    self._lost(Owner(instance, epoch), now_ms)
                    if not self._may_report(instance):
                        self._do(self._fleet.handle(fleets.ForgetInstance(instance), now_ms), now_ms)
                case fleets.InstanceJoined(instance):
                    self._changed = True
                    self._back(instance, now_ms)
                case fleets.StateReported():
                    self._changed = True
                case fleets.RequestState(instance, state):
                    self._work.call(
                        instance,
                        ChangeState(),
                        StateChange(state=state),
                        purpose=StateCall(instance),
                        timeout_ms=self._call_timeout_ms,
                    )
                case _:
                    assert_never(effect)

"""Every state machine, and the roles that have a model: any sequence of operations does what its model says.

The first octet picks a machine; the others decide what is done to it. The models, which are the property
tests', hold what is to be true: no leased block goes, no token twice, one owner in an epoch.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test

_STEPS = 40
_MODELS = Path(__file__).resolve().parents[2] / "tests" / "property"
_SETTINGS = settings(
    stateful_step_count=_STEPS, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def _machines() -> dict[str, Callable[[bytes], object]]:
    found: dict[str, Callable[[bytes], object]] = {}
    for path in sorted(_MODELS.glob("test_*_model.py")):
        module = importlib.import_module(f"tests.property.{path.stem}")
        for kind in vars(module).values():
            if (
                isinstance(kind, type)
                and issubclass(kind, RuleBasedStateMachine)
                and kind.__module__ == module.__name__
            ):
                test = get_state_machine_test(kind, settings=_SETTINGS)
                found[path.stem.removeprefix("test_")] = test.hypothesis.fuzz_one_input
    return found


MACHINES = _machines()
NAMES = sorted(MACHINES)
SEEDS = tuple(
    bytes([number]) + hashlib.shake_128(f"{name} {draw}".encode()).digest(400)
    for number, name in enumerate(NAMES)
    for draw in range(4)
)


def one_input(data: bytes) -> None:
    """Let a machine do what the octets say."""
    if data:
        MACHINES[NAMES[data[0] % len(NAMES)]](data[1:])

"""An engine in its thread, as the driver of an instance sees it.

BLAS is pinned before numpy is imported, because kernel and threads decide the last bits of a product: only
instances of one numerics fingerprint continue each other's sessions to the bit (requirement CP-6).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from kvsp_core.errors import KVSPError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.roles.engine import (
    EngineCommand,
    EngineEvent,
    Pause,
    Proceed,
    SequenceEnded,
    SequenceRefused,
    StartSequence,
)

if TYPE_CHECKING:
    from kvsp_engines.engine import Engine, LayerOctets
    from kvsp_services.driver import Driver

__all__ = ["MakeEngine", "ThreadedEngine", "numpy_engine", "pinned_numerics"]

STOP_S: Final = 5.0
"""Time that an engine has to finish the piece of work in hand when it is to end."""
_BLAS_THREADS: Final = 1
"""Several instances share a machine; more threads each would only get in each other's way."""


def pinned_numerics(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that fix how BLAS computes; those the environment sets already are left out.

    They have an effect in a process only before numpy is imported there.
    """
    wanted = {"OPENBLAS_NUM_THREADS": str(_BLAS_THREADS)}
    if platform.machine() in ("x86_64", "AMD64") and _has_avx2():
        wanted["OPENBLAS_CORETYPE"] = "Haswell"
    return {name: value for name, value in wanted.items() if name not in environment}


def _has_avx2() -> bool:
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


class ThreadedEngine:
    """Runs an engine in a thread, and hands what it does to `driver`. See `ports.EnginePort`.

    A sequence that the engine does not begin ends as refused, or with an error. An engine that breaks takes
    its role along.
    """

    def __init__(self, engine: Engine, block_tokens: int) -> None:
        from kvsp_engines.engine import EngineThread

        self.driver: Driver | None = None
        self._block_tokens = block_tokens
        self._thread = EngineThread(
            engine, deliver_events=self._events, deliver_job=self._job, broken=self._broken
        )
        self._thread.start()
        self.numerics = engine.numerics
        """What decides the last bits of its results, or None where it does not say."""

    def submit(self, command: EngineCommand, layers: Sequence[LayerOctets] = ()) -> None:
        """Queue a command."""
        self._thread.submit(command, layers)

    def stop(self, patience_s: float = STOP_S) -> bool:
        """Say nothing more to the driver, and end the thread; return whether it has ended within
        `patience_s`. Blocks for as long. May be called in any thread.
        """
        self.driver = None
        return self._thread.stop(patience_s)

    def _events(self, events: tuple[EngineEvent, ...]) -> None:
        if self.driver is not None and events:
            self.driver.engine_events(events)

    def _job(self, command: EngineCommand, result: Sequence[LayerOctets] | bytes | KVSPError) -> None:
        if self.driver is None:
            return
        if isinstance(result, KVSPError) and isinstance(command, StartSequence | Pause | Proceed):
            if isinstance(command, StartSequence):
                reason = "refused" if isinstance(result, SequenceRefused) else "error"
                self.driver.engine_events((SequenceEnded(command.sequence, reason),))
            return
        self.driver.engine_job_over(command, result, self._block_tokens)

    def _broken(self, error: Exception) -> None:
        if self.driver is not None:
            self.driver.engine_broken(error)


MakeEngine: TypeAlias = "Callable[[CompatibilityDescriptor], Engine]"


def numpy_engine(model_dir: Path, model: CompatibilityDescriptor) -> Engine:
    """Return the numpy engine on a model's directory."""
    from kvsp_engines.engine import NumpyEngine

    return NumpyEngine(model_dir, kv_dtype=model.kv_dtype, block_tokens=model.block_tokens)

"""An engine in its thread, as the driver of an instance sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvsp_core.errors import KVSPError
from kvsp_core.roles.engine import EngineCommand, EngineEvent
from kvsp_engines.engine import Engine, EngineThread, LayerOctets

if TYPE_CHECKING:
    from kvsp_services.driver import Driver

__all__ = ["ThreadedEngine", "numpy_engine"]


class ThreadedEngine:
    """Runs an engine in a thread, and hands what it does to `driver`. See `ports.EnginePort`."""

    def __init__(self, engine: Engine, block_tokens: int) -> None:
        self.driver: Driver | None = None
        self._block_tokens = block_tokens
        self._thread = EngineThread(engine, deliver_events=self._events, deliver_job=self._job)
        self._thread.start()

    def submit(self, command: EngineCommand, layers: Sequence[LayerOctets] = ()) -> None:
        """Queue a command."""
        self._thread.submit(command, layers)

    def stop(self) -> None:
        """End the thread; blocks until the piece of work in hand is done."""
        self._thread.stop()

    def _events(self, events: tuple[EngineEvent, ...]) -> None:
        if self.driver is not None and events:
            self.driver.engine_events(events)

    def _job(self, command: EngineCommand, result: Sequence[LayerOctets] | bytes | KVSPError) -> None:
        if self.driver is not None:
            self.driver.engine_job_over(command, result, self._block_tokens)


def numpy_engine(model_dir: Path, *, kv_dtype: str, block_tokens: int) -> ThreadedEngine:
    """Return the numpy engine on a model's directory, running."""
    from kvsp_engines.engine import NumpyEngine

    return ThreadedEngine(NumpyEngine(model_dir, kv_dtype=kv_dtype, block_tokens=block_tokens), block_tokens)

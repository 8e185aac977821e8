"""An engine in its thread, seen by a driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from queue import SimpleQueue

from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.records import Sampler
from kvsp_core.roles.engine import (
    EngineCommand,
    EngineEvent,
    Proceed,
    SequenceEnded,
    SequenceRefused,
    StartSequence,
)
from kvsp_engines.engine import JobResult
from kvsp_services.engine_port import ThreadedEngine, pinned_numerics

GREEDY = Sampler(method="greedy", seed=0, step=0, deterministic=True)
START = StartSequence(sequence=3, tokens=(1,), cached_tokens=0, sampler=GREEDY)


class Refusing:
    """An engine that carries out no command, or breaks at work."""

    numerics = "none to speak of"

    def __init__(self, error: KVSPError | None = None) -> None:
        self.error = error or LocalProtocolError("no")
        self.breaks = False

    def execute(self, command: EngineCommand, layers: Sequence[object] = ()) -> JobResult:
        if not self.breaks:
            raise self.error
        return ()

    def busy(self) -> bool:
        return self.breaks

    def step(self) -> tuple[EngineEvent, ...]:
        raise OSError("no memory")


class Heard:
    """Plays the driver."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[object] = SimpleQueue()

    def engine_events(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            self.queue.put(event)

    def engine_job_over(self, command: EngineCommand, result: object, block_tokens: int) -> None:
        self.queue.put((command, result))

    def engine_broken(self, error: Exception) -> None:
        self.queue.put(error)


def made(engine: Refusing) -> tuple[ThreadedEngine, Heard]:
    port, heard = ThreadedEngine(engine, 16), Heard()  # type: ignore[arg-type]
    port.driver = heard  # type: ignore[assignment]
    return port, heard


def test_a_sequence_that_the_engine_refuses_ends_so_which_is_no_error() -> None:
    port, heard = made(Refusing(SequenceRefused("it is too long")))
    port.submit(START)
    assert heard.queue.get(timeout=30) == SequenceEnded(3, "refused")
    assert port.stop()


def test_a_sequence_that_the_engine_cannot_begin_ends_with_an_error_and_nothing_else_does() -> None:
    port, heard = made(Refusing())
    assert port.numerics == "none to speak of"
    port.submit(Proceed(3))
    port.submit(START)
    assert heard.queue.get(timeout=30) == SequenceEnded(3, "error")
    port.submit("anything else")  # type: ignore[arg-type]
    command, result = heard.queue.get(timeout=30)  # type: ignore[misc]
    assert command == "anything else"
    assert isinstance(result, KVSPError)
    assert port.stop()


def test_an_engine_that_breaks_takes_its_role_along() -> None:
    engine = Refusing()
    port, heard = made(engine)
    engine.breaks = True
    port.submit(START)
    found = heard.queue.get(timeout=30)
    while not isinstance(found, OSError):
        found = heard.queue.get(timeout=30)
    assert port.stop()


def test_what_the_environment_says_is_left_alone() -> None:
    assert "OPENBLAS_NUM_THREADS" in pinned_numerics({})
    assert "OPENBLAS_NUM_THREADS" not in pinned_numerics({"OPENBLAS_NUM_THREADS": "2"})


def test_the_variables_are_there_before_numpy_is() -> None:
    program = (
        "import sys; sys.argv = ['kvsp', 'serve', '--help']\n"
        "import os, atexit, kvsp_services.cli as cli\n"
        "atexit.register(lambda: print('pinned', os.environ.get('OPENBLAS_NUM_THREADS')))\n"
        "seen = []\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy': print('numpy', os.environ.get('OPENBLAS_NUM_THREADS'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "cli.main()\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin"}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "numpy None" not in said.stdout
    assert "pinned 1" in said.stdout

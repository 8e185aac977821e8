"""The numpy engine behind the engine interface: sequences, blocks, and sampling that can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import numpy as np
import pytest

from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.records import Sampler
from kvsp_core.roles.engine import (
    Abort,
    BlockComputed,
    EngineCommand,
    EngineEvent,
    ExportBlock,
    ImportBlock,
    Pause,
    Prefilled,
    Proceed,
    SequenceEnded,
    SequenceRefused,
    StartSequence,
    TokensDecoded,
)
from kvsp_engines.engine import PREFILL_TOKENS, EngineThread, JobResult, LayerOctets, NumpyEngine
from kvsp_engines.prepare import prepare_tiny
from kvsp_engines.sampling import draw
from kvsp_engines.text import TextCodec, TextStream
from kvsp_engines.weights import ModelError

BLOCK = 16
PROMPT = tuple(np.random.default_rng(7).integers(3, 259, 70).tolist())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    prepare_tiny(path)
    return path


@pytest.fixture
def engine(directory: Path) -> NumpyEngine:
    return NumpyEngine(directory, kv_dtype="bf16", block_tokens=BLOCK)


def sampler(method: str = "greedy", *, step: int = 0, max_tokens: int = 40) -> Sampler:
    params: dict[str, object] = {"max_tokens": max_tokens}
    if method == "top-p":
        params |= {"p": 0.9, "temperature": 1.5}
    return Sampler(method=method, params=params, seed=11, step=step, deterministic=True)


def run(engine: NumpyEngine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while engine.busy():
        events += engine.step()
    return events


def output(events: list[EngineEvent], sequence: int = 1) -> list[tuple[int, int]]:
    return [
        (event.first_index + offset, token)
        for event in events
        if isinstance(event, TokensDecoded) and event.sequence == sequence
        for offset, token in enumerate(event.tokens)
    ]


@pytest.mark.parametrize("method", ["greedy", "top-p"])
def test_a_sequence_prefills_decodes_and_ends(engine: NumpyEngine, method: str) -> None:
    engine.execute(StartSequence(sequence=1, tokens=PROMPT, cached_tokens=0, sampler=sampler(method)))
    events = run(engine)
    drawn = output(events)
    assert [index for index, _ in drawn] == list(range(40))
    assert events[-1] == SequenceEnded(1, "length")
    assert [e.index for e in events if isinstance(e, BlockComputed)] == list(range((70 + 40) // BLOCK))
    first_token = next(i for i, e in enumerate(events) if isinstance(e, TokensDecoded))
    assert events.index(Prefilled(1)) < first_token


@pytest.mark.parametrize("method", ["greedy", "top-p"])
@pytest.mark.requirement("MG-2", "CP-5")
def test_a_sequence_resumed_elsewhere_draws_the_same_tokens(
    engine: NumpyEngine, directory: Path, method: str
) -> None:
    engine.execute(StartSequence(sequence=1, tokens=PROMPT, cached_tokens=0, sampler=sampler(method)))
    undisturbed = output(run(engine))
    blocks = [engine.execute(ExportBlock(9, 1, index, 0)) for index in range(5)]

    other = NumpyEngine(directory, kv_dtype="bf16", block_tokens=BLOCK)
    for index, layers in enumerate(blocks):
        other.execute(ImportBlock(8, 5, index, 0), layers)
    tokens = PROMPT + tuple(token for _, token in undisturbed[:23])
    start = StartSequence(sequence=5, tokens=tokens, cached_tokens=80, sampler=sampler(method, step=23))
    other.execute(start)
    events = run(other)
    assert output(events, 5) == undisturbed[23:]
    assert [e.index for e in events if isinstance(e, BlockComputed)] == [5]
    assert [other.execute(ExportBlock(9, 5, index, 0)) for index in range(5)] == blocks


@pytest.mark.requirement("PF-2")
def test_a_long_prompt_does_not_hold_up_a_running_answer(engine: NumpyEngine) -> None:
    engine.execute(StartSequence(sequence=1, tokens=PROMPT, cached_tokens=0, sampler=sampler()))
    while Prefilled(1) not in engine.step():
        pass
    engine.execute(StartSequence(sequence=2, tokens=PROMPT * 4, cached_tokens=0, sampler=sampler()))
    pieces = -(-len(PROMPT * 4) // PREFILL_TOKENS)
    for _ in range(pieces):
        assert output(list(engine.step()))


def test_a_paused_sequence_computes_but_draws_nothing(engine: NumpyEngine) -> None:
    engine.execute(StartSequence(sequence=1, tokens=PROMPT, cached_tokens=0, sampler=sampler()))
    engine.execute(Pause(1))
    events = run(engine)
    assert events[-1] == Prefilled(1)
    assert not output(events)
    engine.execute(Proceed(1))
    assert output(list(engine.step()))
    engine.execute(Pause(1))
    assert not engine.busy()
    engine.execute(Abort(1))
    with pytest.raises(LocalProtocolError, match="no sequence 1"):
        engine.execute(Proceed(1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": ()}, "at least one token"),
        ({"tokens": (999,)}, "below 259"),
        ({"tokens": (5,) * 3000}, "at most 2048"),
        ({"cached_tokens": 16}, "16 tokens are said to be cached, 0 are"),
        (
            {"sampler": Sampler(method="beam", params={}, seed=1, step=0, deterministic=False)},
            "greedy, top-p",
        ),
        (
            {"sampler": Sampler(method="top-p", params={"p": 0}, seed=1, step=0, deterministic=False)},
            r"sampler\.params\.p must be",
        ),
        (
            {"sampler": Sampler(method="top-p", params={"top_k": 5}, seed=1, step=0, deterministic=False)},
            r"members this engine does not know; it knows p, temperature",
        ),
    ],
)
def test_a_sequence_the_engine_cannot_run_is_refused(
    engine: NumpyEngine, change: dict[str, object], says: str
) -> None:
    members: dict[str, object] = {"tokens": PROMPT, "cached_tokens": 0, "sampler": sampler()}
    with pytest.raises(LocalProtocolError, match=says) as caught:
        engine.execute(StartSequence(sequence=1, **(members | change)))  # type: ignore[arg-type]
    assert not engine.busy()
    of_the_request = not says.startswith(("at least one", "16 tokens"))
    assert isinstance(caught.value, SequenceRefused) is of_the_request


def test_blocks_are_imported_in_order_and_whole(engine: NumpyEngine) -> None:
    with pytest.raises(LocalProtocolError, match="without a gap"):
        engine.execute(ImportBlock(1, 1, 1, 0), [(b"", b"")] * 2)
    with pytest.raises(LocalProtocolError, match="2 layers, not 1"):
        engine.execute(ImportBlock(1, 1, 0, 0), [(b"", b"")])
    with pytest.raises(LocalProtocolError, match="no sequence 1"):
        engine.execute(ExportBlock(1, 1, 0, 0))


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_almost_no_temperature_draws_the_likeliest_token(temperature: float) -> None:
    logits = np.array([-20, 1, 30, 29.9], np.float32)
    params = {"temperature": temperature}
    sampler = Sampler(method="top-p", params=params, seed=7, step=0, deterministic=False)
    assert [draw(logits, sampler, step) for step in range(4)] == [2, 2, 2, 2]


def test_a_draw_depends_on_seed_and_step_alone() -> None:
    logits = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    first = [draw(logits, sampler("top-p"), step) for step in range(200)]
    assert first == [draw(logits, sampler("top-p"), step) for step in range(200)]
    assert len(set(first)) > 5
    narrow = Sampler(method="top-p", params={"p": 1e-9}, seed=1, step=0, deterministic=True)
    assert {draw(logits, narrow, step) for step in range(50)} == {int(logits.argmax())}


def test_a_thread_runs_commands_in_order_and_reports(engine: NumpyEngine) -> None:
    events: SimpleQueue[tuple[EngineEvent, ...]] = SimpleQueue()
    jobs: SimpleQueue[object] = SimpleQueue()
    thread = EngineThread(
        engine,
        deliver_events=events.put,
        deliver_job=lambda command, result: jobs.put((command, result)),
        broken=jobs.put,
    )
    thread.start()
    start = StartSequence(sequence=1, tokens=PROMPT, cached_tokens=0, sampler=sampler(max_tokens=3))
    thread.submit(start)
    seen: list[EngineEvent] = []
    while not any(isinstance(event, SequenceEnded) for event in seen):
        seen += events.get(timeout=30)
    assert [index for index, _ in output(seen)] == [0, 1, 2]
    assert jobs.get(timeout=30) == (start, ())
    thread.submit(Proceed(77))
    command, result = jobs.get(timeout=30)  # type: ignore[misc]
    assert command == Proceed(77)
    assert isinstance(result, KVSPError)
    assert thread.stop(30)


class _Importing:
    """An engine with a sequence that runs, into which blocks keep coming; it says how long things take."""

    numerics = None

    def __init__(self) -> None:
        self.time_s = 0
        self.done: list[str] = []
        self.ended: SimpleQueue[None] = SimpleQueue()
        self.thread = EngineThread(
            self,
            deliver_events=lambda events: None,
            deliver_job=lambda command, result: self.next_block(),
            broken=lambda error: self.ended.put(None),
            clock=lambda: float(self.time_s),
        )

    def next_block(self) -> None:
        self.thread.submit(ImportBlock(len(self.done), 2, 0, 0))

    def execute(self, command: EngineCommand, layers: Sequence[LayerOctets] = ()) -> JobResult:
        self.time_s += 5
        self.done.append("import")
        return ()

    def step(self) -> tuple[EngineEvent, ...]:
        self.time_s += 9
        self.done.append("step")
        return ()

    def busy(self) -> bool:
        if len(self.done) == 8:
            raise RuntimeError("seen enough")
        return True


@pytest.mark.requirement("PF-2")
def test_sequences_that_run_go_on_while_blocks_of_another_come_in() -> None:
    engine = _Importing()
    engine.next_block()
    engine.thread.start()
    engine.ended.get(timeout=30)
    assert engine.done == ["import", "step", *["import"] * 2, "step", *["import"] * 2, "step"]


def test_an_engine_that_raises_is_said_to_be_broken(engine: NumpyEngine) -> None:
    broken: SimpleQueue[Exception] = SimpleQueue()
    thread = EngineThread(
        engine, deliver_events=lambda events: None, deliver_job=lambda *job: None, broken=broken.put
    )
    thread.start()
    thread.submit("no command")  # type: ignore[arg-type]
    assert isinstance(broken.get(timeout=30), AssertionError)
    assert thread.stop(30)


class _Hanging:
    """An engine that does not come back from its work until it is let go."""

    numerics = None

    def __init__(self) -> None:
        self.begun, self.let_go = Event(), Event()

    def execute(self, command: EngineCommand, layers: Sequence[LayerOctets] = ()) -> JobResult:
        return ()

    def step(self) -> tuple[EngineEvent, ...]:
        self.begun.set()
        self.let_go.wait()
        return ()

    def busy(self) -> bool:
        return True


def test_a_thread_whose_engine_hangs_is_not_waited_for() -> None:
    engine = _Hanging()
    thread = EngineThread(
        engine, deliver_events=lambda events: None, deliver_job=lambda *job: None, broken=lambda error: None
    )
    thread.start()
    assert engine.begun.wait(30)
    assert not thread.stop(0)
    engine.let_go.set()
    assert thread.stop(30)


def test_text_survives_the_tokenizer(directory: Path) -> None:
    codec = TextCodec(directory)
    text = "Grüße, 漢字 12!\n"
    tokens = codec.encode(text)
    assert codec.decode(tokens) == text
    stream = TextStream(codec)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.finish() == text
    assert "" in pieces
    chat = codec.encode_chat([{"role": "user", "content": "Hi"}])
    assert chat[0] == 1
    assert codec.decode(chat).endswith("assistant\n")


def test_what_has_no_tokens_is_a_value_error(directory: Path) -> None:
    codec = TextCodec(directory)
    with pytest.raises(ValueError, match="surrogates"):
        codec.encode("\ud83d")
    codec._template = codec._template.environment.from_string("{{ nobody.knows.this }}")
    with pytest.raises(ValueError, match="the chat template refuses it"):
        codec.encode_chat([{"role": "user", "content": "Hi"}])


def test_a_directory_without_a_tokenizer_is_one_plain_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        TextCodec(tmp_path)

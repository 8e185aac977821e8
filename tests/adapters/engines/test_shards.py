"""Shards that compute in place: attention over blocks loaded from containers, merged into the whole."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from kvsp_core.bodies import decode
from kvsp_core.errors import KVSPError
from kvsp_core.ext_messages import AttendAnswer
from kvsp_core.records import Sampler
from kvsp_core.roles.engine import Attend, DropShard, ExportBlock, LoadShard, StartSequence
from kvsp_engines.engine import EngineThread, NumpyEngine
from kvsp_engines.llama import Array, Llama, Partial, RemoteQuery, merge_partials
from kvsp_engines.prepare import prepare_tiny

BLOCK = 16
TOKENS = tuple(np.random.default_rng(5).integers(3, 259, 200).tolist())
MAP = "aa" * 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    prepare_tiny(path)
    return path


@pytest.fixture
def holders(directory: Path) -> list[NumpyEngine]:
    """Two engines: one holds tokens [0, 80) in blocks of its own, the other [80, 160)."""
    source = NumpyEngine(directory, kv_dtype="fp32", block_tokens=BLOCK)
    greedy = Sampler(method="greedy", params={"max_tokens": 0}, seed=0, step=0, deterministic=True)
    source.execute(StartSequence(sequence=1, tokens=TOKENS, cached_tokens=0, sampler=greedy))
    while source.busy():
        source.step()
    engines = [NumpyEngine(directory, kv_dtype="fp32", block_tokens=BLOCK) for _ in range(2)]
    for index in range(10):
        layers = source.execute(ExportBlock(1, 1, index, 1))
        tokens = (index * BLOCK, (index + 1) * BLOCK)
        engines[index // 5].execute(LoadShard(1, MAP, tokens, 1), layers)  # type: ignore[arg-type]
    return engines


def attend(engine: NumpyEngine, query: RemoteQuery, ranges: tuple[tuple[int, int], ...]) -> Partial:
    octets = engine.execute(Attend(1, MAP, query.layer, ranges, query.queries.tobytes()))
    assert isinstance(octets, bytes)
    answer = decode(AttendAnswer, octets)
    output = np.frombuffer(answer.output, "<f4").reshape(query.queries.shape)
    return Partial(output, np.frombuffer(answer.log_sum_exp, "<f4").reshape(query.queries.shape[:2]))


def last_logits(model: Llama, parts: list[tuple[NumpyEngine, tuple[tuple[int, int], ...]]]) -> Array:
    """Compute the tokens from 128 on, everything before them at the holders."""
    steps = model.forward_shard(model.new_cache(start=128), TOKENS[128:])
    query = next(steps)
    while True:
        merged = merge_partials([attend(engine, query, ranges) for engine, ranges in parts])
        try:
            query = steps.send(merged)
        except StopIteration as done:
            logits: Array = done.value
            return logits


def test_logits_merged_from_two_holders_are_those_of_the_whole(
    directory: Path, holders: list[NumpyEngine]
) -> None:
    model = Llama(directory)
    whole = model.forward(model.new_cache(), TOKENS)
    first, second = holders
    merged = last_logits(model, [(first, ((0, 80),)), (second, ((80, 112), (112, 128)))])
    np.testing.assert_allclose(merged, whole, rtol=1e-4, atol=1e-4)
    missing = last_logits(model, [(first, ((0, 80),)), (second, ((80, 112),))])
    assert np.abs(missing - whole).max() > 1e-3


def test_a_range_without_a_complete_block_has_no_weight(holders: list[NumpyEngine]) -> None:
    first, _ = holders
    query = RemoteQuery(0, np.ones((1, first._model.config.heads, first._model.config.head_dim), np.float32))
    octets = first.execute(
        Attend(1, "a map of which only the open end is here", 0, (), query.queries.tobytes())
    )
    assert isinstance(octets, bytes)
    answer = decode(AttendAnswer, octets)
    assert answer.ranges == ()
    nothing = Partial(
        np.frombuffer(answer.output, "<f4").reshape(query.queries.shape),
        np.frombuffer(answer.log_sum_exp, "<f4").reshape(query.queries.shape[:2]),
    )
    some = attend(first, query, ((0, 80),))
    np.testing.assert_array_equal(merge_partials([some, nothing]).output, some.output)
    octets = first.execute(Attend(1, MAP, 0, ((0, 32), (48, 80)), query.queries.tobytes()))
    assert isinstance(octets, bytes)
    assert decode(AttendAnswer, octets).ranges == ((0, 32), (48, 80))


def test_a_range_that_was_dropped_is_not_computed_with(holders: list[NumpyEngine]) -> None:
    first, second = holders
    shape = (1, first._model.config.heads, first._model.config.head_dim)
    query = RemoteQuery(0, np.ones(shape, np.float32))
    attend(first, query, ((0, 80),))
    first.execute(DropShard(MAP, (32, 80)))
    attend(first, query, ((0, 32),))
    with pytest.raises(KVSPError, match="tokens from 32 on"):
        attend(first, query, ((0, 48),))
    second.execute(DropShard(MAP, (80, 160)))
    with pytest.raises(KVSPError, match="no shard"):
        attend(second, query, ((80, 96),))


def test_a_block_of_another_size_is_refused(holders: list[NumpyEngine]) -> None:
    with pytest.raises(KVSPError, match="layers"):
        holders[0].execute(LoadShard(1, MAP, (160, 176), 1), [])
    layers = [(b"123", b"123")] * holders[0]._model.config.layers
    with pytest.raises(KVSPError, match="does not hold"):
        holders[0].execute(LoadShard(1, MAP, (160, 176), 1), layers)


def test_a_question_that_does_not_fit_is_refused_and_the_engine_goes_on(holders: list[NumpyEngine]) -> None:
    """Over the thread that runs it, too: what a peer asks for never takes the engine along."""
    engine = holders[0]
    config = engine._model.config
    sound = np.ones((1, config.heads, config.head_dim), np.float32)
    strange = [np.full_like(sound, value) for value in (np.nan, np.inf, -np.inf, 3e38)]
    questions = [
        Attend(1, MAP, config.layers, ((0, 80),), sound.tobytes()),
        Attend(2, MAP, 2**32 - 1, ((0, 80),), sound.tobytes()),
        Attend(3, MAP, 0, ((0, 80),), b"1234"),
        Attend(4, MAP, 0, ((0, 80),), sound.tobytes() + b"1234"),
        Attend(5, MAP, 0, ((0, 4000),), sound.tobytes()),
        Attend(6, "bb" * 16, 0, ((0, 80),), sound.tobytes()),
    ]
    answers = [
        Attend(7 + number, MAP, 0, ((0, 80),), each.tobytes())
        for number, each in enumerate((*strange, sound))
    ]
    results: SimpleQueue[tuple[object, object]] = SimpleQueue()
    broken: list[Exception] = []
    thread = EngineThread(
        engine,
        deliver_events=lambda events: None,
        deliver_job=lambda command, result: results.put((command, result)),
        broken=broken.append,
    )
    thread.start()
    for command in (*questions, *answers):
        thread.submit(command)
    assert thread.stop(30)
    assert broken == []
    outcomes = [results.get_nowait()[1] for _ in (*questions, *answers)]
    assert all(isinstance(each, KVSPError) for each in outcomes[: len(questions)])
    assert all(isinstance(each, bytes) for each in outcomes[len(questions) :])

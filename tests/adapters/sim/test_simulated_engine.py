"""The simulated engine draws what it has to, and tells every wrong block from a right one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.records import Sampler
from kvsp_core.roles.engine import (
    Abort,
    BlockComputed,
    ExportBlock,
    ImportBlock,
    Pause,
    Prefilled,
    Proceed,
    SequenceEnded,
    StartSequence,
    TokensDecoded,
)
from kvsp_core.roles.role import JobDone, JobFailed
from kvsp_sim.engine import EngineSpeed, SimulatedEngine, block_octets
from kvsp_sim.facts import Fact, LayersUsed, TokenDrawn
from kvsp_sim.randomness import Randomness
from kvsp_sim.session_properties import extend_history
from kvsp_sim.world import World

DESCRIPTOR = CompatibilityDescriptor.from_members(
    {
        "model": "m",
        "model_digest": "sha-256:" + "0" * 64,
        "tokenizer_digest": "sha-256:" + "0" * 64,
        "layers": 2,
        "kv_heads": 1,
        "head_dim": 4,
        "kv_dtype": "fp16",
        "positional": "rope",
        "block_tokens": 4,
        "layout": "kvsp-layout-1",
    }
)
PROMPT = (1, 2, 3, 4, 5)


class Bench:
    """An engine, what it told, and the facts it gave."""

    def __init__(self, *, kind: int = 0, seed: int = 1, burst: int = 1) -> None:
        self.world = World(seed)
        self.told: list[object] = []
        self.facts: list[Fact] = []
        self.buffers: dict[int, bytes] = {}
        self.deliver: Callable[[object], None] = self.told.append
        self.engine = SimulatedEngine(
            name="i",
            descriptor=DESCRIPTOR,
            kind=kind,
            speed=EngineSpeed(burst=burst),
            randomness=Randomness(seed),
            buffers=self.buffers,
            deliver=lambda item: self.deliver(item),
            later=self.world.after,
            observe=self.facts.append,
        )

    def start(self, *, deterministic: bool = True, most: int = 8, **more: object) -> None:
        sampler = Sampler(
            method="x", params={"max_tokens": most}, seed=7, step=0, deterministic=deterministic
        )
        given = {"sequence": 1, "tokens": PROMPT, "cached_tokens": 0, "sampler": sampler} | more
        self.engine.execute(StartSequence(**given))  # type: ignore[arg-type]

    def tokens(self) -> list[int]:
        return [token for item in self.told if isinstance(item, TokensDecoded) for token in item.tokens]


def test_a_sequence_runs_to_its_limit() -> None:
    bench = Bench()
    bench.start()
    bench.world.run()
    assert bench.told[:2] == [Prefilled(1), BlockComputed(1, 0)]
    assert [item.first_index for item in bench.told if isinstance(item, TokensDecoded)] == list(range(8))
    assert [item.index for item in bench.told if isinstance(item, BlockComputed)] == [0, 1, 2]
    assert bench.told[-1] == SequenceEnded(1, "length")
    history = b""
    for token in PROMPT:
        history = extend_history(history, token)
    assert TokenDrawn(history=history, token=bench.tokens()[0]) in bench.facts


def test_a_deterministic_sampler_goes_on_the_same_elsewhere() -> None:
    whole, half = Bench(), Bench(seed=2, kind=1)
    whole.start()
    whole.world.run()
    sampler = Sampler(method="x", params={"max_tokens": 8}, seed=7, step=3, deterministic=True)
    half.start(tokens=(*PROMPT, *whole.tokens()[:3]), sampler=sampler)
    half.world.run()
    assert half.tokens() == whole.tokens()[3:]


def test_several_tokens_may_come_in_a_step() -> None:
    one, several = Bench(), Bench(burst=3)
    for bench in (one, several):
        bench.start()
        bench.world.run()
    assert [len(item.tokens) for item in several.told if isinstance(item, TokensDecoded)] == [3, 3, 2]
    assert several.tokens() == one.tokens()
    computed = [item for item in one.told if isinstance(item, BlockComputed)]
    assert [item for item in several.told if isinstance(item, BlockComputed)] == computed
    assert several.told[-1] == SequenceEnded(1, "length")
    stopped = Bench(burst=3)
    stop = one.tokens()[1]
    sampler = Sampler(method="x", params={"stop": [stop]}, seed=7, step=0, deterministic=True)
    stopped.start(sampler=sampler)
    stopped.world.run()
    assert stopped.tokens() == one.tokens()[:2]
    assert stopped.told[-1] == SequenceEnded(1, "stop")


def test_any_other_sampler_does_not() -> None:
    one, other = Bench(), Bench(seed=2)
    for bench in (one, other):
        bench.start(deterministic=False)
        bench.world.run()
    assert one.tokens() != other.tokens()


def exported(bench: Bench, index: int = 0) -> bytes:
    bench.engine.execute(ExportBlock(5, 1, index, 9))
    bench.world.run()
    assert isinstance(bench.told[-1], JobDone)
    return bench.buffers[9]


@pytest.mark.parametrize("kind", [0, 1])
def test_a_block_of_any_kind_of_engine_is_right_and_known_as_such(kind: int) -> None:
    bench, other = Bench(), Bench(kind=kind)
    other.start()
    other.world.run()
    bench.buffers[1] = exported(other)
    bench.engine.execute(ImportBlock(1, 1, 0, 1))
    bench.start(cached_tokens=4)
    assert bench.facts[-1] == LayersUsed(instance="i", layers=(kind, kind))
    bench.world.run()
    assert exported(bench) == exported(other)


def test_wrong_and_mixed_octets_are_seen() -> None:
    bench = Bench()
    history = b""
    for token in PROMPT[:4]:
        history = extend_history(history, token)
    one, other = (block_octets(DESCRIPTOR, history, kind) for kind in (0, 1))
    half = len(one) - 64
    for octets, layers in (
        (one[:half] + other[half:], (0, 1)),
        (one[:-1] + bytes([one[-1] ^ 1]), (0, None)),
        (block_octets(DESCRIPTOR, b"other", 0), (None, None)),
    ):
        bench.buffers[1] = octets
        bench.engine.execute(ImportBlock(1, 1, 0, 1))
        bench.start(cached_tokens=4)
        assert bench.facts[-1] == LayersUsed(instance="i", layers=layers)
    bench.start(cached_tokens=4)  # nothing was imported at all
    assert bench.facts[-1] == LayersUsed(instance="i", layers=(None, None))


def test_pause_proceed_and_abort() -> None:
    bench = Bench()
    bench.start()
    bench.engine.execute(Pause(1))
    bench.world.run()
    assert bench.tokens() == []
    bench.engine.execute(Proceed(1))
    bench.world.run(until_us=bench.world.now_us + 40_000)
    drawn = len(bench.tokens())
    assert 0 < drawn < 8
    bench.engine.execute(Pause(1))
    bench.world.run()
    assert len(bench.tokens()) <= drawn + 1
    bench.engine.execute(Abort(1))
    bench.engine.execute(Proceed(1))
    bench.world.run()
    assert len(bench.tokens()) <= drawn + 1
    assert bench.engine.idle


def test_a_block_that_is_not_computed_cannot_be_exported() -> None:
    bench = Bench()
    bench.start()
    bench.engine.execute(ExportBlock(5, 1, 7, 9))
    bench.world.run()
    assert any(isinstance(item, JobFailed) for item in bench.told)

"""The scheduler's side: what is loaded and stored in which step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvsp_client import ClientError, PrefixKeys, Refused, Unavailable
from kvsp_client.vllm.engine_descriptor import Sharing, describe_engine
from kvsp_client.vllm.schedule import PAUSE_S, Load, Lookups, Schedule, Store
from kvsp_core.block_keys import block_keys
from kvsp_core.identity import Scope
from kvsp_core.problems import SCOPE_DENIED, Problem
from tests.adapters.vllm_connector import fakes

B = 4


class World:
    """A schedule, and an index that knows `known` blocks of whatever it is asked for."""

    def __init__(self, directory: Path, key_file: Path, **roles: bool) -> None:
        self.known = 0
        self.asked: list[int] = []
        self.count: Counter[str] = Counter()
        self.said: list[str] = []
        self.sharing = Sharing(describe_engine(fakes.engine(directory)), key_file)
        self.schedule = Schedule(self.sharing, self.find, count=self.count, say=self.said.append, **roles)

    def find(self, keys: PrefixKeys) -> Any:
        self.asked.append(len(keys))
        return fakes.FoundPrefix(keys.part(0, min(self.known, len(keys))))

    def keys(self, start: int, stop: int, tokens: list[int] | None = None) -> tuple[str, ...]:
        tokens = list(range(200)) if tokens is None else tokens
        keys, _ = block_keys(Scope(bytes(range(32))), self.sharing.descriptor, tokens)
        return tuple(key.hex() for key in keys[start:stop])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    key_file = tmp_path / "tenant.key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    return fakes.model_directory(tmp_path / "some-model"), key_file


@pytest.fixture
def world(files: tuple[Path, Path]) -> World:
    return World(*files)


def loaded(load: Load) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return load.prefix.keys.keys, load.blocks


def stored(store: Store) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return store.keys.keys, store.blocks


def test_a_new_prompt_is_computed_and_stored(world: World) -> None:
    request = fakes.request(tokens=18)
    assert world.schedule.matched_tokens(request, 0) == 0
    world.schedule.allocated(request, 0)
    plan = world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 0)}, scheduled={"r1": 18}))
    assert not plan.loads
    assert [stored(s) for s in plan.stores] == [(world.keys(0, 4), (9, 7, 5, 3))]


def test_what_is_found_is_loaded_and_the_rest_stored(world: World) -> None:
    world.known = 3
    request = fakes.request(tokens=18)
    assert world.schedule.matched_tokens(request, 0) == 3 * B
    world.schedule.allocated(request, 3 * B)
    plan = world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 12)}, scheduled={"r1": 6}))
    assert [loaded(each) for each in plan.loads] == [(world.keys(0, 3), (9, 7, 5))]
    assert [stored(s) for s in plan.stores] == [(world.keys(3, 4), (3,))]
    assert world.count["requested_tokens"] == 12


def test_only_what_vllm_does_not_have_itself_is_loaded(world: World) -> None:
    world.known = 4
    request = fakes.request(tokens=18)
    assert world.schedule.matched_tokens(request, 2 * B) == 2 * B
    world.schedule.allocated(request, 2 * B)
    plan = world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 16)}, scheduled={"r1": 2}))
    assert [loaded(each) for each in plan.loads] == [(world.keys(2, 4), (5, 3))]
    assert not plan.stores


def test_the_last_token_is_always_computed(world: World) -> None:
    world.known = 100
    assert world.schedule.matched_tokens(fakes.request(tokens=16), 0) == 12
    assert world.schedule.matched_tokens(fakes.request("r2", tokens=17), 0) == 16


def test_the_index_is_asked_once_while_a_request_waits(world: World) -> None:
    request = fakes.request(tokens=18)
    for _ in range(3):
        world.schedule.matched_tokens(request, 0)
    assert world.asked == [4]


def test_the_index_is_not_asked_where_vllm_has_all(world: World) -> None:
    assert world.schedule.matched_tokens(fakes.request(tokens=18), 16) == 0
    assert world.asked == []


def test_what_vllm_has_and_the_index_does_not_is_stored(world: World) -> None:
    """Blocks that could not be stored when they were computed."""
    request = fakes.request(tokens=22)
    world.schedule.matched_tokens(request, 8)
    world.schedule.allocated(request, 0)
    plan = world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1, 0], 8)}, scheduled={"r1": 14}))
    assert [stored(s) for s in plan.stores] == [(world.keys(0, 5), (9, 7, 5, 3, 1))]


def test_generated_blocks_are_stored_as_they_fill(world: World) -> None:
    request = fakes.request(tokens=18)
    world.schedule.matched_tokens(request, 0)
    world.schedule.allocated(request, 0)
    world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 0)}, scheduled={"r1": 18}))
    request.all_token_ids += [18, 19]
    assert not world.schedule.plan(fakes.step(running={"r1": (None, 18)}, scheduled={"r1": 1})).stores
    request.all_token_ids += [20]
    plan = world.schedule.plan(fakes.step(running={"r1": ([2], 19)}, scheduled={"r1": 1}))
    assert [stored(s) for s in plan.stores] == [(world.keys(4, 5), (1,))]


def test_a_prompt_in_pieces_is_stored_piece_by_piece(world: World) -> None:
    request = fakes.request(tokens=18)
    world.schedule.matched_tokens(request, 0)
    world.schedule.allocated(request, 0)
    plan = world.schedule.plan(fakes.step(new={"r1": ([9, 7], 0)}, scheduled={"r1": 7}))
    assert [stored(s) for s in plan.stores] == [(world.keys(0, 1), (9,))]
    plan = world.schedule.plan(fakes.step(running={"r1": ([5, 3, 1], 7)}, scheduled={"r1": 11}))
    assert [stored(s) for s in plan.stores] == [(world.keys(1, 4), (7, 5, 3))]


def test_tokens_that_are_only_guessed_are_not_stored(world: World) -> None:
    """Speculation schedules drafts, which may be rejected; async scheduling runs ahead of the tokens."""
    request = fakes.request(tokens=18)
    world.schedule.matched_tokens(request, 0)
    world.schedule.allocated(request, 0)
    world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 0)}, scheduled={"r1": 18}))
    request.all_token_ids += [18]
    plan = world.schedule.plan(fakes.step(running={"r1": (None, 18)}, scheduled={"r1": 6}))
    assert not plan.stores


def test_what_is_computed_again_after_a_failed_load_is_stored(world: World) -> None:
    world.known = 3
    request = fakes.request(tokens=18)
    world.schedule.matched_tokens(request, 0)
    world.schedule.allocated(request, 12)
    world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 12)}, scheduled={"r1": 6}))
    plan = world.schedule.plan(fakes.step(running={"r1": (None, 4)}, scheduled={"r1": 14}))
    assert not plan.loads
    assert [stored(s) for s in plan.stores] == [(world.keys(1, 4), (7, 5, 3))]


def test_a_preempted_request_is_looked_up_again_and_has_other_blocks(world: World) -> None:
    request = fakes.request(tokens=18)
    world.schedule.matched_tokens(request, 0)
    world.schedule.allocated(request, 0)
    world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 0)}, scheduled={"r1": 18}))
    world.known = 4
    assert world.schedule.matched_tokens(request, 4) == 12
    world.schedule.allocated(request, 12)
    plan = world.schedule.plan(
        fakes.step(running={"r1": ([9, 20, 21, 22, 23], 16)}, scheduled={"r1": 2}, resumed={"r1"})
    )
    assert [loaded(each) for each in plan.loads] == [(world.keys(1, 4), (20, 21, 22))]


def test_vllm_may_decline_what_was_found(world: World) -> None:
    world.known = 3
    request = fakes.request(tokens=18)
    world.schedule.matched_tokens(request, 0)
    world.schedule.allocated(request, 0)
    plan = world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 0)}, scheduled={"r1": 18}))
    assert not plan.loads
    assert [stored(s) for s in plan.stores] == [(world.keys(3, 4), (3,))]
    assert not world.count["requested_tokens"]


def test_a_request_that_is_not_shared_passes_by(world: World) -> None:
    world.known = 4
    for name in ("r1", "r2"):
        request = fakes.request(name, mm_features=["an image"])
        assert world.schedule.matched_tokens(request, 0) == 0
        world.schedule.allocated(request, 0)
    plan = world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 0)}, scheduled={"r1": 18}))
    assert not plan.stores
    assert world.asked == []
    assert world.count["not_shared_multimodal"] == 2
    assert len(world.said) == 1


def test_a_name_of_a_request_that_was_not_shared_is_used_again(world: World) -> None:
    world.known = 4
    assert world.schedule.matched_tokens(fakes.request(mm_features=["an image"]), 0) == 0
    request = fakes.request(tokens=18)
    assert world.schedule.matched_tokens(request, 0) == 4 * B
    world.schedule.allocated(request, 4 * B)
    step = fakes.step(new={"r1": ([9, 7, 5, 3, 1], 16)}, scheduled={"r1": 2}, finished={"r1"})
    assert world.schedule.plan(step).loads
    world.schedule.plan(fakes.step(finished={"r1"}))
    assert not world.schedule._tracked
    assert not world.schedule._not_shared


def test_a_request_that_is_not_shared_is_looked_at_once(world: World) -> None:
    request = fakes.request(mm_features=["an image"])
    for _ in range(3):
        assert world.schedule.matched_tokens(request, 0) == 0
    assert world.count["not_shared_multimodal"] == 1
    world.schedule.plan(fakes.step(finished={"r1"}))
    assert not world.schedule._not_shared


def test_requests_with_a_salt_have_other_keys(world: World) -> None:
    plans = []
    for name, salt in (("r1", None), ("r2", "salt")):
        request = fakes.request(name, cache_salt=salt)
        world.schedule.matched_tokens(request, 0)
        world.schedule.allocated(request, 0)
        plans.append(world.schedule.plan(fakes.step(new={name: ([9, 7, 5, 3, 1], 0)}, scheduled={name: 18})))
    one, other = (plan.stores[0].keys for plan in plans)
    assert one.scope_id != other.scope_id
    assert not set(one.keys) & set(other.keys)


def test_an_engine_that_only_loads_or_only_stores(files: tuple[Path, Path]) -> None:
    for loads, stores in ((True, False), (False, True)):
        world = World(*files, loads=loads, stores=stores)
        world.known = 2
        request = fakes.request(tokens=18)
        assert bool(world.schedule.matched_tokens(request, 0)) is loads
        world.schedule.allocated(request, 0)
        plan = world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 0)}, scheduled={"r1": 18}))
        assert bool(plan.stores) is stores


def test_a_finished_request_is_forgotten(world: World) -> None:
    world.schedule.matched_tokens(fakes.request(tokens=18), 0)
    world.schedule.plan(fakes.step(finished={"r1"}))
    world.schedule.matched_tokens(fakes.request(tokens=18), 0)
    assert len(world.asked) == 2


def test_a_name_that_is_used_again_is_another_request(world: World) -> None:
    """vLLM says that the one has ended with the step that begins with the other."""
    world.known = 3
    for tokens in (list(range(18)), list(range(100, 118))):
        request = fakes.request(all_token_ids=tokens, prompt_token_ids=tokens)
        assert world.schedule.matched_tokens(request, 0) == 3 * B
        world.schedule.allocated(request, 3 * B)
        finished = {"r1"} if tokens[0] else set()
        plan = world.schedule.plan(
            fakes.step(new={"r1": ([9, 7, 5, 3, 1], 12)}, scheduled={"r1": 2}, finished=finished)
        )
        assert [loaded(each) for each in plan.loads] == [(world.keys(0, 3, tokens), (9, 7, 5))]
    plan = world.schedule.plan(fakes.step(running={"r1": (None, 14)}, scheduled={"r1": 4}))
    assert [stored(s) for s in plan.stores] == [(world.keys(3, 4, tokens), (3,))]


def test_a_session_that_gets_images_is_not_shared_any_more(world: World) -> None:
    request = fakes.request(tokens=18)
    world.schedule.matched_tokens(request, 0)
    world.schedule.allocated(request, 0)
    assert world.schedule.plan(fakes.step(new={"r1": ([9, 7, 5, 3, 1], 0)}, scheduled={"r1": 18})).stores
    request.mm_features.append("an image")
    request.all_token_ids += range(18, 30)
    plan = world.schedule.plan(fakes.step(running={"r1": ([2, 4, 6], 18)}, scheduled={"r1": 12}))
    assert not plan.stores
    assert world.schedule.matched_tokens(request, 0) == 0
    assert world.count["not_shared_multimodal"] == 1


# Lookups


class Index:
    """An index that answers with what it is told to."""

    def __init__(self) -> None:
        self.error: ClientError | None = None
        self.asked = 0

    def find(self, keys: PrefixKeys) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return fakes.FoundPrefix(keys)


def test_an_index_that_does_not_answer_is_left_alone_for_a_while() -> None:
    index, count, now = Index(), Counter[str](), [100.0]
    lookups = Lookups(index.find, clock=lambda: now[0], count=count)
    index.error = Unavailable("the index does not answer")
    keys: Any = ()
    assert [lookups(keys), lookups(keys)] == [None, None]
    assert index.asked == 1
    index.error = None
    now[0] += PAUSE_S
    assert lookups(keys) is not None
    assert count == {"lookups": 2, "lookups_unanswered": 1, "lookups_left_out": 1}


def test_a_refusal_concerns_one_request() -> None:
    index, count = Index(), Counter[str]()
    lookups = Lookups(index.find, clock=lambda: 0.0, count=count)
    index.error = Refused("index", Problem(SCOPE_DENIED))
    keys: Any = ()
    assert [lookups(keys), lookups(keys)] == [None, None]
    assert index.asked == 2
    assert count["lookups_refused"] == 2

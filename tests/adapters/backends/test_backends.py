"""Storage backends for SGLang and LMCache, against a cache server, their interfaces standing in."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvsp_client.object_names import named_descriptor, object_keys
from kvsp_client.scopes import salted_scope
from kvsp_client.testing import Served, serve_cache
from kvsp_core.errors import LocalProtocolError
from kvsp_core.prefix import PrefixKeys
from tests.adapters.backends import stand_ins
from tests.adapters.backends.stand_ins import SCOPE, SCOPE_KEY, Tensor, chunk, key, page_pool
from tests.adapters.services.cluster import until
from tests.adapters.vllm_connector.fakes import CONFIG, model_directory

LAYERS, HEADS, DIM, TOKENS = CONFIG["num_hidden_layers"], 2, 6, 8


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_cache(scopes=(SCOPE, salted_scope(SCOPE_KEY, "salt"))) as made:
        yield made


@pytest.fixture
def settings(served: Served, tmp_path: Path) -> dict[str, Any]:
    return {
        "index": served.index_uri,
        "cache_server": served.cache_uri,
        "certificate_file": str(served.certificate),
        "key_file": str(served.key),
        "authorities_file": str(served.authorities),
        "scope_key_file": str(stand_ins.write_key(tmp_path)),
        "model_dir": str(model_directory(tmp_path / "model")),
    }


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch)


# Names


def test_blocks_named_otherwise_are_never_taken_for_those_named_by_tokens(tmp_path: Path) -> None:
    from kvsp_client.model_dir import descriptor_of_directory

    plain = descriptor_of_directory(model_directory(tmp_path / "model"), block_tokens=TOKENS)
    named, other = named_descriptor(plain, "a hash"), named_descriptor(plain, "another hash")
    assert len({each.compat_id for each in (plain, named, other)}) == 3
    names = [b"x" * 32, b"y" * 32]
    keys = object_keys(SCOPE, named, names)
    assert len(set(keys.keys) | set(object_keys(SCOPE, other, names).keys)) == 4
    assert not set(keys.keys) & set(PrefixKeys.of(SCOPE, named, range(64)).keys)
    with pytest.raises(LocalProtocolError, match=r"PrefixKeys\.of"):
        object_keys(SCOPE, plain, names)
    small = descriptor_of_directory(tmp_path / "model", block_tokens=4)
    with pytest.raises(LocalProtocolError, match="block_tokens"):
        named_descriptor(small, "a hash")


@pytest.mark.parametrize(("lookup_s", "left_ms"), [(4, [1000]), (5, []), (6, [])])
def test_a_load_has_one_time_for_both_its_calls(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, lookup_s: int, left_ms: list[int]
) -> None:
    from kvsp_client import backend_settings
    from kvsp_client.backend_settings import Backend, BackendSettings

    backend = Backend(BackendSettings(**settings, timeout_ms=5000), block_tokens=TOKENS, names="a hash")
    now, deadlines = [100.0], list[int]()

    class SlowClient:
        def lookup(self, keys: Any) -> None:
            now[0] += lookup_s

        def fetch(self, prefix: None, sections: Any, *, deadline_ms: int) -> SimpleNamespace:
            deadlines.append(deadline_ms)
            return SimpleNamespace(blocks=1)

    client: Any = SlowClient()
    backend.client = client
    monkeypatch.setattr(backend_settings, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nothing: Any = None
    assert backend.load(nothing, nothing) == len(left_ms)
    assert deadlines == left_ms


# SGLang


def storage(settings: dict[str, Any], pool: SimpleNamespace | None = None, **config: Any) -> Any:
    from kvsp_client.sglang import KVSPStorage

    members: dict[str, Any] = {
        "is_mla_model": False,
        "tp_size": 1,
        "pp_size": 1,
        "attn_cp_size": 1,
        "extra_config": {"interface_v1": 1, "kvsp": settings},
    }
    made = KVSPStorage(SimpleNamespace(**(members | config)), {})
    if pool is not None:
        made.register_mem_pool_host(pool)
    return made


def pool(layout: str = "layer_first", **changed: int) -> SimpleNamespace:
    sizes = {"pages": 4, "tokens": TOKENS, "layers": LAYERS, "heads": HEADS, "dim": DIM}
    return page_pool(layout, **(sizes | changed))


def fill(made: SimpleNamespace) -> np.ndarray:
    """Fill a pool with numbers, and return it as integers."""
    octets: np.ndarray = made.kv_buffer.array.view(np.uint16)
    octets[...] = np.arange(octets.size, dtype=np.uint16).reshape(octets.shape)
    return octets


def page(made: SimpleNamespace, number: int) -> np.ndarray:
    """Return a page [2, layers, tokens, heads, dim] of a pool."""
    octets: np.ndarray = made.kv_buffer.array.view(np.uint16)
    if made.layout == "page_first_direct":
        return octets[:, number]
    return octets[:, :, number * TOKENS : (number + 1) * TOKENS]


@pytest.mark.parametrize(
    ("one", "other"), [("layer_first", "page_first_direct"), ("page_first_direct", "layer_first")]
)
def test_sglang_pages_come_back_in_any_layout(settings: dict[str, Any], one: str, other: str) -> None:
    """What one engine stores, another one loads, whatever layout each has."""
    writes, reads = pool(one), pool(other)
    fill(writes)
    keys = [(one + str(n)).encode().hex().ljust(64, "0") for n in (1, 2)]
    writer, reader = storage(settings, writes), storage(settings, reads)
    assert reader.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys, np.r_[3 * TOKENS : 4 * TOKENS, 0:TOKENS]) == [True, True]
    assert until(lambda: reader.batch_exists([*keys, "0" * 64]) == 2)
    assert reader.exists(keys[0])
    found = reader.batch_get_v1([*keys, "0" * 64], np.r_[TOKENS : 4 * TOKENS])
    assert found == [True, True, False]
    np.testing.assert_array_equal(page(reads, 1), page(writes, 3))
    np.testing.assert_array_equal(page(reads, 2), page(writes, 0))
    assert not page(reads, 3).any()
    for each in (writer, reader):
        each.close()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"is_mla_model": True}, "latent"),
        ({"tp_size": 2}, "rank"),
        ({"extra_config": {}}, "interface_v1"),
        ({"extra_config": {"interface_v1": 1, "kvsp": {"index": 1}}}, "kvsp: .*index"),
    ],
)
def test_sglang_is_refused_what_blocks_cannot_hold(
    settings: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LocalProtocolError, match=reason):
        storage(settings, **config)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (pool("page_head"), "hicache-mem-layout"),
        (pool(layers=5), "layers"),
        (pool(tokens=4), "block_tokens"),
    ],
)
def test_sglang_memory_of_another_shape_is_refused(
    settings: dict[str, Any], made: SimpleNamespace, reason: str
) -> None:
    with pytest.raises(LocalProtocolError, match=reason):
        storage(settings, made)


def test_sglang_goes_on_without_a_cache_server(settings: dict[str, Any]) -> None:
    gone = settings | {"index": "https://127.0.0.1:1/kvsp/", "cache_server": "https://127.0.0.1:1/kvsp/"}
    made = storage(gone, pool())
    assert made.batch_exists(["0" * 64]) == 0
    assert made.batch_get_v1(["0" * 64], np.arange(TOKENS)) == [False]
    assert made.batch_set_v1(["0" * 64], np.arange(TOKENS)) == [False]
    made.close()


def test_sglang_memory_that_is_not_in_one_piece_is_refused(settings: dict[str, Any]) -> None:
    """What is fetched would go into a copy, and SGLang be told that it is there."""
    made = pool()
    made.kv_buffer = Tensor(np.repeat(made.kv_buffer.array, 2, axis=2)[:, :, ::2])
    with pytest.raises(LocalProtocolError, match="not as its pool says"):
        storage(settings, made)


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
@pytest.mark.parametrize(
    "places",
    [
        np.arange(TOKENS - 1),
        np.arange(TOKENS + 1),
        np.arange(2 * TOKENS),
        np.arange(1, TOKENS + 1),
        np.arange(TOKENS)[::-1],
        np.arange(-TOKENS, 0),
        np.arange(4 * TOKENS, 5 * TOKENS),
        np.arange(0),
    ],
    ids=str,
)
def test_sglang_places_that_are_not_those_of_pages_are_left_alone(
    settings: dict[str, Any], layout: str, places: np.ndarray
) -> None:
    made = pool(layout)
    before = fill(made).copy()
    backend = storage(settings, made)
    key = b"odd places".hex().ljust(64, "0")
    assert backend.batch_set_v1([key], np.arange(TOKENS)) == [True]
    assert until(lambda: backend.exists(key))
    assert backend.batch_set_v1([key], places) == [False]
    assert backend.batch_get_v1([key], places) == [False]
    np.testing.assert_array_equal(made.kv_buffer.array.view(np.uint16), before)
    backend.close()


@pytest.mark.parametrize("keys", [["no hash"], ["0" * 63], [""], [None], [7]], ids=str)
def test_sglang_keys_that_are_none_are_misses(settings: dict[str, Any], keys: list[Any]) -> None:
    backend = storage(settings, pool())
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, np.arange(TOKENS)) == [False]
    if keys != [""]:  # which is a name like any other
        assert backend.batch_set_v1(keys, np.arange(TOKENS)) == [False]
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], np.arange(0)) == backend.batch_set_v1([], np.arange(0)) == []
    backend.close()


def test_sglang_goes_on_in_any_order_of_calls(settings: dict[str, Any]) -> None:
    """Before its memory is registered, and after it was closed, twice."""
    early, late = storage(settings), storage(settings, pool())
    for _ in range(2):
        early.close()
        late.close()
    for made in (early, late):
        assert made.batch_exists(["0" * 64]) == 0
        assert made.batch_get_v1(["0" * 64], np.arange(TOKENS)) == [False]
        assert made.batch_set_v1(["0" * 64], np.arange(TOKENS)) == [False]


# LMCache


@pytest.fixture
def adapter(settings: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    from kvsp_client.lmcache import KVSPL2Adapter

    made = []

    def make(**changed: Any) -> Any:
        made.append(KVSPL2Adapter(settings | {"chunk_tokens": TOKENS} | changed))
        return made[-1]

    yield make
    for each in made:
        each.close()


def finished(descriptor: int, take: Callable[[], Any]) -> Any:
    """Wait for an event, and return what is taken then."""
    assert select.select([descriptor], [], [], 60)[0]
    os.eventfd_read(descriptor)
    return take()


def stored(adapter: Any, keys: list[Any], objects: list[Any]) -> bool:
    number = adapter.submit_store_task(keys, objects)
    done = finished(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    return bool(done[number].is_successful())


def looked_up(adapter: Any, keys: list[Any]) -> list[bool]:
    number = adapter.submit_lookup_and_lock_task(keys, {})
    found = finished(
        adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(number)
    )
    assert adapter.query_lookup_and_lock_result(number) is None
    return [found.test(n) for n in range(len(keys))]


def loaded(adapter: Any, keys: list[Any], objects: list[Any]) -> list[bool]:
    number = adapter.submit_load_task(keys, objects)
    found = finished(adapter.get_load_event_fd(), lambda: adapter.query_load_result(number))
    return [found.test(n) for n in range(len(keys))]


def test_lmcache_chunks_come_back(adapter: Callable[..., Any]) -> None:
    keys, objects = [key(1), key(2)], [chunk(LAYERS, TOKENS, HEADS * DIM, n) for n in (100, 2000)]
    assert stored(adapter(), keys, objects)
    other = adapter()
    assert until(lambda: looked_up(other, [*keys, key(3)]) == [True, True, False])
    empty = [chunk(LAYERS, TOKENS, HEADS * DIM, 0) for _ in range(3)]
    assert loaded(other, [*keys, key(3)], empty) == [True, True, False]
    for wanted, found in zip(objects, empty, strict=False):
        np.testing.assert_array_equal(found.array, wanted.array)
    assert not empty[2].array.any()


def test_lmcache_keys_are_told_apart_by_all_they_say(adapter: Callable[..., Any]) -> None:
    made = adapter()
    assert stored(made, [key(7, salt="salt")], [chunk(LAYERS, TOKENS, HEADS * DIM, 5)])
    assert until(lambda: looked_up(made, [key(7, salt="salt")]) == [True])
    assert looked_up(made, [key(7)]) == [False]
    assert looked_up(made, [key(7, salt="salt", rank=1)]) == [False]
    assert looked_up(made, [key(7, salt="salt"), key(7)]) == [False, False]


def test_lmcache_chunks_that_are_no_blocks_are_misses(adapter: Callable[..., Any]) -> None:
    made, short = adapter(), chunk(LAYERS, TOKENS - 1, HEADS * DIM, 5)
    together = chunk(LAYERS, TOKENS, HEADS * DIM, 5)
    together.get_shape = lambda: (1, LAYERS, TOKENS, 2 * HEADS * DIM)
    for other in (short, together):
        assert not stored(made, [key(8)], [other])
        assert loaded(made, [key(1)], [other]) == [False]
    assert made.report_status()["is_healthy"]


def test_lmcache_goes_on_without_a_cache_server(adapter: Callable[..., Any]) -> None:
    made = adapter(index="https://127.0.0.1:1/kvsp/", cache_server="https://127.0.0.1:1/kvsp/")
    whole = chunk(LAYERS, TOKENS, HEADS * DIM, 5)
    assert not stored(made, [key(9)], [whole])
    assert looked_up(made, [key(9)]) == [False]
    assert loaded(made, [key(9)], [whole]) == [False]


def test_lmcache_is_told_of_what_cannot_be_done_at_all(adapter: Callable[..., Any]) -> None:
    """It waits for every task that it has submitted."""
    made, broken = adapter(), SimpleNamespace(get_shape=lambda: ())
    assert not stored(made, [key(9)], [broken])
    assert loaded(made, [key(9)], [broken]) == [False]
    assert looked_up(made, [SimpleNamespace(cache_salt="")]) == [False]


def test_lmcache_is_told_also_after_it_was_closed(adapter: Callable[..., Any]) -> None:
    made = adapter()
    made.close()
    numbers = [
        made.submit_store_task([key(9)], []),
        made.submit_lookup_and_lock_task([key(9)], {}),
        made.submit_load_task([key(9)], []),
    ]
    assert not made.pop_completed_store_tasks()[numbers[0]].is_successful()
    assert not made.query_lookup_and_lock_result(numbers[1]).test(0)
    assert not made.query_load_result(numbers[2]).test(0)
    made.close()


def test_lmcache_memory_that_is_not_in_one_piece_or_read_only_is_a_miss(adapter: Callable[..., Any]) -> None:
    made = adapter()
    whole = chunk(LAYERS, TOKENS, HEADS * DIM, 5)
    assert stored(made, [key(11)], [whole])
    assert until(lambda: looked_up(made, [key(11)]) == [True])
    scattered, fixed = (chunk(LAYERS, TOKENS, HEADS * DIM, 0) for _ in range(2))
    scattered.byte_array = memoryview(np.zeros(2 * scattered.array.nbytes, np.uint8))[::2]
    fixed.byte_array = fixed.byte_array.toreadonly()
    for each in (scattered, fixed):
        assert loaded(made, [key(11)], [each]) == [False]
    assert not fixed.array.any()
    assert loaded(made, [key(11)], [chunk(LAYERS, TOKENS, HEADS * DIM, 0)]) == [True]


def test_lmcache_names_do_not_run_into_each_other(adapter: Callable[..., Any]) -> None:
    made = adapter()

    def name(model: str, rank: int, chunk_hash: bytes) -> Any:
        each = key(0, rank=rank)
        each.model_name, each.chunk_hash = model, chunk_hash
        return each

    one, other = name("m@1", 0, b"hash"), name("m", 1, b"0@hash")
    assert made._names([one]).keys != made._names([other]).keys


def test_lmcache_lookups_do_not_wait_for_stores(adapter: Callable[..., Any]) -> None:
    made, go_on = adapter(), threading.Event()
    made._store = lambda keys, objects: go_on.wait(60)
    try:
        for _ in range(8):
            made.submit_store_task([key(9)], [])
        assert looked_up(made, [key(9)]) == [False]
    finally:
        go_on.set()


def test_lmcache_settings_are_checked(adapter: Callable[..., Any]) -> None:
    with pytest.raises(
        LocalProtocolError, match=r"^adapter_params: .*chunk_token: unknown; did you mean chunk_"
    ):
        adapter(chunk_token=1)
    with pytest.raises(LocalProtocolError, match=r"^adapter_params: .*chunk_tokens: expected an integer >="):
        adapter(chunk_tokens=0)

"""The client for threads: several at once, closed in the middle, and after a fork."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvsp_client import (
    BlockingClient,
    Client,
    ClientClosed,
    ClientSettings,
    MissReason,
    Prefix,
    PrefixMemory,
    Unavailable,
)
from kvsp_client.loop_thread import LoopThread
from kvsp_client.testing import Served
from tests.adapters.client.scripted import LAYERS, MODEL, ScriptedHolder, content, keys_of, prefix_of
from tests.adapters.client.test_contract import same
from tests.adapters.client.test_leases import KEEP, RELEASE


@pytest.fixture
def client(served: Served) -> Iterator[BlockingClient]:
    with BlockingClient(served.credentials, index=served.index_uri) as made:
        yield made


def stored_prefix(served: Served, client: BlockingClient, name: str, memory: PrefixMemory) -> Prefix:
    """Store blocks, and wait until they are found."""
    keys = keys_of(served, name, memory.blocks)
    assert client.store(served.cache_uris[0], keys, memory.sections).complete
    while len(prefix := client.lookup(keys)) < len(keys):
        threading.Event().wait(0.01)
    return prefix


def client_threads() -> int:
    return sum(thread.name.startswith("kvsp-client") for thread in threading.enumerate())


def test_several_threads_use_it_at_once(served: Served, client: BlockingClient) -> None:
    stored = content(6)
    prefix = stored_prefix(served, client, "threads", stored)

    def use(number: int) -> bool:
        memory = PrefixMemory(MODEL, 6)
        with client.lease_prefix(prefix) as lease:
            fetch = client.start_fetch(prefix, memory.sections)
            layers = [fetch.wait_layer(layer, timeout_s=60) for layer in range(LAYERS)]
            held = lease.held
        return layers == [6] * LAYERS and fetch.result().complete and held and same(memory, stored)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(16)))
    assert client.stats().fetched_blocks == 16 * 6
    assert client_threads() == 1


def test_a_client_that_closes_gives_its_leases_back(served: Served) -> None:
    holder, keys = ScriptedHolder(served, 1), keys_of(served, "closing with a lease", 1)
    holder.lease_ttl_ms = 60_000
    client = BlockingClient(served.credentials, index=served.index_uri)
    with client.lease(holder.uri, keys):
        client.close()
        assert holder.wait_for(lambda: holder.count("DELETE leases") == 1)


def test_clients_share_a_thread_which_ends_with_the_last(served: Served) -> None:
    first = BlockingClient(served.credentials, index=served.index_uri)
    second = BlockingClient(served.credentials, index=served.index_uri)
    assert client_threads() == 0, "it opens when it is first used"
    keys = keys_of(served, "nothing here", 1)
    assert len(first.lookup(keys)) == len(second.lookup(keys)) == 0
    assert client_threads() == 1
    first.close()
    first.close()
    assert len(second.lookup(keys)) == 0
    second.close()
    assert client_threads() == 0
    for call in (lambda: first.lookup(keys), second.stats):
        with pytest.raises(ClientClosed):
            call()


def test_waiting_ends_after_its_time(served: Served, client: BlockingClient) -> None:
    keys, stored = keys_of(served, "waiting", 2), content(2)
    holder = ScriptedHolder(served, 1).serve(keys, stored)
    holder.fault = "stall"
    fetch = client.start_fetch(
        prefix_of(keys, (holder.uri, stored)), (memory := PrefixMemory(MODEL, 2)).sections
    )
    assert fetch.wait_layer(0) == 2
    late = r"^it is not there after 0.05 s; wait again, or cancel$"
    with pytest.raises(TimeoutError, match=late):
        fetch.wait_layer(LAYERS - 1, timeout_s=0.05)
    with pytest.raises(TimeoutError, match=late):
        fetch.result(timeout_s=0.05)
    assert not fetch.done
    fetch.cancel()
    result = fetch.result()
    assert [miss.reason for miss in result.misses] == [MissReason.CANCELLED, MissReason.AFTER_GAP]
    before = memory._octets.copy()
    holder.go_on()
    client.lookup(keys)
    assert (before == memory._octets).all()


def test_a_thread_learns_of_a_layer_while_the_loop_is_busy(served: Served, client: BlockingClient) -> None:
    keys, stored = keys_of(served, "busy loop", 2), content(2)
    holder = ScriptedHolder(served, 1).serve(keys, stored)
    holder.fault = "stall"
    fetch = client.start_fetch(prefix_of(keys, (holder.uri, stored)), PrefixMemory(MODEL, 2).sections)
    assert fetch.wait_layer(0, timeout_s=60) == 2
    entered, go_on = threading.Event(), threading.Event()
    busy = True

    def slow(block: int, layer: int) -> tuple[memoryview, memoryview]:
        nonlocal busy
        entered.set()
        go_on.wait(5)
        busy = False
        return stored.sections(block, layer)

    job = client.start_store(served.cache_uris[0], keys, slow)
    assert entered.wait(60)
    assert fetch.wait_layer(1) == 2
    assert not fetch.done
    assert busy
    go_on.set()
    fetch.cancel()
    assert job.result(60).complete


def test_closing_ends_what_threads_wait_for(served: Served) -> None:
    client = BlockingClient(served.credentials, index=served.index_uri)
    keys, stored = keys_of(served, "closed under", 2), content(2)
    holder = ScriptedHolder(served, 1).serve(keys, stored)
    holder.fault = "stall"
    fetch = client.start_fetch(prefix_of(keys, (holder.uri, stored)), PrefixMemory(MODEL, 2).sections)
    assert fetch.wait_layer(0) == 2
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(fetch.result)
        client.close()
        assert waiting.result(60).misses[0].reason is MissReason.CANCELLED


def test_closing_ends_the_wait_for_a_lease(served: Served) -> None:
    client = BlockingClient(served.credentials, index=served.index_uri)
    holder, keys = ScriptedHolder(served, 1), keys_of(served, "closed before it", 1)
    holder.lease_ttl_ms, holder.hold_leases = 60_000, True
    refused = threading.Event()

    def hold() -> None:
        with pytest.raises(ClientClosed, match="was closed"), client.lease(holder.uri, keys):
            raise AssertionError("it was not granted")
        refused.set()

    threading.Thread(target=hold, daemon=True).start()
    assert holder.wait_for(lambda: holder.count(KEEP) == 1)
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    assert refused.wait(30)
    closing.join(30)
    assert not closing.is_alive()
    holder.go_on()


def test_a_job_is_waited_for_or_cancelled(served: Served, client: BlockingClient) -> None:
    keys, stored = keys_of(served, "job", 3), content(3)
    job = client.start_store(served.cache_uris[0], keys, stored.sections)
    assert job.result(60).complete
    assert job.done
    with pytest.raises(KeyError):
        client.store(served.cache_uris[0], keys, lambda block, layer: {}[block])
    entered, go_on = threading.Event(), threading.Event()

    def slow(block: int, layer: int) -> tuple[memoryview, memoryview]:
        entered.set()
        go_on.wait(60)
        return stored.sections(block, layer)

    cancelled = client.start_store(served.cache_uris[0], keys, slow)
    assert entered.wait(60)
    with pytest.raises(TimeoutError, match=r"^it is not there after 0 s; wait again, or cancel$"):
        cancelled.result(0)
    cancelled.cancel()
    go_on.set()
    with pytest.raises(ClientClosed):
        cancelled.result(60)
    assert client.store(served.cache_uris[0], keys, stored.sections).present == 3


def test_errors_come_as_they_are(served: Served, client: BlockingClient) -> None:
    nobody = BlockingClient(
        served.credentials,
        index="https://127.0.0.1:1/kvsp/",
        settings=ClientSettings(call_timeout_ms=500),
    )
    with nobody, pytest.raises(Unavailable):
        nobody.lookup(keys_of(served, "errors", 1))
    with (
        pytest.raises(ValueError, match="mine"),
        client.lease_prefix(Prefix(keys=keys_of(served, "errors", 0), replicas=())),
    ):
        raise ValueError("mine")


def test_a_lease_is_given_back_where_its_block_fails(served: Served, client: BlockingClient) -> None:
    holder, keys = ScriptedHolder(served, 1), keys_of(served, "failing", 1)
    holder.lease_ttl_ms = 60_000
    with pytest.raises(ValueError, match="mine"), client.lease(holder.uri, keys):
        raise ValueError("mine")
    assert holder.wait_for(lambda: holder.count(RELEASE) == 1)


def in_child(work: Callable[[], bool], tmp_path: Path) -> None:
    """Fork, do something in the child, and look whether it came out well."""
    said = tmp_path / "said"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 1
        except BaseException as error:
            said.write_text(repr(error))
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, said.read_text() if said.exists() else "it came out wrong"


def test_a_forked_process_opens_it_anew(served: Served, client: BlockingClient, tmp_path: Path) -> None:
    stored = content(4)
    prefix = stored_prefix(served, client, "forked", stored)
    begun = client.start_fetch(prefix, PrefixMemory(MODEL, 4).sections)

    def fetches() -> bool:
        memory = PrefixMemory(MODEL, 4)
        return client.fetch(prefix, memory.sections).complete and same(memory, stored)

    def child() -> bool:
        with pytest.raises(ClientClosed):
            begun.wait_layer(0)
        done = fetches()
        client.close()
        return done

    in_child(child, tmp_path)
    assert fetches(), "the child closed its own connections, not ours"
    assert begun.result().complete


def test_a_forked_process_lets_go_of_the_sockets(
    served: Served, client: BlockingClient, tmp_path: Path
) -> None:
    client.lookup(keys_of(served, "sockets", 1))
    opened = client._open()
    descriptors = opened.loop.sockets()
    assert descriptors

    def child() -> bool:
        return all(os.readlink(f"/proc/self/fd/{fd}") == os.devnull for fd in descriptors)

    in_child(child, tmp_path)
    assert len(client.lookup(keys_of(served, "sockets", 1))) == 0


def test_a_client_on_a_loop_refuses_in_a_forked_process(served: Served, tmp_path: Path) -> None:
    keys = keys_of(served, "loop", 1)

    async def main() -> None:
        async with Client(served.credentials, index=served.index_uri) as client:
            await client.lookup(keys)

            def child() -> bool:
                with pytest.raises(ClientClosed, match="another process"):
                    client.lookup(keys).send(None)
                return True

            in_child(child, tmp_path)
            await client.lookup(keys)

    anyio.run(main)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let the tests be interrupted also where they were started in the background, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when(ready: Callable[[], bool]) -> threading.Thread:
    """Interrupt the main thread, as a user does, once something is so."""

    def interrupt() -> None:
        assert ready()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_an_interrupted_fetch_writes_no_more(served: Served, client: BlockingClient) -> None:
    keys, stored = keys_of(served, "interrupted", 2), content(2)
    holder = ScriptedHolder(served, 1).serve(keys, stored)
    holder.fault = "silent"
    memory = PrefixMemory(MODEL, 2)
    client.lookup(keys)
    interrupting = interrupt_when(lambda: holder.wait_for(lambda: holder.count("GET blocks") == 2))
    with pytest.raises(KeyboardInterrupt):
        client.fetch(prefix_of(keys, (holder.uri, stored)), memory.sections)
    interrupting.join()
    assert client.stats().missed_blocks == {MissReason.CANCELLED: 1, MissReason.AFTER_GAP: 1}


def test_a_lease_whose_entering_is_interrupted_is_given_back(served: Served, client: BlockingClient) -> None:
    holder, keys = ScriptedHolder(served, 1), keys_of(served, "interrupted lease", 1)
    holder.lease_ttl_ms, holder.hold_leases = 60_000, True
    client.lookup(keys)
    interrupting = interrupt_when(lambda: holder.wait_for(lambda: holder.count(KEEP) == 1))
    with pytest.raises(KeyboardInterrupt), client.lease(holder.uri, keys):
        raise AssertionError("it was not granted")
    interrupting.join()
    holder.go_on()
    assert holder.wait_for(lambda: holder.count(RELEASE) == 1)


def test_a_lease_that_was_granted_just_when_it_was_interrupted_is_given_back(
    served: Served, client: BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, keys = ScriptedHolder(served, 1), keys_of(served, "interrupted later", 1)
    holder.lease_ttl_ms = 60_000
    call, kept = LoopThread.call, list[Any]()

    def interrupted(self: LoopThread, work: Any, *arguments: Any) -> Any:
        monkeypatch.undo()
        kept.append((work, arguments))  # as a traceback does: nothing is let go of by itself
        call(self, work, *arguments)
        raise KeyboardInterrupt

    client.lookup(keys)
    monkeypatch.setattr(LoopThread, "call", interrupted)
    with pytest.raises(KeyboardInterrupt), client.lease(holder.uri, keys):
        raise AssertionError("it was interrupted")
    assert holder.wait_for(lambda: holder.count(RELEASE) == 1)


def test_leaving_a_lease_of_a_closed_client_is_no_error(served: Served) -> None:
    client = BlockingClient(served.credentials, index=served.index_uri)
    holder, keys = ScriptedHolder(served, 1), keys_of(served, "closed lease", 1)
    with client.lease(holder.uri, keys):
        client.close()
    assert holder.count(KEEP) == 1


def test_an_interrupted_store_reads_no_more(served: Served, client: BlockingClient) -> None:
    """It is over before it raises: the caller may use its memory for something else."""
    keys, stored = keys_of(served, "interrupted store", 60), content(60)
    entered, given_up, go_on, asked = threading.Event(), threading.Event(), threading.Event(), []
    reading = False

    def slow(block: int, layer: int) -> tuple[memoryview, memoryview]:
        nonlocal reading
        reading = True
        entered.set()
        assert go_on.wait(60)
        asked.append(block)
        reading = False
        return stored.sections(block, layer)

    def entered_then_go_on() -> bool:
        assert entered.wait(60)
        (job,) = client._jobs
        job._running.future.add_done_callback(lambda _: given_up.set())
        threading.Thread(target=lambda: given_up.wait(60) and go_on.set()).start()
        return True

    interrupting = interrupt_when(entered_then_go_on)
    with pytest.raises(KeyboardInterrupt):
        client.store(served.cache_uris[0], keys, slow)
    assert not reading
    interrupting.join()
    assert client.store(served.cache_uris[0], keys_of(served, "after it", 30), stored.sections).complete
    assert len(set(asked)) <= client.settings.concurrent_stores


def test_a_forked_process_leaves_jobs_and_leases_to_its_parent(
    served: Served, client: BlockingClient, tmp_path: Path
) -> None:
    keys, stored = keys_of(served, "forked store", 1), content(1)
    holder = ScriptedHolder(served, 1)
    holder.lease_ttl_ms = 60_000
    entered, go_on = threading.Event(), threading.Event()

    def slow(block: int, layer: int) -> tuple[memoryview, memoryview]:
        entered.set()
        assert go_on.wait(60)
        return stored.sections(block, layer)

    leasing = client.lease(holder.uri, keys)
    lease = leasing.__enter__()
    job = client.start_store(served.cache_uris[0], keys, slow)
    assert entered.wait(60)

    def child() -> bool:
        signal.alarm(60)  # should it wait for a thread that is not there
        for call in (job.result, lambda: lease.held):
            with pytest.raises(ClientClosed, match="another process"):
                call()
        job.cancel()
        leasing.__exit__(None, None, None)
        client.lookup(keys)
        client.close()
        return job.done

    in_child(child, tmp_path)
    go_on.set()
    assert job.result(60).complete
    assert lease.held
    assert holder.count(RELEASE) == 0
    leasing.__exit__(None, None, None)

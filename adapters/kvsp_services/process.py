"""A process that runs roles: started from a configuration, reloaded, drained and stopped by signals.

SIGHUP reads policy, limits and certificates again, and deletes what the policy says is to be purged; what
cannot be used is said and changes nothing. SIGTERM and SIGINT stop in order: no new connections, what is
under way ends, stores are closed; then the log says "safe to stop". A role whose write could not be made
durable is discarded and rebuilt from its store, a bounded number of times.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import anyio
import structlog

from kvsp_core.errors import KVSPError
from kvsp_core.machines.fleet import Fleet
from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.role import BlockName, Effect, Role
from kvsp_h2 import Credentials
from kvsp_services.assembly import (
    Materials,
    make_role,
    make_tiers,
    read_descriptors,
    read_model,
    read_scopes,
    read_storage_key,
    set_limits,
)
from kvsp_services.buffers import BufferPool
from kvsp_services.config import (
    Config,
    FrontEndSection,
    InstanceSection,
    LoopName,
    RoleSection,
    with_limits_of,
)
from kvsp_services.driver import Driver
from kvsp_services.engine_port import ThreadedEngine, numpy_engine
from kvsp_services.epochs import next_epoch
from kvsp_services.generations import Generations, serve_api
from kvsp_services.loops import TrioLoop, open_loop
from kvsp_services.metrics import Metrics
from kvsp_services.monitoring import MonitoringServer
from kvsp_services.openai_api import make_app
from kvsp_services.pki import check_certificate
from kvsp_services.policy import read_policy
from kvsp_services.ports import Loop
from kvsp_services.stores.blocks import BlockTier
from kvsp_services.stores.durable import DurableStore, GroupCommitter, NoStore
from kvsp_services.tracing import TracedDriver, open_traces
from kvsp_services.wire import ServedRole, ServicePeers

__all__ = ["Process", "RunningRole", "running", "serve"]

MAX_REBUILDS: Final = 5
REBUILD_WINDOW_S: Final = 60.0
DRAIN_S: Final = 30.0
"""Time that roles have to hand over what they have: sessions that finish, records that are withdrawn."""
CLOSE_S: Final = 5.0
"""Time that connections have to close in order after that."""
_HEARTBEAT_S: Final = 1.0
_EXPIRED_AT_MOST: Final = 1000
"""Blocks of a tier that are deleted for their age at each heartbeat."""
_DEAF_S: Final = 10.0
"""Time without a heartbeat after which the process says that it is not healthy."""


@runtime_checkable
class Stoppable(Protocol):
    """A role that has something to hand over before its process ends."""

    @property
    def safe_to_stop(self) -> bool:
        """Whether nothing is left to hand over."""
        ...

    def stop(self, now_ms: int) -> tuple[Effect, ...]:
        """Be told that the process is to end."""
        ...


@runtime_checkable
class Purgeable(Protocol):
    """A role that keeps what the policy may say is to be deleted."""

    def purge(self, now_ms: int) -> tuple[Effect, ...]:
        """Delete what it has of the scopes that the policy says are purged."""
        ...


@runtime_checkable
class Keeper(Protocol):
    """A role that keeps blocks in tiers."""

    def expire(self, tier: str, names: Iterable[BlockName], now_ms: int) -> tuple[Effect, ...]:
        """Delete blocks that a tier has kept for as long as it may."""
        ...


@contextmanager
def _named(role: str) -> Iterator[None]:
    """Say of an error of the operating system which role's directory it is about."""
    try:
        yield
    except OSError as error:
        advice = "it has to be a directory that this process may write in"
        raise KVSPError(f"[{role}]: {error.filename}: {error.strerror}; {advice}") from None


class RunningRole:
    """One role of a process: its store, driver, connections, and how often it had to be rebuilt."""

    def __init__(self, process: Process, name: str, section: RoleSection) -> None:
        self.name = name
        self.section = section
        self.credentials = Credentials(
            Path(section.certificate_file), Path(section.key_file), Path(process.config.authorities_file)
        )
        self.role: Role | None = None
        self.listener: Any = None
        self.served: ServedRole | None = None
        self.trouble: str | None = "starting"
        """Why the role is not ready; None where it is."""
        self._process = process
        self._log = structlog.get_logger().bind(role=name)
        self._committer: GroupCommitter | NoStore = NoStore()
        check_certificate(Path(section.certificate_file), section.base_uri)
        with _named(name):
            self._tiers: dict[str, BlockTier] = make_tiers(getattr(section, "tiers", []), process.storage_key)
        self._rebuilt: deque[float] = deque()
        self.model = read_model(section)
        self.generations: Generations | None = None
        """Of a front end: what programs ask it for."""
        self._engine: ThreadedEngine | None = None
        if isinstance(section, FrontEndSection):
            if not process.scopes:
                raise KVSPError(f"[{name}]: it needs a scope to ask in; add [[scopes]] with its key_file")
            self.generations = Generations(process.scopes[0].scope_id)

    def build(self) -> None:
        """Make the role from its store, and drive it."""
        process = self._process
        stored: dict[str, dict[str, bytes]] = {}
        if process.storage_key is not None:
            path = Path(process.config.data_dir) / f"{self.name}.sqlite"
            with _named(self.name):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            store = DurableStore(path, process.storage_key, self.section.base_uri)
            stored = store.load()
            self._committer = GroupCommitter(store)
        self._start_engine()
        materials = Materials(
            config=process.config,
            policy=process.policy,
            descriptors=process.descriptors,
            scopes=process.scopes,
            model=self.model,
            stored=stored,
            now_ms=process.loop.now_ms(),
            epoch=self._next_epoch(),
            # A controller that is rebuilt begins anew; what the index then knows of instances runs out.
            fleet=process.fleet if not self._rebuilt else None,
            numerics=None if self._engine is None else self._engine.numerics,
        )
        self.role = make_role(self.section, materials)
        traces = None if process.exporting is None else process.exporting.of_role(self.name)
        make = Driver if traces is None else partial(TracedDriver, traces=traces)
        driver = make(
            self.role,
            process.loop,
            ServicePeers.of_network(process.network, self.credentials),
            committer=self._committer,
            tiers=self._tiers,
            engine=self._engine,
            pool=process.pool,
            observe=process.metrics.observe,
            deliver=None if self.generations is None else self.generations.deliver,
            failed=self._failed,
        )
        if self._engine is not None:
            self._engine.driver = driver
        if self.generations is not None:
            self.generations.driver = driver
        if self.served is None:
            self.served = ServedRole(driver)
        else:
            self.served.driver = driver
        self.trouble = None
        driver.start()

    def _next_epoch(self) -> int:
        now_ms = time.time_ns() // 1_000_000
        if not isinstance(self.section, InstanceSection):
            return now_ms
        return next_epoch(Path(self._process.config.data_dir) / f"{self.name}.epoch", now_ms)

    def _start_engine(self) -> None:
        """Begin with an engine that knows of nothing, in place of the one there was."""
        section = self.section
        if not isinstance(section, InstanceSection) or self.model is None:
            return
        if self._engine is not None:
            self._engine.driver = None
            self._engine.stop()
        self._engine = numpy_engine(
            Path(section.model_dir), kv_dtype=self.model.kv_dtype, block_tokens=self.model.block_tokens
        )

    async def serve_api(self) -> None:
        """Serve the API of a front end until the process stops."""
        section, process = self.section, self._process
        if not isinstance(section, FrontEndSection) or self.generations is None:
            return
        from kvsp_engines.text import TextCodec
        from kvsp_engines.weights import load_config

        directory = Path(section.model_dir)
        app = make_app(
            model=section.model or directory.resolve().name,
            text=TextCodec(directory),
            generate=self.generations.generate,
            context_tokens=load_config(directory).context,
        )
        await serve_api(
            app,
            host=section.api_host,
            port=section.api_port,
            on_trio=isinstance(process.loop, TrioLoop),
            stopping=process.stopping.wait,
        )

    async def listen(self) -> None:
        """Take connections."""
        assert self.served is not None
        host, port = self.section.address
        try:
            self.listener = await self._process.network.listen(
                self.credentials, self.section.base_uri, self.served.on_event, host=host, port=port
            )
        except OSError as error:
            raise KVSPError(
                f"[{self.name}]: cannot listen on {host}:{port}: {error.strerror or error};"
                " stop what listens there, or set listen"
            ) from None
        self._log.info("listening", base_uri=self.section.base_uri, port=self.listener.port)

    def _failed(self, error: Exception) -> None:
        """Take note that the role cannot go on, and build it anew, unless that happened too often."""
        self._log.error("role failed", error=str(error), kind=type(error).__name__)
        self._process.metrics.count("role_rebuilds", role=self.name)
        self.trouble = "being rebuilt"
        now = time.monotonic()
        self._rebuilt.append(now)
        while self._rebuilt[0] < now - REBUILD_WINDOW_S:
            self._rebuilt.popleft()
        if len(self._rebuilt) > MAX_REBUILDS:
            self._process.give_up(f"[{self.name}] failed {MAX_REBUILDS} times in a minute: {error}")
            return
        committer = self._committer

        def close_and_rebuild() -> None:
            committer.close()
            self._process.loop.call_soon_threadsafe(self._rebuild)

        self._process.loop.in_thread(self.name, close_and_rebuild)

    def _rebuild(self) -> None:
        try:
            self.build()
        except Exception as error:
            self._process.give_up(f"[{self.name}] cannot be rebuilt: {error}")
        else:
            self._log.info("role rebuilt")

    def purge(self) -> None:
        """Have the role delete what the policy says is to be purged."""
        if self.served is not None and isinstance(self.role, Purgeable):
            self.served.driver.let(self.role.purge)

    def expire(self) -> None:
        """Have the role delete what its tiers have kept for as long as they may."""
        if self.served is None or not isinstance(self.role, Keeper):
            return
        for tier, blocks in self._tiers.items():
            if names := blocks.aged(_EXPIRED_AT_MOST):
                self.served.driver.let(partial(self.role.expire, tier, names))

    def begin_to_stop(self) -> None:
        """Tell a role that has something to hand over that the process is to end."""
        if self.served is not None and isinstance(self.role, Stoppable):
            self.served.driver.let(self.role.stop)

    @property
    def is_safe_to_stop(self) -> bool:
        """Whether the role has nothing left to hand over, or cannot any more."""
        over = self.served is None or self.served.driver.stopped or not isinstance(self.role, Stoppable)
        return over or self.role.safe_to_stop  # type: ignore[union-attr]

    def close(self) -> None:
        """Stop the role and close its stores; blocks."""
        if self.served is not None:
            self.served.driver.stop()
        if self._engine is not None:
            self._engine.driver = None
            self._engine.stop()
        self._committer.close()
        for tier in self._tiers.values():
            tier.close()


class Process:
    """The roles of a configuration on a loop and its network."""

    def __init__(
        self, config: Config, loop: Loop, network: Any, metrics: Metrics, reread: Callable[[], Config]
    ) -> None:
        self.config = config
        self._reread = reread
        self.loop = loop
        self.network = network
        self.metrics = metrics
        self.exporting = open_traces()
        self.pool = BufferPool()
        self.storage_key = read_storage_key(config)
        self.descriptors = read_descriptors(config)
        self.scopes = read_scopes(config)
        self.policy: Policy = read_policy(Path(config.policy_file))
        both = config.index is not None and config.controller is not None
        self.fleet = Fleet() if both else None
        self.stopping = anyio.Event()
        self.failure: str | None = None
        self.hurried = False
        self._log = structlog.get_logger()
        self._beat = time.monotonic()
        self.roles = [RunningRole(self, name, section) for name, section in config.roles.items()]
        metrics.before_exposition.append(self._set_gauges)

    def _set_gauges(self) -> None:
        self.metrics.set("connections", sum(r.served.connections for r in self.roles if r.served))

    async def start(self) -> None:
        """Build every role, then listen for all of them."""
        for role in self.roles:
            role.build()
        for role in self.roles:
            await role.listen()

    def reload(self) -> None:
        """Read policy, limits and certificates again; where one cannot be used, go on with all there are."""
        try:
            config, differ = with_limits_of(self.config, self._reread())
            policy = read_policy(Path(self.config.policy_file))
            for role in self.roles:
                check_certificate(Path(role.section.certificate_file), role.section.base_uri)
                role.credentials.reload()
        except (KVSPError, OSError) as error:
            self._log.error("not reloaded", error=str(error))
            return
        self.config, self.policy = config, policy
        for role in self.roles:
            role.section = config.roles[role.name]
            if role.role is not None:
                set_limits(role.role, role.section)
                if hasattr(role.role, "policy"):
                    role.role.policy = policy
            role.purge()
        if differ:
            self._log.warning("changed, and needs a restart", keys=" ".join(differ))
        self._log.info("reloaded")

    def give_up(self, reason: str) -> None:
        """Stop, because a role cannot go on."""
        self.failure = self.failure or reason
        self.stopping.set()

    def trouble(self) -> str | None:
        """Return why the process is not ready, or None."""
        if self.stopping.is_set():
            return "stopping"
        return next((f"{r.name}: {r.trouble}" for r in self.roles if r.trouble is not None), None)

    def deaf(self) -> str | None:
        """Return why the process is not healthy: its loop does not turn; or None."""
        silent = time.monotonic() - self._beat
        return f"the loop has not turned for {silent:.0f} s" if silent > _DEAF_S else None

    async def beat(self) -> None:
        """Show that the loop turns, and do what is due from time to time."""
        while True:
            self._beat = time.monotonic()
            for role in self.roles:
                role.expire()
            await anyio.sleep(_HEARTBEAT_S)

    async def handle_signals(self, started: Callable[[], None]) -> None:
        """Reload at SIGHUP, stop at SIGTERM and SIGINT."""
        with anyio.open_signal_receiver(signal.SIGHUP, signal.SIGTERM, signal.SIGINT) as signals:
            started()
            async for number in signals:
                if number == signal.SIGHUP:
                    self.reload()
                elif self.stopping.is_set():
                    self.hurried = True  # asked twice: do not wait for what is under way
                else:
                    self._log.info("draining")
                    self.stopping.set()

    async def drain(self) -> None:
        """Let every role hand over what it has, then close connections in order, for a bounded time."""
        with anyio.move_on_after(DRAIN_S):
            for role in self.roles:
                role.begin_to_stop()
            while not self.hurried and not all(role.is_safe_to_stop for role in self.roles):
                await anyio.sleep(0.05)
        for role in self.roles:
            if role.listener is not None:
                role.listener.shutdown()
        with anyio.move_on_after(CLOSE_S):
            while not self.hurried and any(r.listener is not None and r.listener.links for r in self.roles):
                await anyio.sleep(0.05)

    def close(self) -> None:
        """Close every role; blocks."""
        for role in self.roles:
            role.close()
        if self.exporting is not None:
            self.exporting.close()


@asynccontextmanager
async def running(
    config: Config, metrics: Metrics, reread: Callable[[], Config] | None = None
) -> AsyncIterator[tuple[Process, Any]]:
    """Have a process, not started yet, on the running loop, with a group for its tasks; close it then.

    `reread` returns the configuration as it is in its file now.
    """
    async with open_loop() as (loop, network, tasks):
        process = Process(config, loop, network, metrics, reread or (lambda: config))
        try:
            yield process, tasks
        finally:
            process.close()


async def _serve(
    config: Config, reread: Callable[[], Config] | None, started: Callable[[], None]
) -> str | None:
    metrics = Metrics()
    log = structlog.get_logger()
    async with running(config, metrics, reread) as (process, tasks):
        monitoring = None
        if config.monitoring.enabled:
            monitoring = MonitoringServer(
                metrics,
                alive=process.deaf,
                ready=process.trouble,
                host=config.monitoring.host,
                port=config.monitoring.port,
            )
            log.info("monitoring", host=config.monitoring.host, port=monitoring.port)
        try:
            await process.start()
            tasks.start_soon(process.beat)
            ready = anyio.Event()
            tasks.start_soon(process.handle_signals, ready.set)
            await ready.wait()
            for role in process.roles:
                tasks.start_soon(role.serve_api)
            started()
            await process.stopping.wait()
            await process.drain()
        finally:
            if monitoring is not None:
                monitoring.close()
    log.info("safe to stop")
    return process.failure


def serve(
    config: Config,
    loop: LoopName | None = None,
    started: Callable[[], None] = lambda: None,
    *,
    reread: Callable[[], Config] | None = None,
) -> str | None:
    """Run the roles of a configuration until a signal; return why it gave up, or None.

    `started` is called once every role listens. `reread` returns the configuration as it is in its file now,
    for SIGHUP; without it only policy and certificates are read again.
    """
    chosen = loop or config.loop
    backend = "trio" if chosen == "trio" else "asyncio"
    options = {"use_uvloop": True} if chosen == "uvloop" else {}
    try:
        return anyio.run(partial(_serve, config, reread, started), backend=backend, backend_options=options)
    except BaseExceptionGroup as group:
        raise _first_of(group) from None


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return what went wrong where that is one error of ours, else all of it."""
    known, other = group.split(KVSPError)
    while isinstance(known, BaseExceptionGroup):
        known = known.exceptions[0]  # type: ignore[assignment]
    return group if other is not None or known is None else known

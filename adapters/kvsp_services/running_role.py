"""One role of a process: its store, tiers, engine, driver and connections; rebuilt where it has failed."""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import structlog

from kvsp_core.errors import KVSPError
from kvsp_core.roles.instance import Instance
from kvsp_core.roles.role import BlockName, Effect, Role
from kvsp_h2 import Credentials
from kvsp_services import http1
from kvsp_services.assembly import (
    Materials,
    make_role,
    make_tiers,
    read_model,
)
from kvsp_services.certificate_watch import CertificateWatch
from kvsp_services.config import (
    ControllerSection,
    FrontEndSection,
    InstanceSection,
    RoleSection,
)
from kvsp_services.driver import Driver
from kvsp_services.engine_port import ThreadedEngine, numpy_engine
from kvsp_services.epochs import next_epoch
from kvsp_services.generations import Generations
from kvsp_services.logs import REQUEST_ID, said_of
from kvsp_services.openai_api import make_app
from kvsp_services.pki import check_certificate
from kvsp_services.request_log import RequestLog, request_id_of
from kvsp_services.stores.blocks import BlockTier
from kvsp_services.stores.durable import DurableStore, GroupCommitter, NoStore, StoreReplaced
from kvsp_services.tracing import TracedDriver
from kvsp_services.wire import ServedRole, ServicePeers

if TYPE_CHECKING:
    from kvsp_services.process import Process

__all__ = ["MAX_REBUILDS", "RunningRole"]

MAX_REBUILDS: Final = 5
REBUILD_WINDOW_S: Final = 60.0
_EXPIRED_AT_MOST: Final = 1000
"""Blocks of a tier that are deleted for their age at each heartbeat."""


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
        """What keeps the role from its work; None where nothing does."""
        self.api_listens = not isinstance(section, FrontEndSection)
        self._process = process
        self._log = structlog.get_logger(role=name)
        self.request_log = RequestLog(name, everything=process.config.log.level == "debug")
        self._committer: GroupCommitter | NoStore = NoStore()
        self.certificate = CertificateWatch(
            check_certificate(Path(section.certificate_file), section.base_uri), self._log
        )
        with _named(name):
            self._tiers: dict[str, BlockTier] = make_tiers(getattr(section, "tiers", []), process.storage_key)
        self._rebuilt: deque[float] = deque()
        self.model = read_model(section)
        self.generations: Generations | None = None
        """Of a front end: what programs ask it for."""
        self._engine: ThreadedEngine | None = None
        if isinstance(section, FrontEndSection):
            refused = partial(process.metrics.count, "front_end_refused")
            self.generations = Generations(process.scopes[0].scope_id, refused)

    def build(self) -> None:
        """Make the role from its store, and drive it."""
        process = self._process
        stored: dict[str, dict[str, bytes]] = {}
        if isinstance(self.section, ControllerSection) and process.storage_key is not None:
            path = Path(process.config.data_dir) / f"{self.name}.sqlite"
            with _named(self.name):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._rebuilt and not path.exists():  # an empty one would forget what was acknowledged
                raise KVSPError(f"{path} is gone; put a backup in its place (kvsp backup makes them)")
            store = DurableStore(path, process.storage_key, self.section.base_uri)
            stored = store.load()
            self._committer = GroupCommitter(store)
        self._start_engine()
        if self._rebuilt and isinstance(self.section, ControllerSection):
            process.renew_fleet()
        materials = Materials(
            config=process.config,
            policy=process.policy,
            descriptors=process.descriptors,
            scopes=process.scopes,
            model=self.model,
            stored=stored,
            now_ms=process.loop.now_ms(),
            epoch=self._next_epoch(),
            fleet=process.fleet,
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
            log=self.request_log,
            failed=self._failed,
        )
        if self._engine is not None:
            self._engine.driver = driver
        if self.generations is not None:
            self.generations.driver = driver
        if self.served is None:
            self.served = ServedRole(driver, process.metrics.timer("request", role=self.name))
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
        """Begin with an engine that knows of nothing."""
        section = self.section
        if not isinstance(section, InstanceSection) or self.model is None:
            return
        make = self._process.make_engine or partial(numpy_engine, Path(section.model_dir))
        self._engine = ThreadedEngine(make(self.model), self.model.block_tokens)

    def _stop_engine(self) -> None:
        """End the engine there is; blocks, but not for an engine that hangs."""
        if self._engine is not None and not self._engine.stop():
            self._log.warning("the engine hangs; its thread is left behind")

    async def serve_api(self) -> None:
        """Serve the API of a front end until the process stops."""
        section, process = self.section, self._process
        if not isinstance(section, FrontEndSection) or self.generations is None:
            return
        from kvsp_engines.text import TextCodec
        from kvsp_engines.weights import load_config

        directory = Path(section.model_dir)
        shape = load_config(directory)
        app = make_app(
            model=section.model or directory.resolve().name,
            text=TextCodec(directory),
            generate=self.generations.generate,
            belongs_to=self.generations.belongs_to,
            context_tokens=shape.context,
            vocabulary=shape.vocabulary,
        )

        def listening(port: int) -> None:
            self._api_listens()
            self._log.info("API listening", host=section.api_host, port=port)

        await http1.serve(
            app,
            host=section.api_host,
            port=section.api_port,
            key="front_end.api_port",
            listening=listening,
            stopping=process.stopping.wait,
        )

    def _api_listens(self) -> None:
        self.api_listens = True

    @property
    def unready(self) -> str | None:
        """Why the role is not ready, or None."""
        if self.trouble is not None:
            return self.trouble
        if self.listener is None or not self.api_listens:
            return "not listening yet"
        if self.certificate.has_expired(datetime.datetime.now(datetime.UTC)):
            return "its certificate has expired"
        if isinstance(self.role, Instance) and self.role.is_fenced:
            return "its controller knows a later start of it; see that one process only has its base URI"
        if isinstance(self.role, Instance) and self.role.engine_is_silent:
            return "its engine is silent; restart the process where that lasts"
        return None

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
        belongs_to = self.served.driver.failed_for if self.served is not None else None
        more = {} if belongs_to is None else {REQUEST_ID: request_id_of(belongs_to)}
        self._log.error("role failed", error=said_of(error), **more)
        self._process.metrics.count("role_rebuilds", role=self.name)
        self.trouble = "being rebuilt"
        if self.generations is not None:
            self.generations.fail_all()
        if isinstance(error, StoreReplaced):  # what is there now may not be what was acknowledged
            self._process.give_up(f"[{self.name}] cannot be rebuilt: {error}")
            return
        now = time.monotonic()
        self._rebuilt.append(now)
        while self._rebuilt[0] < now - REBUILD_WINDOW_S:
            self._rebuilt.popleft()
        if len(self._rebuilt) > MAX_REBUILDS:
            self._process.give_up(f"[{self.name}] failed {MAX_REBUILDS} times in a minute: {said_of(error)}")
            return
        committer = self._committer

        def close_and_rebuild() -> None:
            try:
                self._stop_engine()
                committer.close()
            finally:  # nobody hears of an error in a thread; a store that is not free says so when it opens
                self._process.loop.call_soon_threadsafe(self._rebuild)

        self._process.loop.in_thread(self.name, close_and_rebuild)

    def _rebuild(self) -> None:
        try:
            self.build()
        except Exception as error:
            self._process.give_up(f"[{self.name}] cannot be rebuilt: {said_of(error)}")
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
        self._stop_engine()
        self._committer.close()
        for tier in self._tiers.values():
            tier.close()

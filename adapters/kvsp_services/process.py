"""A process that runs roles: started from a configuration, reloaded, drained and stopped by signals.

SIGHUP reads policy, limits, certificates and the level of logs again, and deletes what the policy says is
to be purged; what cannot be used is said and changes nothing. SIGTERM and SIGINT stop in order: no new
connections, what is under way ends, stores are closed; then the log says "safe to stop", or which roles
were not done. A role whose write could not be made durable is discarded and rebuilt from its store, a
bounded number of times.
"""

from __future__ import annotations

import datetime
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import structlog

from kvsp_client.model_dir import model_files
from kvsp_core.errors import KVSPError
from kvsp_core.machines.fleet import Fleet
from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.index import Index
from kvsp_h2 import Credentials
from kvsp_services.assembly import read_descriptors, read_scopes, read_storage_key, set_limits
from kvsp_services.buffers import BufferPool
from kvsp_services.config import Config, LoopName, ModelSection, with_limits_of
from kvsp_services.engine_port import MakeEngine
from kvsp_services.logs import set_level
from kvsp_services.loops import open_loop
from kvsp_services.metrics import Metrics
from kvsp_services.monitoring import MonitoringServer
from kvsp_services.pki import check_certificate
from kvsp_services.policy import read_policy
from kvsp_services.ports import Loop
from kvsp_services.running_role import RunningRole
from kvsp_services.tracing import open_traces

__all__ = ["Process", "check_files", "running", "serve"]

DRAIN_S: Final = 30.0
"""Time that roles have to hand over what they have: sessions that finish, records that are withdrawn."""
CLOSE_S: Final = 5.0
"""Time that connections have to close in order after that."""
_HEARTBEAT_S: Final = 1.0
_DEAF_S: Final = 10.0
"""Time without a heartbeat after which the process says that it is not healthy."""


def check_files(config: Config) -> None:
    """Read the files that a process is made from, but for stores and weights; raises as it would."""
    read_storage_key(config)
    read_descriptors(config)
    read_scopes(config)
    read_policy(Path(config.policy_file))
    for section in config.roles.values():
        certificate, authorities = Path(section.certificate_file), Path(config.authorities_file)
        Credentials(certificate, Path(section.key_file), authorities)
        check_certificate(certificate, section.base_uri)
        if isinstance(section, ModelSection):
            model_files(Path(section.model_dir))


class Process:
    """The roles of a configuration on a loop and its network."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        network: Any,
        metrics: Metrics,
        reread: Callable[[], Config],
        make_engine: MakeEngine | None = None,
    ) -> None:
        self.config = config
        self.make_engine = make_engine
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
        self.unfinished: tuple[str, ...] = ()
        """The roles that had something left to hand over when the time for that was over."""
        self._log = structlog.get_logger()
        self._beat = time.monotonic()
        self.roles = [RunningRole(self, name, section) for name, section in config.roles.items()]
        metrics.before_exposition.append(self._set_gauges)

    def _set_gauges(self) -> None:
        self.metrics.set("connections", sum(r.served.connections for r in self.roles if r.served))
        until = min(role.certificate.until for role in self.roles)
        self.metrics.set("certificate_expiry_timestamp_seconds", until.timestamp())

    async def start(self) -> None:
        """Build every role, then listen for all of them."""
        for role in self.roles:
            role.build()
        for role in self.roles:
            await role.listen()

    def renew_fleet(self) -> None:
        """Forget what is known of instances, as a controller that is rebuilt does; an index beside it goes by
        what that learns."""
        if self.fleet is None:
            return
        self.fleet = Fleet()
        for role in self.roles:
            if isinstance(role.role, Index):
                role.role.go_by(self.fleet)

    def reload(self) -> None:
        """Read policy, limits and certificates again; where one cannot be used, go on with all there are."""
        try:
            config, differ = with_limits_of(self.config, self._reread())
            policy = read_policy(Path(self.config.policy_file))
            valid = [
                check_certificate(Path(role.section.certificate_file), role.section.base_uri)
                for role in self.roles
            ]
            Credentials.reload_all(role.credentials for role in self.roles)
        except (KVSPError, OSError) as error:
            self._log.error("not reloaded", error=str(error))
            return
        if config.log.level != self.config.log.level:
            set_level(config.log.level)
        self.config, self.policy = config, policy
        for role, validity in zip(self.roles, valid, strict=True):
            role.request_log.everything = config.log.level == "debug"
            role.certificate.renew(validity)
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
        return next((f"{r.name}: {r.unready}" for r in self.roles if r.unready is not None), None)

    def deaf(self) -> str | None:
        """Return why the process is not healthy: its loop does not turn; or None."""
        silent = time.monotonic() - self._beat
        return f"the loop has not turned for {silent:.0f} s" if silent > _DEAF_S else None

    async def beat(self) -> None:
        """Show that the loop turns, and do what is due from time to time."""
        while True:
            self._beat = time.monotonic()
            now = datetime.datetime.now(datetime.UTC)
            for role in self.roles:
                role.expire()
                role.certificate.look(now)
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
        self.unfinished = tuple(role.name for role in self.roles if not role.is_safe_to_stop)
        for role in self.roles:
            if role.listener is not None:
                role.listener.shutdown()
        with anyio.move_on_after(CLOSE_S):
            while not self.hurried and any(r.listener is not None and r.listener.links for r in self.roles):
                await anyio.sleep(0.05)

    def say_end(self) -> None:
        """Say that nothing is left to hand over, or who had something left; once stores are closed."""
        if self.unfinished:
            self._log.warning("stopped with work left", roles=" ".join(self.unfinished))
        else:
            self._log.info("safe to stop")

    def close(self) -> None:
        """Close every role; blocks."""
        for role in self.roles:
            role.close()
        if self.exporting is not None:
            self.exporting.close()


@asynccontextmanager
async def running(
    config: Config,
    metrics: Metrics,
    reread: Callable[[], Config] | None = None,
    make_engine: MakeEngine | None = None,
) -> AsyncIterator[tuple[Process, Any]]:
    """Have a process, not started yet, on the running loop, with a group for its tasks; close it then.

    `reread` returns the configuration as it is in its file now.
    """
    async with open_loop() as (loop, network, tasks):
        process = Process(config, loop, network, metrics, reread or (lambda: config), make_engine)
        try:
            yield process, tasks
        finally:
            process.close()


async def _serve(
    config: Config,
    reread: Callable[[], Config] | None,
    started: Callable[[], None],
    make_engine: MakeEngine | None,
) -> str | None:
    metrics = Metrics()
    log = structlog.get_logger()
    async with running(config, metrics, reread, make_engine) as (process, tasks):
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
    process.say_end()
    return process.failure


def serve(
    config: Config,
    loop: LoopName | None = None,
    started: Callable[[], None] = lambda: None,
    *,
    reread: Callable[[], Config] | None = None,
    make_engine: MakeEngine | None = None,
) -> str | None:
    """Run the roles of a configuration until a signal; return why it gave up, or None.

    `started` is called once every role listens. `reread` returns the configuration as it is in its file now,
    for SIGHUP; without it only policy and certificates are read again. `make_engine` is given the descriptor
    of an instance's model and returns its engine, in place of the numpy engine; it is called again where the
    role is rebuilt.
    """
    chosen = loop or config.loop
    backend = "trio" if chosen == "trio" else "asyncio"
    options = {"use_uvloop": True} if chosen == "uvloop" else {}
    try:
        run = partial(_serve, config, reread, started, make_engine)
        return anyio.run(run, backend=backend, backend_options=options)
    except BaseExceptionGroup as group:
        raise _first_of(group) from None


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return what went wrong where that is an error that is said in a line, or an interrupt; else all."""
    known, other = group.split(_is_said_in_a_line)
    while isinstance(known, BaseExceptionGroup):
        known = known.exceptions[0]  # type: ignore[assignment]
    return group if other is not None or known is None else known


def _is_said_in_a_line(error: BaseException) -> bool:
    """Tell whether it is an error of ours, or that of a file: its name and what is wrong with it say all."""
    of_a_file = isinstance(error, OSError) and error.filename is not None
    return of_a_file or isinstance(error, KVSPError | KeyboardInterrupt)

"""Structured logs that show nothing of tenants (requirement SE-5).

Callers log names, counts and durations. Should a value that looks like a block key, digest, session, scope
or lease identifier get into an event all the same, it is replaced by a short mark: the same value has the
same mark within a process, so lines about one thing can still be found together, and nobody can compute the
value back. Ids of requests, which mean nothing, are shown as they are.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, TextIO, TypeAlias, cast

import structlog

from kvsp_core.errors import KVSPError

__all__ = ["REQUEST_ID", "Hider", "LogFormat", "LogLevel", "configure_logs", "said_of", "set_level"]

LogFormat: TypeAlias = Literal["json", "text"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

REQUEST_ID: Final = "request_id"
"""The key of a log line whose value is the id of the request that it is written for."""
_PLAIN_ID: Final = re.compile(r"[0-9a-f]{32}")
_SECRET: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"  # a UUID
    r"|(?<![0-9A-Za-z])[0-9a-fA-F]{32,}(?![0-9A-Za-z])"  # hex16, hex32 and longer
    r"|(?<![0-9A-Za-z_-])[A-Za-z0-9_-]{43}(?![0-9A-Za-z_-])",  # 32 octets in base64url: a component
)
_MAX_TEXT: Final = 1000
_MARK_DIGITS: Final = 8


def said_of(error: BaseException) -> str:
    """Return what may be said of an error: what the system or this project says of it. Of any other, whose
    text may hold a token or an id, its kind and where it was raised.
    """
    if isinstance(error, KVSPError) and str(error):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = type(error).__name__
    for frame, line in deque(traceback.walk_tb(error.__traceback__), maxlen=1):
        said += f" in {Path(frame.f_code.co_filename).name}, line {line}"
    return said


class Hider:
    """A processor of structlog that hides identifiers, octets and sequences in whatever is logged."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key if key is not None else os.urandom(32)

    def __call__(
        self, _logger: object, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Return the event with every value hidden that could tell something of a tenant."""
        for name, value in event.items():
            shown = name == REQUEST_ID and isinstance(value, str) and _PLAIN_ID.fullmatch(value)
            if name not in ("timestamp", "level") and not shown:
                event[name] = self.hidden(value)
        return event

    def hidden(self, value: object) -> object:
        """Return what may be logged in place of a value."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"<{len(value)} octets>"
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return f"<{len(value)} entries>"
        return self.hidden_text(str(value))

    def hidden_text(self, text: str) -> str:
        """Return a text, identifiers in it replaced by their marks."""
        return _SECRET.sub(self._mark, text[:_MAX_TEXT])

    def _mark(self, found: re.Match[str]) -> str:
        digest = hmac.digest(self._key, found[0].lower().encode(), "sha256")
        return f"<hidden {digest.hex()[:_MARK_DIGITS]}>"


def _timestamp_first(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Have lines begin with their time, so that those of many roles are brought into order by `sort`."""
    return {"timestamp": event.pop("timestamp"), **event}


def set_level(level: LogLevel) -> None:
    """Log what is of this level or worse from now on, by all loggers but those that were bound before."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())))


class _Lines:
    """Where lines go. What cannot be written, as on a full disk or with nobody reading, is lost: a process
    goes on without its log.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._output.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._output.flush()


def configure_logs(
    level: LogLevel = "info", form: LogFormat = "json", output: TextIO | None = None
) -> structlog.stdlib.BoundLogger:
    """Set up logging for a process, the standard library's included, and return its logger.

    Events go to standard error, one a line; one that cannot be written is lost. Other libraries log warnings
    and worse, through the same processors.
    """
    hider = Hider()
    shared: list[Callable[..., Any]] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _timestamp_first,
        hider,
    ]
    renderer: Any = structlog.processors.JSONRenderer()
    if form == "text":
        renderer = structlog.dev.ConsoleRenderer(colors=False)
    stream = cast("TextIO", _Lines(output if output is not None else sys.stderr))
    set_level(level)
    structlog.configure(
        processors=[*shared, renderer],
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logger: structlog.stdlib.BoundLogger = structlog.get_logger()
    return logger

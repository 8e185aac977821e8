"""Prometheus metrics of a process (requirement OP-1): what roles observe, and how long things took.

Roles name what they count, such as ``kvsp_holder_evictions``; here that gets the ending ``_total``.
Labels are few and fixed words: a label that would take many values, as an identifier does, is folded into
``other``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.roles.role import Observe

__all__ = ["MAX_LABEL_VALUES", "Metrics"]

MAX_LABEL_VALUES: Final = 32
"""Different values a label may take; further ones count under ``other``."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,80}")
_LABEL_VALUE: Final = re.compile(r"[a-zA-Z0-9_./: -]{0,64}")
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_OTHER: Final = "other"
_PREFIX: Final = "kvsp_"


class Metrics:
    """The metrics of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._label_values: dict[tuple[str, str], set[str]] = {}
        self._lock = threading.Lock()
        self.before_exposition: list[Callable[[], None]] = []
        """Called first when somebody asks for the metrics: they set gauges."""

    def observe(self, observed: Observe) -> None:
        """Count what a role observed."""
        labels = dict(observed.labels)
        with self._lock:
            name = _checked(observed.name).removesuffix("_total")
            counter = self._counters.get(name)
            if counter is None:
                counter = Counter(name, _sentence(name), tuple(labels), registry=self.registry)
                self._counters[name] = counter
            folded = {label: self._folded(name, label, value) for label, value in labels.items()}
        (counter.labels(**folded) if folded else counter).inc(observed.value)

    def count(self, name: str, value: int = 1, **labels: str) -> None:
        """Count something of the process's own."""
        self.observe(Observe(name, value, tuple(labels.items())))

    def set(self, name: str, value: float) -> None:
        """Set a gauge, such as ``connections``."""
        with self._lock:
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = Gauge(_checked(name), _sentence(name), registry=self.registry)
                self._gauges[name] = gauge
        gauge.set(value)

    def timer(self, name: str, **labels: str) -> Callable[[float], None]:
        """Return what adds a duration, in seconds, to the histogram ``kvsp_NAME_duration_seconds``."""
        with self._lock:
            histogram = self._histograms.get(name)
            if histogram is None:
                histogram = Histogram(
                    f"{_checked(name)}_duration_seconds",
                    f"{_sentence(name)}: how long it took.",
                    tuple(labels),
                    buckets=_SECONDS,
                    registry=self.registry,
                )
                self._histograms[name] = histogram
            folded = {label: self._folded(name, label, value) for label, value in labels.items()}
        return (histogram.labels(**folded) if folded else histogram).observe

    def _folded(self, metric: str, label: str, value: str) -> str:
        known = self._label_values.setdefault((metric, label), set())
        if value in known:
            return value
        if len(known) >= MAX_LABEL_VALUES or not _LABEL_VALUE.fullmatch(value):
            return _OTHER
        known.add(value)
        return value

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        for call in self.before_exposition:
            call()
        return generate_latest(self.registry)


def _checked(name: str) -> str:
    """Return the name of a metric with the prefix that all of them have."""
    if not _NAME.fullmatch(name):
        raise LocalProtocolError("a metric is named in lowercase letters, digits and underscores")
    return name if name.startswith(_PREFIX) else _PREFIX + name


def _sentence(name: str) -> str:
    return name.removeprefix(_PREFIX).replace("_", " ").capitalize()

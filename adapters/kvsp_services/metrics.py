"""Prometheus metrics of a process (requirement OP-1): what roles observe, and how long things took.

Roles name what they count, such as ``index_lookup_hits``; here it becomes ``kvsp_index_lookup_hits_total``.
Labels are few and fixed words: a label that would take many values, as an identifier does, is folded into
``other``.
"""

from __future__ import annotations

import re
import threading
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


class Metrics:
    """The metrics of one process. Safe to use from several threads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._label_values: dict[tuple[str, str], set[str]] = {}
        self._lock = threading.Lock()

    def observe(self, observed: Observe) -> None:
        """Count what a role observed."""
        labels = dict(observed.labels)
        with self._lock:
            counter = self._counters.get(observed.name)
            if counter is None:
                name = _checked(observed.name)
                counter = Counter(f"kvsp_{name}", _sentence(name), tuple(labels), registry=self.registry)
                self._counters[observed.name] = counter
            folded = {name: self._folded(observed.name, name, value) for name, value in labels.items()}
        (counter.labels(**folded) if folded else counter).inc(observed.value)

    def set(self, name: str, value: float) -> None:
        """Set a gauge, such as ``connections``."""
        with self._lock:
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = Gauge(f"kvsp_{_checked(name)}", _sentence(name), registry=self.registry)
                self._gauges[name] = gauge
        gauge.set(value)

    def took(self, name: str, seconds: float, **labels: str) -> None:
        """Add a duration to the histogram ``kvsp_NAME_duration_seconds``."""
        with self._lock:
            histogram = self._histograms.get(name)
            if histogram is None:
                histogram = Histogram(
                    f"kvsp_{_checked(name)}_duration_seconds",
                    f"{_sentence(name)}: how long it took.",
                    tuple(labels),
                    buckets=_SECONDS,
                    registry=self.registry,
                )
                self._histograms[name] = histogram
            folded = {label: self._folded(name, label, value) for label, value in labels.items()}
        (histogram.labels(**folded) if folded else histogram).observe(seconds)

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
        return generate_latest(self.registry)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise LocalProtocolError("a metric is named in lowercase letters, digits and underscores")
    return name


def _sentence(name: str) -> str:
    return name.replace("_", " ").capitalize()

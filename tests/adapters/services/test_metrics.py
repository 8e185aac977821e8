"""Metrics are named after what roles observe, and their labels stay few."""

from __future__ import annotations

import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.roles.role import Observe
from kvsp_services.metrics import MAX_LABEL_VALUES, Metrics


def shown(metrics: Metrics) -> list[str]:
    lines = metrics.exposition().decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_created" not in line]


@pytest.mark.requirement("OP-1")
def test_what_roles_observe_is_counted() -> None:
    metrics = Metrics()
    metrics.observe(Observe("kvsp_index_lookup_hits"))
    metrics.observe(Observe("index_lookup_hits", 3))
    metrics.observe(Observe("lookup_misses", 1, (("reason", "expired"),)))
    assert "kvsp_index_lookup_hits_total 4.0" in shown(metrics)
    assert 'kvsp_lookup_misses_total{reason="expired"} 1.0' in shown(metrics)


def test_durations_and_gauges() -> None:
    metrics = Metrics()
    metrics.timer("request", role="index")(0.003)
    metrics.set("connections", 7)
    assert 'kvsp_request_duration_seconds_count{role="index"} 1.0' in shown(metrics)
    assert "kvsp_connections 7.0" in shown(metrics)


@pytest.mark.requirement("SE-5")
def test_a_label_that_takes_too_many_values_is_folded() -> None:
    metrics = Metrics()
    for number in range(MAX_LABEL_VALUES + 50):
        metrics.observe(Observe("requests", 1, (("client", f"c{number}"),)))
    assert len(shown(metrics)) == MAX_LABEL_VALUES + 1
    assert 'kvsp_requests_total{client="other"} 50.0' in shown(metrics)
    metrics.observe(Observe("requests", 1, (("client", "c0"),)))
    assert 'kvsp_requests_total{client="c0"} 2.0' in shown(metrics)


def test_a_strange_name_is_refused_without_quoting_it() -> None:
    with pytest.raises(LocalProtocolError) as caught:
        Metrics().observe(Observe("9ca9d8b6-secret"))
    assert "9ca9d8b6" not in str(caught.value)

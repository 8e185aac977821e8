"""What an instance measures of itself."""

from __future__ import annotations

import pytest

from kvsp_core.limits import MAX_MEASURED_LINKS
from kvsp_core.records import Link
from kvsp_core.roles.instance_meter import Meter

H1 = "https://h1.example/kvsp/"


def meter(*links: Link, rate: int = 0) -> Meter:
    return Meter(prefill_tokens_per_s=rate, decode_tokens_per_s=rate, links=links)


@pytest.mark.requirement("PL-1")
def test_the_first_sample_is_the_rate_and_later_ones_move_it() -> None:
    measured = meter()
    measured.started(1, 500, 1000)
    measured.prefilled(1, 1500)
    assert measured.prefill_tokens_per_s == 1000
    measured.started(2, 500, 2000)
    measured.prefilled(2, 2250)
    assert measured.prefill_tokens_per_s == 1250
    measured.prefilled(2, 9000)
    measured.started(3, 500, 2000)
    measured.left(3)
    measured.prefilled(3, 9000)
    assert measured.prefill_tokens_per_s == 1250


def test_what_takes_no_time_on_this_clock_counts_as_a_millisecond() -> None:
    measured = meter()
    measured.started(1, 5, 1000)
    measured.prefilled(1, 1000)
    assert measured.prefill_tokens_per_s == 5000
    measured.fetched(H1, 2_000_000, 0)
    assert measured.links == (Link(holder=H1, mbit_per_s=16_000, rtt_us=0),)


def test_tokens_drawn_between_two_statuses_give_the_decode_rate() -> None:
    measured = meter(rate=100)
    measured.status_due(1000)
    measured.decoded(30)
    measured.decoded(30)
    measured.status_due(1200)
    assert measured.decode_tokens_per_s == 150
    measured.status_due(9000)
    assert measured.decode_tokens_per_s == 150


@pytest.mark.requirement("PL-1")
def test_links_start_from_what_is_configured() -> None:
    measured = meter(Link(holder=H1, mbit_per_s=1000, rtt_us=400))
    measured.fetched(H1, 1_000_000, 4)
    measured.answered(H1, 2)
    assert measured.links == (Link(holder=H1, mbit_per_s=1250, rtt_us=800),)


def test_the_link_heard_of_longest_ago_is_left_out() -> None:
    measured = meter()
    for number in range(MAX_MEASURED_LINKS + 1):
        measured.answered(f"https://h{number}.example/", 1)
    assert len(measured.links) == MAX_MEASURED_LINKS
    assert measured.links[0].holder == "https://h1.example/"

"""That a certificate is about to expire is said in good time, once a day, until another one is used."""

from __future__ import annotations

import datetime

from structlog.testing import CapturingLogger

from kvsp_services.certificate_watch import CertificateWatch
from kvsp_services.pki import Validity

BEGIN = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


def test_it_is_said_in_the_last_fifth_of_its_time_and_once_more_when_it_has_expired() -> None:
    log = CapturingLogger()
    watch = CertificateWatch(Validity(BEGIN, BEGIN + 10 * DAY), log)
    for hours in range(13 * 24):
        watch.look(BEGIN + hours * DAY / 24)
    assert [(call.method_name, call.kwargs.get("days_left")) for call in log.calls] == [
        ("warning", 2),
        ("warning", 1),
        ("error", None),
        ("error", None),
        ("error", None),
    ]
    assert log.calls[0].kwargs["until"] == "2030-01-11T00:00:00Z"


def test_of_a_long_time_the_last_thirty_days_are_early_enough() -> None:
    assert Validity(BEGIN, BEGIN + 365 * DAY).warn_from == BEGIN + 335 * DAY


def test_what_is_not_used_any_more_is_not_spoken_of() -> None:
    log = CapturingLogger()
    watch = CertificateWatch(Validity(BEGIN, BEGIN + 10 * DAY), log)
    watch.renew(Validity(BEGIN + 7 * DAY, BEGIN + 17 * DAY))
    watch.look(BEGIN + 12 * DAY)
    assert not watch.has_expired(BEGIN + 12 * DAY)
    assert log.calls == []

"""Says in good time that a certificate in use is about to expire: its role's peers refuse it from then on."""

from __future__ import annotations

import datetime
from typing import Any, Final

from kvsp_services.pki import Validity

__all__ = ["CertificateWatch"]

_AGAIN: Final = datetime.timedelta(days=1)


class CertificateWatch:
    """Watches the certificate that a role uses; `log` takes a line at most once a day."""

    def __init__(self, validity: Validity, log: Any) -> None:
        self._log = log
        self.renew(validity)

    def renew(self, validity: Validity) -> None:
        """Watch the certificate that is used from now on instead."""
        self.until = validity.until
        self._next = validity.warn_from

    def look(self, now: datetime.datetime) -> None:
        """Say what there is to say."""
        if now < self._next:
            return
        said = {"until": f"{self.until:%Y-%m-%dT%H:%M:%SZ}", "advice": "issue it anew and send SIGHUP"}
        if self.has_expired(now):
            self._next = now + _AGAIN
            self._log.error("certificate has expired", **said)
        else:
            self._next = min(now + _AGAIN, self.until)
            self._log.warning("certificate expires soon", days_left=(self.until - now).days, **said)

    def has_expired(self, now: datetime.datetime) -> bool:
        """Return whether peers refuse it."""
        return now >= self.until

"""A certificate that is renewed while its owner runs: engines live longer than certificates."""

from __future__ import annotations

import logging

from kvsp_core.errors import KVSPError
from kvsp_h2 import Credentials, TLSConnection

__all__ = ["FollowedCredentials"]

logger = logging.getLogger("kvsp.client")


class FollowedCredentials:
    """Opens connections with what the files of `credentials` hold when each is opened.

    What is there and cannot be used, such as a certificate whose key has not been written yet, is said once,
    and those of before are used. Connections that are open go on until the other side closes them in order,
    which it does when a certificate expires.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._said = ""

    def dial(self, base_uri: str) -> TLSConnection:
        """Return the client's end of a new connection, as `Credentials.dial` does."""
        try:
            self._credentials.renew()
            self._said = ""
        except (KVSPError, OSError) as error:
            if str(error) != self._said:
                logger.warning("the renewed certificate is not used, that of before is: %s", error)
            self._said = str(error)
        return self._credentials.dial(base_uri)

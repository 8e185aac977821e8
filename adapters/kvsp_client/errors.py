"""What goes wrong for whoever uses the client; docs/client.md says of each what to do."""

from __future__ import annotations

from kvsp_core.errors import KVSPError
from kvsp_core.problems import Problem

__all__ = ["ClientClosed", "ClientError", "LayersWithdrawn", "Refused", "Unavailable"]


class ClientError(KVSPError):
    """The base of what the client raises on account of peers or of its own state."""


class Unavailable(ClientError):
    """A role cannot be reached, did not answer in time, or not as the protocol says."""


class Refused(ClientError):
    """A role refused a request; `problem` is what it answered."""

    def __init__(self, base_uri: str, problem: Problem) -> None:
        super().__init__(f"{base_uri}: {problem.status} {problem.detail or problem.type.title}")
        self.problem = problem


class ClientClosed(ClientError):
    """The client was closed, or belongs to the process that this one was forked from."""


class LayersWithdrawn(ClientError):
    """Layers that had been usable are not any more: what was computed from them is to be computed again.

    `blocks` are the blocks concerned.
    """

    def __init__(self, blocks: tuple[int, ...]) -> None:
        super().__init__(
            f"layers of {len(blocks)} blocks were withdrawn after use; compute again what came of them"
        )
        self.blocks = blocks

"""What the connector is measured against: the same, with blocks in local files instead of a cache server.

No network, no encryption, no digests, and the files are in the page cache: what is left of a load is what
vLLM and the copy into its cache take. ``kv_connector_module_path`` is ``tests.vllm.file_connector``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from kvsp_client import PrefixKeys
from kvsp_client.vllm import connector

__all__ = ["KVSPConnector"]

DIRECTORY = Path(os.environ.get("KVSP_BENCH_FILES", "."))
Sections = Callable[[int, int], Any]


@attrs.frozen
class _Found:
    keys: PrefixKeys

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, start: int, stop: int) -> _Found:
        return _Found(self.keys.part(start, stop))


@attrs.frozen
class _Fetched:
    blocks: int
    withdrawn: tuple[int, ...] = ()
    misses: tuple[Any, ...] = ()

    def wait_layer(self, layer: int) -> int:
        return self.blocks

    def result(self) -> _Fetched:
        return self


@attrs.frozen
class _Stored:
    stored: int
    present: int = 0
    failed: tuple[Any, ...] = ()
    done: bool = True

    def result(self, timeout_s: float | None = None) -> _Stored:
        return self


class FileClient:
    """The calls of `BlockingClient` that the connector makes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def lookup(self, keys: PrefixKeys) -> _Found:
        found = 0
        while found < len(keys) and (DIRECTORY / keys.keys[found]).exists():
            found += 1
        return _Found(keys.part(0, found))

    def start_fetch(self, prefix: _Found, sections: Sections, deadline_ms: int) -> _Fetched:
        for block, key in enumerate(prefix.keys.keys):
            with (DIRECTORY / key).open("rb", buffering=0) as file:
                pieces = [
                    side for layer in range(prefix.keys.descriptor.layers) for side in sections(block, layer)
                ]
                assert os.readv(file.fileno(), pieces) == sum(memoryview(piece).nbytes for piece in pieces)
        return _Fetched(len(prefix))

    def start_store(self, holder: str, keys: PrefixKeys, sections: Sections) -> _Stored:
        for block, key in enumerate(keys.keys):
            with (DIRECTORY / key).open("wb") as file:
                for layer in range(keys.descriptor.layers):
                    for side in sections(block, layer):
                        file.write(side)
        return _Stored(len(keys))

    def close(self) -> None:
        pass


connector.BlockingClient = FileClient  # type: ignore[assignment, misc]
KVSPConnector = connector.KVSPConnector

"""The registries of the protocol (section "KVSP Registries", requirement RG-1).

A `Registry` is a value: adding an entry gives a new registry, which the embedder hands to whatever reads with
it, so two embedders in one process never disturb each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from kvsp_core.errors import LocalProtocolError

__all__ = ["Registry"]

Key = TypeVar("Key")
Entry = TypeVar("Entry")


class Registry(Mapping[Key, Entry], Generic[Key, Entry]):
    """An immutable table of registered names or numbers and what each stands for."""

    def __init__(self, title: str, entries: Mapping[Key, Entry]) -> None:
        self.title = title
        self._entries = MappingProxyType(dict(entries))

    def __getitem__(self, key: Key) -> Entry:
        return self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<Registry {self.title}: {len(self)} entries>"

    def with_entry(self, key: Key, entry: Entry) -> Registry[Key, Entry]:
        """Return a registry that has one entry more. A key that is already there is an error."""
        if key in self._entries:
            raise LocalProtocolError(f"{self.title}: {key!r} is registered already; choose another")
        return Registry(self.title, {**self._entries, key: entry})

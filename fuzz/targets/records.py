"""Records and messages: any octets, read as any of them, give a value that survives writing, or the
documented error.
"""

from __future__ import annotations

import importlib.util
import inspect
from types import ModuleType

import attrs

from kvsp_core.bodies import decode, encode
from kvsp_core.errors import RemoteProtocolError


def _classes(module: ModuleType) -> list[type]:
    return [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and attrs.has(kind) and kind.__name__ in module.__all__
    ]


def _all_kinds() -> list[type]:
    names = ("kvsp_core.records", "kvsp_core.messages", "kvsp_core.ext_messages")
    modules = [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]
    return sorted((kind for module in modules for kind in _classes(module)), key=lambda kind: kind.__name__)


KINDS = _all_kinds()
_HEX32, _HEX16, _DIGEST = b'"' + b"ab" * 32 + b'"', b'"' + b"0f" * 16 + b'"', b'"sha-256:' + b"cd" * 32 + b'"'
_BODIES = (
    b'{"block_key": %b, "compat_id": %b, "scope_id": %b, "holder": "https://h.example/k/", "codec": 1,'
    b' "digest": %b, "layer_digests": [%b], "residency": [{"tier": "host", "layers": [0, 0]}], "size": 4096,'
    b' "ttl_ms": 1000}' % (_HEX32, _HEX32, _HEX16, _DIGEST, _HEX32),
    b'{"session": "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11", "epoch": 1, "compat_id": %b, "scope_id": %b,'
    b' "prompt_blocks": [%b], "prompt_tail": [374, 264], "generated": [1], "output_offset": 1, "sampler":'
    b' {"method": "top-p", "params": {"p": 0.9}, "seed": 7, "step": 1, "deterministic": false}}'
    % (_HEX32, _HEX16, _HEX32),
    b'{"map": "m", "version": 4, "shards": [{"tokens": [0, 32], "instance": "https://i.example/k/"}]}',
    b'{"scope_id": %b, "compat_id": %b, "block_keys": [%b], "targets": [], "ttl_ms": 5, "state": "active"}'
    % (_HEX16, _HEX32, _HEX32),
    b'{"a": ' + b"[" * 3000,
    b'{"ttl_ms": 1e999, "ttl_ms": -0}',
)
SEEDS = tuple(bytes([number]) + body for number, _ in enumerate(KINDS) for body in _BODIES)


def one_input(data: bytes) -> None:
    """Read the octets as the class that the first one picks; write what was read, and read it again."""
    if not data:
        return
    kind = KINDS[data[0] % len(KINDS)]
    try:
        value = decode(kind, data[1:])
    except RemoteProtocolError as error:
        if len(str(error)) > 1000 or "\n" in str(error):
            raise AssertionError("an error is not one plain line") from error
        return
    octets = encode(value)
    assert decode(kind, octets) == value
    assert encode(decode(kind, octets)) == octets

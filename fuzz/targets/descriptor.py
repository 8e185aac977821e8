"""Compatibility Descriptors: any octets give a descriptor or the documented error, and one ID for one
meaning.
"""

from __future__ import annotations

import json

from kvsp_core.errors import LimitExceeded, RemoteProtocolError
from kvsp_core.identity import CompatibilityDescriptor

_MEMBERS = {
    "model": "m",
    "model_digest": "sha-256:" + "0" * 64,
    "tokenizer_digest": "sha-256:" + "f" * 64,
    "layers": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "kv_dtype": "bf16",
    "positional": "rope;theta=10000,scaling=yarn",
    "block_tokens": 16,
    "layout": "kvsp-layout-1",
}
SEEDS = (
    json.dumps(_MEMBERS).encode(),
    json.dumps(
        _MEMBERS | {"adapters": ["sha-256:" + "1" * 64], "ext": {"a": [1.5, None, "\u00e9"]}}
    ).encode(),
    json.dumps(_MEMBERS).encode().replace(b"2,", b'2, "layers": 3,'),
    b'{"layers": NaN}',
    b"[" * 5000,
)


def one_input(data: bytes) -> None:
    """Parse; where it parses, the canonical form parses to the same descriptor and the same ID."""
    try:
        descriptor = CompatibilityDescriptor.from_json(data)
    except (RemoteProtocolError, LimitExceeded):
        return
    canonical = descriptor.canonical_json
    again = CompatibilityDescriptor.from_json(canonical)
    assert again.compat_id == descriptor.compat_id
    assert again.canonical_json == canonical

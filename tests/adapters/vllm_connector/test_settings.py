"""``kv_connector_extra_config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsp_client.vllm.settings import read_settings
from kvsp_core.errors import LocalProtocolError


@pytest.fixture
def extra(tmp_path: Path) -> dict[str, Any]:
    files = {}
    for key in ("certificate_file", "key_file", "authorities_file", "scope_key_file"):
        path = tmp_path / key
        path.write_bytes(b"x")
        files[key] = str(path)
    return {"index": "https://index.example/kvsp/", "cache_server": "https://cache.example/kvsp/"} | files


def test_what_is_left_out_has_a_default(extra: dict[str, Any]) -> None:
    found = read_settings(extra)
    assert found.index == extra["index"]
    assert found.descriptor_files == ()
    assert found.load_timeout_ms == 5_000


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"index": None}, "index"),
        ({"index": "http://index.example/kvsp/"}, "index"),
        ({"cache_server": "https://cache.example"}, "cache_server"),
        ({"load_timeout_ms": "5000"}, "load_timeout_ms"),
        ({"load_timeout_ms": 0}, "load_timeout_ms"),
        ({"store_queue_bytes": True}, "store_queue_bytes"),
        ({"scope_key": "x"}, r"scope_key: unknown; did you mean scope_key_file\?$"),
        ({"cash_server": "x"}, r"cash_server: unknown; did you mean cache_server\?$"),
        ({"zzz": 1}, "zzz: unknown; known are authorities_file, cache_server, "),
        ({"key_file": "/nowhere/x.key"}, "key_file: there is no file"),
        ({"descriptor_files": ["/nowhere/d.json"]}, r"descriptor_files\[0\]"),
        ({"descriptor_files": "d.json"}, "descriptor_files"),
    ],
)
def test_a_mistake_is_named_in_one_line(extra: dict[str, Any], changed: dict[str, Any], named: str) -> None:
    with pytest.raises(LocalProtocolError, match=f"^kv_connector_extra_config: .*{named}") as refused:
        read_settings(extra | changed)
    assert "\n" not in str(refused.value)


def test_a_missing_key_is_named(extra: dict[str, Any]) -> None:
    del extra["cache_server"]
    with pytest.raises(LocalProtocolError, match="cache_server"):
        read_settings(extra)

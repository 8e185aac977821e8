"""vLLM reuses prefixes across instances and restarts through KVSP, by one option (``docs/vllm.md``).

    --kv-transfer-config '{"kv_connector": "KVSPConnector", "kv_connector_module_path": "kvsp_client.vllm",
    ...}'

`layout`, `engine_descriptor`, `settings` and `schedule` decide and need neither vLLM nor torch; `transfers`
moves the octets; `connector` is the class that vLLM loads.
"""

from __future__ import annotations

from typing import Any

__all__: list[str] = []  # `KVSPConnector` is there where vLLM is, and is imported when it is asked for


def __getattr__(name: str) -> Any:
    """Import the connector, and vLLM with it, when it is first asked for."""
    if name == "KVSPConnector":
        from kvsp_client.vllm.connector import KVSPConnector

        return KVSPConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

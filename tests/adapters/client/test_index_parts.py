"""A client and a cache server with an index in two parts."""

from __future__ import annotations

import anyio
import pytest

from kvsp_client import Client, Unavailable
from kvsp_client.testing import serve_cache
from kvsp_core.errors import LocalProtocolError
from tests.adapters.client.scripted import content, keys_of
from tests.adapters.client.worlds import KINDS, found


@pytest.mark.requirement("OP-3", "LK-1", "PB-3")
@pytest.mark.parametrize("kind", ["asyncio", "trio"])
def test_blocks_are_published_at_two_indexes_and_found_through_both(kind: str) -> None:
    with serve_cache(indexes=2) as served:
        keys, stored = keys_of(served, f"parts {kind}", 12), content(12)

        async def main() -> None:
            with anyio.fail_after(60):
                async with Client(served.credentials, index=served.index_uris) as client:
                    assert (await client.store(served.cache_uri, keys, stored.sections)).complete
                    assert len(await found(client, keys)) == 12
                for uri in served.index_uris:
                    async with Client(served.credentials, index=uri) as client:
                        alone = await client.lookup(keys)
                        assert len(alone) < 12
                served.stop_serving(served.index_uris[1])
                async with Client(served.credentials, index=served.index_uris) as client:
                    with pytest.raises(Unavailable):
                        await client.lookup(keys)

        backend, options = KINDS[kind]
        anyio.run(main, backend=backend, backend_options=options)


def test_a_client_needs_an_index() -> None:
    with serve_cache() as served, pytest.raises(LocalProtocolError, match="name the base URI of the index"):
        Client(served.credentials, index=())

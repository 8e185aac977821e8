"""Whether a prefetch delays a request that is being served: the gaps between its tokens with and without.

Real processes: an instance decodes for a user, and is told meanwhile to load the blocks of documents that
another instance has computed. The gaps are those that the user sees at the front end.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, quantiles
from string import ascii_lowercase

import openai

from kvsp_core.block_keys import block_keys
from kvsp_core.messages import DirectiveStatus, PrefetchBlock, PrefetchDirective
from kvsp_core.resources import GetDirective, PrefetchBlocks
from kvsp_engines.prepare import prepare_tiny
from kvsp_engines.text import TextCodec
from kvsp_services.asking import expect_success
from kvsp_services.demo.cluster import INSTANCES, Cluster, wait_until
from tests.bench import Row, row

__all__ = ["rows"]

CONTEXT = 4096
OUTPUT = 1_500
DOCUMENTS = 12
"""Each is loaded by a directive of its own, while one output runs; between them nothing is loaded."""
DOCUMENT_TOKENS = 3_000
WAIT_S = 120


def rows() -> Iterator[Row]:
    """Yield the gaps between tokens without a prefetch, and by how much they grow with one."""
    with tempfile.TemporaryDirectory(prefix="kvsp-bench-") as directory:
        model = Path(directory) / "tiny"
        prepare_tiny(model, context=CONTEXT)
        with Cluster(Path(directory) / "cluster", model) as cluster:
            without, during, blocks = _measure(cluster)
    yield row("prefetch.blocks_loaded_meanwhile", blocks, "blocks")
    yield row("prefetch.gaps_measured_meanwhile", len(during), "gaps")
    yield row("prefetch.token_gap_without", 1000 * fmean(without), "ms")
    yield row("prefetch.token_gap_with", 1000 * fmean(during), "ms")
    yield row("prefetch.token_gap.with_vs_without", fmean(during) / fmean(without), "ratio")
    last = [quantiles(gaps, n=100)[-1] for gaps in (during, without)]
    yield row("prefetch.token_gap_p99.with_vs_without", last[0] / last[1], "ratio")


def _measure(cluster: Cluster) -> tuple[list[float], list[float], int]:
    """Return the gaps without a prefetch and during one, and how many blocks were loaded."""
    source, target = INSTANCES[:2]
    codec = TextCodec(cluster.model_dir)
    documents = [f"{letter} " * (DOCUMENT_TOKENS // 2) for letter in ascii_lowercase[:DOCUMENTS]]
    _only(cluster, source)
    for document in documents:
        _answer(cluster, document, 1)
    directives = [
        _directive(cluster, source, codec, document, number) for number, document in enumerate(documents)
    ]
    _only(cluster, target)
    times: list[float] = []
    spans: list[tuple[float, float]] = []
    user = threading.Thread(target=_answer, args=(cluster, "a", OUTPUT, times))
    user.start()
    wait_until(lambda: len(times) > OUTPUT // 10, WAIT_S, "the first tokens")
    for directive in directives:
        if not user.is_alive():
            break
        began = time.monotonic()
        _load(cluster, target, directive)
        spans.append((began, time.monotonic()))
        time.sleep(spans[-1][1] - began)  # as long without a prefetch
    user.join()
    without, during = [], []
    for before, after in itertools.pairwise(times):
        (during if any(began < after and before < end for began, end in spans) else without).append(
            after - before
        )
    return without, during, sum(len(directive.blocks) for directive in directives[: len(spans)])


def _only(cluster: Cluster, name: str) -> None:
    for each in INSTANCES:
        cluster.ask_state(each, "active" if each == name else "draining")
    cluster.wait_active([name], WAIT_S)


def _answer(cluster: Cluster, text: str, tokens: int, times: list[float] | None = None) -> None:
    """Have a text continued; note when each piece comes."""
    client = openai.OpenAI(api_key="-", base_url=cluster.api_url, max_retries=0, timeout=WAIT_S)
    stream = client.completions.create(
        model=cluster.model_dir.name, prompt=text, max_tokens=tokens, temperature=0.7, seed=1, stream=True
    )
    for _ in stream:
        if times is not None:
            times.append(time.monotonic())


def _directive(
    cluster: Cluster, source: str, codec: TextCodec, document: str, number: int
) -> PrefetchDirective:
    keys, _ = block_keys(cluster.scope, cluster.descriptor, codec.encode(document))
    wanted = [key.hex() for key in keys]
    wait_until(lambda: cluster.found(wanted) == len(wanted), WAIT_S, "the blocks to be published")
    return PrefetchDirective(
        directive=f"{number:032x}",
        scope_id=cluster.scope.scope_id,
        compat_id=cluster.descriptor.compat_id,
        blocks=tuple(PrefetchBlock(block_key=key, sources=(cluster.uris[source],)) for key in wanted),
        deadline_ms=WAIT_S * 1000,
        lease_ms=30_000,
    )


def _load(cluster: Cluster, target: str, directive: PrefetchDirective) -> None:
    """Have an instance load blocks ahead, and wait until it has."""
    controller, uri = cluster.as_("controller"), cluster.uris[target]
    expect_success(uri, controller.ask(uri, PrefetchBlocks(), directive))

    def over() -> bool:
        status = controller.ask_for(DirectiveStatus, uri, GetDirective(directive.directive))
        return status.state != "pending"

    wait_until(over, WAIT_S, "the blocks to be loaded")

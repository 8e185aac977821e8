"""Whether a prefetch delays a request that is being served: the gaps between its tokens with and without.

Real processes: an instance is told to load the blocks of documents that another instance has computed, first
while nobody wants anything of it, then while it decodes for a user. The gaps are those that the user sees at
the front end; the sampler is greedy, so that no token waits for a checkpoint.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean, quantiles
from string import ascii_lowercase

import attrs
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
OUTPUT = 3_000
PROMPT = "q"
"""A greedy output of the tiny model that goes on for long."""
DOCUMENTS = 9
"""Each is loaded by a directive of its own; between those while the output runs nothing is loaded."""
ALONE = 3
"""How many of them are loaded before the output begins."""
DOCUMENT_TOKENS = 1_500
WAIT_S = 120


@attrs.frozen
class _Measured:
    without: list[float]
    """Seconds between tokens while nothing is loaded."""
    during: list[float]
    alone: float
    """Seconds for a block while nobody decodes."""
    meanwhile: float
    blocks: int
    """How many were loaded meanwhile."""


def rows() -> Iterator[Row]:
    """Yield the gaps between tokens without a prefetch, and by how much they grow with one."""
    with tempfile.TemporaryDirectory(prefix="kvsp-bench-") as directory:
        model = Path(directory) / "tiny"
        prepare_tiny(model, context=CONTEXT)
        with Cluster(Path(directory) / "cluster", model) as cluster:
            measured = _measure(cluster)
    yield row("prefetch.blocks_loaded_meanwhile", measured.blocks, "blocks")
    yield row("prefetch.gaps_measured_meanwhile", len(measured.during), "gaps")
    without, during = _figures(measured.without), _figures(measured.during)
    for name in without:
        yield row(f"prefetch.token_gap_{name}_without", 1000 * without[name], "ms")
        yield row(f"prefetch.token_gap_{name}_with", 1000 * during[name], "ms")
        yield row(f"prefetch.token_gap_{name}.with_vs_without", during[name] / without[name], "ratio")
    yield row("prefetch.block_alone", 1000 * measured.alone, "ms")
    yield row("prefetch.block_meanwhile", 1000 * measured.meanwhile, "ms")
    yield row("prefetch.block.meanwhile_vs_alone", measured.meanwhile / measured.alone, "ratio")


def _figures(gaps: list[float]) -> dict[str, float]:
    cuts = quantiles(gaps, n=100)
    return {"mean": fmean(gaps), "p50": cuts[49], "p99": cuts[98]}


def _measure(cluster: Cluster) -> _Measured:
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
    alone = [_load(cluster, target, directive) for directive in directives[:ALONE]]
    times: list[float] = []
    spans: list[tuple[float, float]] = []
    user = threading.Thread(target=_answer, args=(cluster, PROMPT, OUTPUT, times))
    user.start()
    wait_until(lambda: len(times) > OUTPUT // 20, WAIT_S, "the first tokens")
    for directive in directives[ALONE:]:
        span = _load(cluster, target, directive)
        if not user.is_alive():
            break
        spans.append(span)
        time.sleep(span[1] - span[0])  # as long without a prefetch
    user.join()
    blocks = [len(directive.blocks) for directive in directives]
    meanwhile = blocks[ALONE : ALONE + len(spans)]
    without: list[float] = []
    during: list[float] = []
    for before, after in itertools.pairwise(times):
        (during if any(began < after and before < end for began, end in spans) else without).append(
            after - before
        )
    return _Measured(
        without=without,
        during=during,
        alone=_seconds(alone) / sum(blocks[:ALONE]),
        meanwhile=_seconds(spans) / sum(meanwhile),
        blocks=sum(meanwhile),
    )


def _seconds(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - began for began, end in spans)


def _only(cluster: Cluster, name: str) -> None:
    for each in INSTANCES:
        cluster.ask_state(each, "active" if each == name else "draining")
    cluster.wait_active([name], WAIT_S)


def _answer(cluster: Cluster, text: str, tokens: int, times: list[float] | None = None) -> None:
    """Have a text continued; note when each piece comes."""
    client = openai.OpenAI(api_key="-", base_url=cluster.api_url, max_retries=0, timeout=WAIT_S)
    stream = client.completions.create(
        model=cluster.model_dir.name, prompt=text, max_tokens=tokens, temperature=0, stream=True
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


def _load(cluster: Cluster, target: str, directive: PrefetchDirective) -> tuple[float, float]:
    """Have an instance load blocks ahead, wait until it has, and return when that began and was over."""
    controller, uri = cluster.as_("controller"), cluster.uris[target]
    began = time.monotonic()
    expect_success(uri, controller.ask(uri, PrefetchBlocks(), directive))

    def over() -> bool:
        status = controller.ask_for(DirectiveStatus, uri, GetDirective(directive.directive))
        return status.state != "pending"

    wait_until(over, WAIT_S, "the blocks to be loaded")
    return began, time.monotonic()

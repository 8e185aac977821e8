"""Retrieval from holders that miss, lie, break off and differ: only verified layers of one version count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.container import ContainerHeader
from kvsp_core.machines import retrieval as m
from kvsp_sim import facts
from kvsp_sim.properties import OnlyVerifiedBlocks
from kvsp_sim.strategies.prefetch import (
    BLOCK_KEYS,
    BLOCK_TOKENS,
    COMPAT_ID,
    LAYERS,
    SCOPE_ID,
    layer_digests,
    replicas,
)

VERSIONS = {digest: version for version in ("a", "b") for digest in layer_digests(version)}


def answers(data: st.DataObject, fetch: m.Fetch) -> list[m.Event]:
    """What a holder, honest or not, answers a fetch with; the last event ends it."""
    first, last = fetch.layers or (0, LAYERS - 1)
    what = data.draw(st.sampled_from(["a", "a", "b", "lie", "lie late", "miss", "broken", "cut off"]))
    if what == "miss":
        return [m.Refused(fetch.fetch, data.draw(st.sampled_from([403, 404, 500, 302, 204])))]
    if what == "broken":
        return [m.FetchFailed(fetch.fetch)]
    version = "b" if what == "b" else "a"
    served = list(layer_digests(version)[first : last + 1])
    if what in ("lie", "lie late"):
        served[0 if what == "lie" else -1] = "00" * 32
    layers: list[m.Event] = []
    together = data.draw(st.integers(1, LAYERS))
    for n in range(0, len(served), together):
        layers.append(m.LayersArrived(fetch.fetch, first + n, tuple(served[n : n + together])))
    if what == "cut off":
        return [*layers[: data.draw(st.integers(0, len(layers)))], m.FetchFailed(fetch.fetch)]
    end = m.BlockEnded(
        fetch=fetch.fetch,
        header=ContainerHeader(
            codec=1, first_layer=first, token_count=BLOCK_TOKENS, sections=((512, 512),) * len(served)
        ),
        layer_digests=tuple(served),
        repr_digest_valid=data.draw(st.sampled_from([True, True, True, False])),
    )
    return [*layers, end]


@given(st.data(), st.lists(replicas(), max_size=5))
def test_a_retrieval_ends_and_uses_only_what_was_verified(data: st.DataObject, records: list[object]) -> None:
    machine = m.Retrieval(
        records,  # type: ignore[arg-type]
        block_key=BLOCK_KEYS[0],
        compat_id=COMPAT_ID,
        scope_id=SCOPE_ID,
        layers=LAYERS,
        block_tokens=BLOCK_TOKENS,
    )
    only_verified = OnlyVerifiedBlocks()
    arrived: dict[tuple[int, int], str] = {}
    usable: dict[tuple[int, int], str] = {}
    streams: dict[int, list[m.Event]] = {}
    fetches = 0

    def execute(effects: tuple[m.Effect, ...]) -> m.Done | m.GiveUp | None:
        nonlocal fetches
        outcome: m.Done | m.GiveUp | None = None
        for effect in effects:
            match effect:
                case m.Fetch(fetch=number):
                    fetches += 1
                    streams[number] = answers(data, effect)
                case m.CancelFetch(number):
                    streams.pop(number)
                case m.LayersUsable(number, layers):
                    for layer in layers:
                        assert (number, layer) not in usable
                        usable[number, layer] = arrived[number, layer]
                case m.LayersWithdrawn(number, layers):
                    for layer in layers:
                        del usable[number, layer]
                case m.Done() | m.GiveUp():
                    assert outcome is None
                    outcome = effect
                case m.ReportBad(holder, digest):
                    assert any((r.holder, r.digest) == (holder, digest) for r in records)  # type: ignore[attr-defined]
        return outcome

    outcome = execute(machine.handle(m.Start(), 0))
    while streams:
        number = data.draw(st.sampled_from(sorted(streams)))
        event = streams[number].pop(0)
        if not streams[number]:
            del streams[number]
        match event:
            case m.LayersArrived(fetch, first, digests):
                arrived.update({(fetch, n): digest for n, digest in enumerate(digests, first)})
            case m.BlockEnded(fetch=fetch, header=header, layer_digests=digests):
                arrived.update({(fetch, n): d for n, d in zip(header.layers, digests, strict=True)})
        outcome = execute(machine.handle(event, 0)) or outcome
        used = [VERSIONS.get(digest) for _, digest in sorted((n, d) for (_, n), d in usable.items())]
        only_verified.observe(facts.LayersUsed(instance="i", layers=tuple(used)))
        frozen = machine.freeze(0)
        assert m.Retrieval.thaw(frozen, 0).freeze(0) == frozen
    assert outcome is not None, "the retrieval does not end"
    if isinstance(outcome, m.Done):
        layers = [n for part in outcome.parts for n in range(part.layers[0], part.layers[1] + 1)]
        assert layers == list(range(LAYERS))
        assert {
            (part.fetch, n) for part in outcome.parts for n in range(part.layers[0], part.layers[1] + 1)
        } == set(usable)
    else:
        assert usable == {}
    assert fetches <= 4 * len(records)

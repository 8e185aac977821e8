"""Every odd and wrong sequence of frames has the reaction that its table says; see `server_cases`."""

from __future__ import annotations

import pytest

from kvsp_core.heads import Response
from kvsp_h2 import BodyEnded, Event, RequestReceived
from kvsp_h2.frames import PREFACE
from tests.adapters.h2.pair import Raw, frame, read_frames, settings
from tests.adapters.h2.server_cases import LAST_PING, PING, Case, Reaction, build

CASES = build()


def react(sent: Case) -> Reaction:
    """Give the frames of a case to our server, one by one where they can be told apart."""
    raw = Raw(greet=False)
    held = set()

    def answer(event: Event) -> None:
        whole = isinstance(event, BodyEnded) or (isinstance(event, RequestReceived) and event.ended)
        if isinstance(event, RequestReceived) and event.request.query == "hold":
            held.add(event.stream_id)
        if whole and event.stream_id not in held:
            raw.end.http.respond(event.stream_id, Response(status=200, content_length=100), bytes(100))

    raw.end.on_event = answer
    frames = [] if sent.raw else raw.send(PREFACE + settings())
    pieces = [sent.octets] if sent.raw else split(sent.octets)
    for piece in [*pieces, frame(PING, 0, 0, LAST_PING)]:
        frames += raw.send(piece)
    return Reaction(tuple(frames), raw.end.http.ended)


def split(octets: bytes) -> list[bytes]:
    pieces = []
    while octets:
        size = 9 + int.from_bytes(octets[:3], "big")
        pieces.append(octets[:size])
        octets = octets[size:]
    return pieces


@pytest.mark.requirement("HT-3")
@pytest.mark.parametrize("sent", CASES, ids=lambda c: f"{c.section}: {c.name}")
def test_frames_have_the_reaction_of_the_table(sent: Case) -> None:
    reaction = react(sent)
    assert sent.expect.exact(reaction), (reaction.goaway(), reaction.frames[-6:])
    assert sent.expect.allows(reaction)


def test_the_table_is_large_enough_and_its_names_differ() -> None:
    assert len(CASES) >= 140
    assert len({(c.section, c.name) for c in CASES}) == len(CASES)
    assert read_frames(b"") == []

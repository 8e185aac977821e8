"""Strategies for the events of the output gate and of the output assembly.

Values of tokens come from a sample, so that what arrives agrees with itself unless it is meant not to.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from kvsp_core.machines import assembly, output
from kvsp_core.problems import NOT_FOUND, STALE_EPOCH, Problem

__all__ = ["arrivals", "checkpoint_answers", "stream_events", "token_runs"]

token_runs = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70).map(tuple)
"""What an engine draws at a time: mostly few tokens, at times more than a checkpoint covers."""


def checkpoint_answers(epoch: int, asked: int | None) -> st.SearchStrategy[output.Event]:
    """Return what a controller may answer a checkpoint at this offset with, late or early offsets too."""
    offsets = st.integers(0, 200) if asked is None else st.sampled_from((asked, asked, max(0, asked - 1)))
    return st.one_of(
        st.builds(output.CheckpointAcknowledged, st.just(epoch), offsets),
        st.just(output.CheckpointFailed()),
        st.sampled_from((Problem(STALE_EPOCH), Problem(NOT_FOUND))).map(output.CheckpointRefused),
    )


def stream_events(most: int = 200) -> st.SearchStrategy[output.Event]:
    """Return what streams do: attach anywhere, take what they have, go."""
    return st.one_of(
        st.builds(output.Attached, st.integers(0, most)),
        st.just(output.StreamReady()),
        st.just(output.Detached()),
    )


def arrivals(sample: Callable[[int], int], most: int = 12) -> st.SearchStrategy[assembly.Event]:
    """Return tokens of a sample, in any order and epoch, its end, and streams that break.

    `sample` gives the token of an index; the sample has `most` tokens.
    """
    epochs = st.integers(1, 4)
    tokens = st.integers(0, most - 1).flatmap(
        lambda index: st.builds(assembly.TokenArrived, st.just(index), epochs, st.just(sample(index)))
    )
    ends = st.builds(assembly.EndArrived, st.just("stop"), st.just(most), epochs)
    return st.one_of(tokens, tokens, tokens, ends, st.just(assembly.StreamCut()))

"""Strategies for the events of a session, at the controller and at an instance.

Owners, epochs and tokens are drawn from small pools, so that events meet.
"""

from __future__ import annotations

import attrs
from hypothesis import strategies as st

from kvsp_core.machines import resume, session
from kvsp_core.problems import INVALID_STATE, Problem
from kvsp_core.records import Sampler, SessionCheckpoint

__all__ = ["OWNERS", "SESSION", "checkpoints", "instance_events", "ledger_events", "owners", "samplers"]

SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
OWNERS = tuple(
    session.Owner(f"https://ii{n}.example/kvsp/", incarnation) for n in (1, 2, 3) for incarnation in (1, 2)
)
owners = st.sampled_from(OWNERS)

samplers = st.builds(
    Sampler,
    method=st.just("top-p"),
    params=st.just({"p": 0.9}),
    seed=st.sampled_from((7, 7, 7, 8)),
    step=st.integers(0, 8),
    deterministic=st.sampled_from((False, False, False, True)),
)


@st.composite
def checkpoints(draw: st.DrawFn, recorded: tuple[int, ...] = ()) -> SessionCheckpoint:
    """Return checkpoints: most extend the tokens recorded, some are a prefix of them, some contradict."""
    tokens = recorded[: draw(st.integers(0, len(recorded)))] if draw(st.booleans()) else recorded
    tokens += tuple(draw(st.lists(st.integers(0, 2), max_size=3)))
    sampler = draw(samplers)
    return SessionCheckpoint(
        session=SESSION,
        epoch=draw(st.integers(0, 6)),
        compat_id="c" * 64,
        scope_id=draw(st.sampled_from(("5" * 32,) * 9 + ("6" * 32,))),
        prompt_blocks=("1" * 64, "2" * 64),
        prompt_tail=draw(st.sampled_from(((374, 264),) * 9 + ((),))),
        generated=tokens,
        output_offset=len(tokens),
        sampler=attrs.evolve(sampler, step=len(tokens)),
    )


def ledger_events(recorded: tuple[int, ...], epoch: int) -> st.SearchStrategy[session.Event]:
    """Return events of a session at the controller, many of them of its current epoch."""
    written = st.builds(
        lambda owner, checkpoint, current: session.CheckpointReceived(
            owner.instance, attrs.evolve(checkpoint, epoch=epoch) if current else checkpoint
        ),
        owners,
        checkpoints(recorded),
        st.booleans(),
    )
    return st.one_of(
        written,
        written,
        st.builds(session.OwnerLost, owners),
        st.builds(session.TargetChosen, owners),
        st.builds(session.ResumeFailed, st.integers(max(0, epoch - 1), epoch)),
        st.builds(session.Open, owners),
        st.just(session.TimerFired()),
    )


def instance_events() -> st.SearchStrategy[resume.Event]:
    """Return events of a session at an instance."""
    epochs = st.integers(1, 5)
    refusals = st.sampled_from((None, None, None, Problem(INVALID_STATE)))
    return st.one_of(
        st.builds(resume.BeginReceived, epoch=epochs, refusal=refusals),
        st.builds(resume.ResumeReceived, epoch=epochs, checkpoint=checkpoints(), refusal=refusals),
        st.builds(resume.BlocksLoaded, epochs, st.integers(0, 4)),
        st.builds(resume.PromptReceived, epochs, st.booleans()),
        st.builds(resume.SessionEnded, epochs),
        st.just(resume.TimerFired()),
    )

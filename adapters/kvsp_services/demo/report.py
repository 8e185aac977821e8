"""One page about a demonstration: what held, with the figures, and a timeline. It needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from kvsp_services.demo.cluster import INSTANCES
from kvsp_services.demo.steps import Step
from kvsp_services.demo.watching import Mark, Sample

__all__ = ["report"]

_LANES: Final = ("index", "controller", "cache", *INSTANCES, "front")
_STATES: Final = {
    "up": "#5b8def",
    "active": "#3aa76d",
    "draining": "#e0b03a",
    "sleeping": "#8a94a6",
    "starting": "#b9c2d0",
    "down": "#d64545",
    "failed": "#d64545",
}
_OWNERS: Final = {"alpha": "#4c78a8", "beta": "#f58518", "gamma": "#b279a2", "nobody": "#c9ced6"}
_HOLDERS: Final = {"cache": "#2b8a99", **{name: _OWNERS[name] for name in INSTANCES}}
_SIGNS: Final = {
    "kill -9": "\u2715",
    "started": "\u25b2",
    "prefetched": "\u21e3",
    "shard": "\u25c6",
    "drain": "\u25bd",
    "wake": "\u25b3",
    "SIGTERM": "\u25a0",
}
"""What the demonstration did to a process, and the sign for it."""
_LEFT, _WIDTH, _ROW = 110, 860, 20
_STYLE: Final = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
color: #1d2430 }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem }
table { border-collapse: collapse; width: 100%; margin: .4rem 0 }
td, th { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #e3e7ee;
vertical-align: top }
table.checks { table-layout: fixed }
.checks td:first-child { width: 6rem } .checks td:nth-child(2) { width: 47% }
table.figures { width: auto } .figures td { min-width: 7rem; font-variant-numeric: tabular-nums }
.ok { color: #1f7a48; font-weight: 600 } .no { color: #b3261e; font-weight: 600 } .muted { color: #5c6675 }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif } svg text { fill: #1d2430 }
.key span { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .3rem 0 1rem;
vertical-align: -1px }
"""


def report(title: str, steps: Sequence[Step], samples: Sequence[Sample], marks: Sequence[Mark]) -> str:
    """Return the page."""
    held = sum(check.held for step in steps for check in step.checks)
    made = sum(len(step.checks) for step in steps)
    verdict = f"{held} of {made} checks held"
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><p class='{'ok' if held == made else 'no'}'>{verdict}</p>",
        "<h2>Timeline</h2>",
        _timeline(samples, marks),
        _key(),
        *map(_step, steps),
        "</html>",
    ]
    return "\n".join(parts)


def _step(step: Step) -> str:
    lines = [f"<h2>{step.number}. {escape(step.title)} <span class='muted'>{step.took_s:.1f} s</span></h2>"]
    if step.figures:
        lines.append("<table class='figures'><tr><th><th>first<th>second")
        lines += [f"<tr><td>{escape(a)}<td>{escape(b)}<td>{escape(c)}" for a, b, c in step.figures]
        lines.append("</table>")
    if step.checks:
        lines.append("<table class='checks'>")
        for check in step.checks:
            word, css = ("held", "ok") if check.held else ("did not hold", "no")
            lines.append(
                f"<tr><td class='{css}'>{word}<td>{escape(check.what)}"
                f"<td class='muted'>{escape(check.figures)}"
            )
        lines.append("</table>")
    return "\n".join(lines)


def _key() -> str:
    def spans(colours: Iterable[tuple[str, str]]) -> str:
        return "".join(f"<span style='background:{colour}'></span>{name}" for name, colour in colours)

    states = [(name, colour) for name, colour in _STATES.items() if name not in ("failed", "starting")]
    owners = [(name, colour) for name, colour in _OWNERS.items() if name != "nobody"]
    signs = " &ensp; ".join(f"{sign} {what}" for what, sign in _SIGNS.items())
    return (
        f"<p class='key muted'>Processes:{spans(states)}<br>What was done to them: &ensp; {signs}"
        f"<br>Sessions, by the instance that has them:{spans(owners)}"
        f"<br>Blocks under lease, by the holder that keeps them from eviction:{spans(_HOLDERS.items())}</p>"
    )


def _timeline(samples: Sequence[Sample], marks: Sequence[Mark]) -> str:
    """Draw processes, sessions and leases over time."""
    if not samples:
        return "<p>Nothing was seen.</p>"
    end_s = max(samples[-1].at_s, *(mark.at_s for mark in marks), 1.0) if marks else samples[-1].at_s + 1
    sessions = sorted({name for sample in samples for name in sample.sessions}, key=int)
    session_rows = min(len(sessions), 40)
    leases_top = 30 + _ROW * (len(_LANES) + 1) + 12 * session_rows + 20
    height = leases_top + 120

    def x(at_s: float) -> float:
        return _LEFT + _WIDTH * at_s / end_s

    svg = [f"<svg viewBox='0 0 {_LEFT + _WIDTH + 10} {height}' role='img' aria-label='timeline'>"]
    begins = [mark for mark in marks if not mark.process]
    for number, mark in enumerate(begins):
        left = x(mark.at_s)
        right = x(begins[number + 1].at_s if number + 1 < len(begins) else end_s)
        shade = "#f3f5f9" if number % 2 else "#fafbfd"
        svg.append(
            f"<rect x='{left:.1f}' width='{right - left:.1f}' y='2' height='{height - 22}' fill='{shade}'/>"
            f"<text x='{(left + right) / 2:.1f}' y='15' text-anchor='middle'>{escape(mark.what)}</text>"
        )
    tops = {}
    for row, name in enumerate(_LANES):
        tops[name] = top = 24 + _ROW * row
        svg.append(f"<text x='0' y='{top + 11}'>{name}</text>")
        states = [(sample.at_s, sample.states.get(name, "down")) for sample in samples]
        svg += _bars(states, x, end_s, top, 14, _STATES)
    top = 30 + _ROW * len(_LANES)
    svg.append(f"<text x='0' y='{top + 11}'>sessions</text>")
    for row, name in enumerate(sessions[:session_rows]):
        seen = [(s.at_s, *s.sessions.get(name, ("", ""))) for s in samples]
        owners = [
            (at_s, owner if state in ("placed", "running", "resuming") else "") for at_s, state, owner in seen
        ]
        svg += _bars(owners, x, end_s, top + 12 * row, 9, _OWNERS)
    svg += _leases(samples, x, leases_top)
    for mark in marks:
        if mark.process in tops:
            at, y = x(mark.at_s), tops[mark.process]
            svg.append(
                f"<text x='{at:.1f}' y='{y + 12}' text-anchor='middle' style='fill:#1d2430;stroke:#fff;"
                f"stroke-width:3px;paint-order:stroke;font-weight:600'>{_SIGNS.get(mark.what, '?')}"
                f"<title>{escape(mark.what)}</title></text>"
            )
    step_s = next((s for s in (5, 10, 20, 30, 60, 120) if end_s / s <= 12), 300)
    for tick in range(0, int(end_s) + 1, step_s):
        svg.append(f"<text x='{x(tick):.1f}' y='{height - 4}'>{tick} s</text>")
    return "".join([*svg, "</svg>"])


def _bars(
    values: Sequence[tuple[float, str]],
    x: object,
    end_s: float,
    top: int,
    size: int,
    colours: dict[str, str],
) -> list[str]:
    """Draw one lane: a bar for each stretch of one value."""
    assert callable(x)
    bars, began = [], 0
    for index in range(1, len(values) + 1):
        if index < len(values) and values[index][1] == values[began][1]:
            continue
        first, last = values[began][0], values[index][0] if index < len(values) else end_s
        value = values[began][1]
        if value:
            width = max(1.5, x(last) - x(first))
            bars.append(
                f"<rect x='{x(first):.1f}' y='{top}' width='{width:.1f}' height='{size}' rx='2'"
                f" fill='{colours.get(value, '#c9ced6')}'><title>{escape(value)}</title></rect>"
            )
        began = index
    return bars


def _leases(samples: Sequence[Sample], x: object, top: int) -> list[str]:
    """Draw the blocks under lease at each holder, over time."""
    assert callable(x)
    most = max((count for sample in samples for count in sample.leases.values()), default=0)
    svg = [
        f"<text x='0' y='{top + 11}'>leased blocks</text>",
        f"<text x='0' y='{top + 28}'>up to {most}</text>",
    ]
    for name, colour in _HOLDERS.items():
        points = [
            f"{x(sample.at_s):.1f},{top + 80 - 76 * sample.leases.get(name, 0) / max(most, 1):.1f}"
            for sample in samples
        ]
        svg.append(
            f"<polyline points='{' '.join(points)}' fill='none' stroke='{colour}' stroke-width='1.8'>"
            f"<title>{name}</title></polyline>"
        )
    return svg

"""The page that `das-adapter report` writes: plotly figures in one HTML file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter import __version__
from das_adapter.core.length import LengthClass
from das_adapter.protocol.decision_log import Rollout
from das_adapter.tools import run_series as series
from das_adapter.tools.run_series import Alarm, Rate, TrainingStep

MAX_BARS = 2000
"""Requests drawn at most, the last to end."""
MAX_POINTS = 3000
"""Decode steps drawn at most where each is a point."""

BLUE, ORANGE, GREY, RED, INK = "#2a6f97", "#e07b1a", "#c3c9d1", "#b3261e", "#22303c"
CLASSES = {LengthClass.SHORT: "#9ecae1", LengthClass.MEDIUM: "#4292c6", LengthClass.LONG: "#08519c"}
_STYLE = f"""
body {{ margin: 0 auto; max-width: 72rem; padding: 1.5rem; color: {INK}; background: #fff;
        font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 1.7rem; margin: 0; }}
h2 {{ font-size: 1.25rem; margin: 2.5rem 0 0.25rem; border-top: 1px solid #dde2e8; padding-top: 1.5rem; }}
p {{ max-width: 48rem; margin: 0.25rem 0 0.75rem; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 0.75rem;
          margin: 1.25rem 0; }}
.tile {{ background: #f4f6f8; border-radius: 6px; padding: 0.6rem 0.9rem; }}
.tile b {{ display: block; font-size: 1.5rem; color: {BLUE}; }}
.alarm {{ border-left: 4px solid {RED}; background: #fdf1f0; padding: 0.5rem 0.9rem; margin: 0.5rem 0; }}
.fine {{ border-left: 4px solid {BLUE}; background: #f0f6fa; padding: 0.5rem 0.9rem; }}
"""


def page(
    rollouts: list[Rollout],
    shown: list[Rollout],
    summary: dict[str, Any],
    alarms: Sequence[Alarm],
    similarity: npt.NDArray[np.float64] | None = None,
    waits: Mapping[int, float] | None = None,
) -> str:
    """Return the page.

    Args:
        rollouts: all of the run.
        shown: those drawn over time.
        summary: of `report.summary`.
        alarms: of `run_series.alarms`.
        similarity: of `run_series.similarity`; None: the rollouts' text is not known.
        waits: seconds that training waited for rollouts, by training step.

    Raises:
        ImportError: plotly is not installed.
    """
    from plotly.offline import get_plotlyjs

    steps = series.by_training_step(rollouts)
    which = f"before weight version {shown[0].version}" if shown[0].version >= 0 else "at the end of the log"
    parts = [
        _section(
            f"The rollout {which}",
            "Each bar is a request, the last to end on top; the full colour is the share of its tokens that came from "
            "drafts. Drag to zoom, double-click to go back.",
            "timeline",
            _timeline(shown),
        ),
        _section(
            "Acceptance",
            "Share of the draft tokens that the policy accepted. An epoch is a problem's n-th visit.",
            "acceptance",
            _acceptance(rollouts, steps),
        ),
    ]
    if steps:
        parts += [
            _section(
                "What was saved",
                "Seconds of decoding, added up over the engines; saved seconds are estimated from the fitted step "
                "times.",
                "saved",
                _saved(steps),
            )
        ]
        if any(step.history_tokens is not None for step in steps):
            parts.append(
                _section(
                    "History",
                    "Requests that began with earlier rollouts of their problem, and the size of the largest history.",
                    "history",
                    _history(steps),
                )
            )
    if waits:
        parts.append(
            _section(
                "Exposed generation",
                "Seconds in which training waited for rollouts: what shorter rollouts can still save of a step.",
                "waits",
                _waits(waits),
            )
        )
    parts.append(
        _section(
            "Step times",
            "Each point is a decode step. The controller decides well where points lie near the line.",
            "latency",
            _latency(rollouts),
        )
    )
    if similarity is not None:
        parts.append(
            _section(
                "Similarity of epochs",
                f"Share of the {series.NGRAM}-grams of an epoch that another epoch of the same problem has too; on the "
                "diagonal, that siblings have.",
                "similarity",
                _similarity(similarity),
            )
        )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>das-adapter report</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style>
<script>{get_plotlyjs()}</script></head>
<body><h1>Rollouts under das-adapter</h1>
<p>{_count(summary["rollouts"], "rollout")} of {_count(summary["engines"], "engine")},
{_count(summary["requests"], "request")}; das-adapter {__version__}.</p>
<div class="tiles">{"".join(_tile(*tile) for tile in _tiles(rollouts, steps, summary, waits))}</div>
{_alarms(alarms)}
{"".join(parts)}
</body></html>
"""


def write(path: Path, *args: Any) -> None:
    """Write the page; the arguments are those of `page`."""
    path.write_text(page(*args), encoding="utf-8")


def _tiles(
    rollouts: list[Rollout],
    steps: Sequence[TrainingStep],
    summary: dict[str, Any],
    waits: Mapping[int, float] | None,
) -> Iterable[tuple[str, str]]:
    decoded = [s for r in rollouts for s in r.steps]
    forwards = max(1, sum(s.requests for s in decoded))
    seconds, saved = summary["decode_seconds"], summary["time_saved_s"]
    yield f"{1 + sum(s.accepted for s in decoded) / forwards:.2f}", "tokens per forward pass"
    yield f"{summary['accepted_tokens'] / max(1, summary['draft_tokens']):.0%}", "of draft tokens accepted"
    yield f"{saved:,.0f} s", f"saved of {seconds + saved:,.0f} s of decoding (estimate)"
    if waits:
        yield f"{sum(waits.values()) / len(waits):,.1f} s", "waited for rollouts in a training step, mean"
    hits = [step.history_hits for step in steps if step.history_hits is not None]
    if hits:
        yield f"{hits[-1]:.0%}", "of requests began with history, in the last step"
    if summary["latency_model_error"] is not None:
        yield f"{summary['latency_model_error']:.0%}", "mean error of predicted step times"


def _tile(figure: str, meaning: str) -> str:
    return f'<div class="tile"><b>{html.escape(figure)}</b>{html.escape(meaning)}</div>'


def _alarms(alarms: Sequence[Alarm]) -> str:
    if not alarms:
        return '<p class="fine" id="alarms">No alarm: nothing in the log sets das/health to 0.</p>'
    lines = "".join(
        f'<div class="alarm"><b>Training {_ranges(alarm.versions)}:</b> {html.escape(alarm.reason)}</div>'
        for alarm in alarms
    )
    return f'<div id="alarms">{lines}</div>'


def _ranges(versions: Sequence[int]) -> str:
    """Name training steps: `step 3`, or `steps 3 to 5, 9`."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    names = ["the end of the log" if b < 0 else f"{a}" if a == b else f"{a} to {b}" for a, b in runs]
    return ("steps " if len(versions) > 1 else "step ") + ", ".join(names)


def _section(title: str, reading: str, name: str, figure: Any) -> str:
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        default_height=f"{figure.layout.height}px",
        config={"displaylogo": False, "displayModeBar": "hover", "responsive": True},
    )
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(reading)}</p>{drawn}</section>"


def _figure(rows: int, columns: int, height: int, **subplots: Any) -> Any:
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=rows, cols=columns, **subplots)
    figure.update_layout(
        template="plotly_white",
        height=height,
        font={"family": "system-ui, 'DejaVu Sans', sans-serif", "size": 14, "color": INK},
        margin={"l": 70, "r": 20, "t": 50, "b": 60},
        hovermode="closest",
        bargap=0.25,
    )
    figure.update_annotations(font_size=15)
    return figure


def _timeline(rollouts: list[Rollout]) -> Any:
    figure = _figure(3, 1, 860, shared_xaxes=True, row_heights=[0.55, 0.2, 0.25], vertical_spacing=0.05)
    start, requests = series.begin(rollouts), series.requests_of(rollouts)
    first = max(0, len(requests) - MAX_BARS)
    for kind, colour in CLASSES.items():
        rows = [row for row in range(first, len(requests)) if requests[row].length_class == kind]
        bars = [requests[row] for row in rows]
        hover = [
            f"{q.tokens:,} tokens, {q.accepted / max(1, q.tokens):.0%} from drafts<br>{q.end - q.begin:.1f} s"
            for q in bars
        ]
        for opacity, share in ((0.35, [1.0] * len(bars)), (1.0, [q.accepted / max(1, q.tokens) for q in bars])):
            figure.add_bar(
                orientation="h",
                y=rows,
                base=[_round(q.begin - start) for q in bars],
                x=[_round((q.end - q.begin) * part) for q, part in zip(bars, share, strict=True)],
                marker={"color": colour, "line_width": 0},
                opacity=opacity,
                name=f"predicted {kind.name.lower()}",
                legendgroup=kind.name,
                showlegend=opacity == 1.0 and bool(bars),
                hovertext=hover,
                hoverinfo="text",
                row=1,
                col=1,
            )
    over = series.timeline(rollouts)
    width = np.diff(over.bins)
    figure.add_scatter(
        x=_rounded(over.at),
        y=over.running.tolist(),
        line={"shape": "hv", "color": BLUE, "width": 2},
        name="running requests",
        showlegend=False,
        row=2,
        col=1,
    )
    for name, values, colour in (("accepted", over.accepted, ORANGE), ("rejected", over.rejected, GREY)):
        figure.add_bar(
            x=_rounded(over.bins[:-1] + width / 2),
            y=_rounded(values),
            width=_rounded(width),
            marker={"color": colour, "line_width": 0},
            name=f"draft tokens {name}",
            base=None if name == "accepted" else _rounded(over.accepted),
            row=3,
            col=1,
        )
    end, late = requests[-1].end - start, requests[max(0, int(np.ceil(0.8 * len(requests))) - 1)].end - start
    top = len(requests) - 0.5
    views = {
        "whole rollout": ([0, end * 1.02], [first - 0.5, top]),
        "tail: after 80 % have ended": ([late * 0.98, end * 1.02], [max(first, 0.8 * len(requests)) - 0.5, top]),
    }
    buttons = [
        {
            "label": label,
            "method": "relayout",
            "args": [{"xaxis.range": x, "xaxis2.range": x, "xaxis3.range": x, "yaxis.range": y}],
        }
        for label, (x, y) in views.items()
    ]
    figure.update_layout(
        barmode="overlay",
        bargap=0.1,
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "buttons": buttons,
                "x": 0,
                "xanchor": "left",
                "y": 1.09,
                "yanchor": "bottom",
                "showactive": True,
                "pad": {"t": 0},
            }
        ],
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.01, "yanchor": "bottom"},
        margin={"t": 110},
    )
    more = f" (the last {MAX_BARS:,} of {len(requests):,})" if first else ""
    figure.update_yaxes(title_text=f"requests by end{more}", range=views["whole rollout"][1], row=1, col=1)
    figure.update_yaxes(title_text="running<br>requests", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(title_text="draft tokens<br>per decode step", rangemode="tozero", row=3, col=1)
    figure.update_xaxes(title_text="seconds since the rollout began", range=views["whole rollout"][0], row=3, col=1)
    return figure


def _acceptance(rollouts: list[Rollout], steps: Sequence[TrainingStep]) -> Any:
    panels: list[tuple[str, str, Sequence[Rate]]] = [
        ("by training step", "training step", [step.acceptance for step in steps if step.acceptance.drafted]),
        ("by epoch", "visit of the problem", series.by_epoch(rollouts)),
        ("by age of the history", "weight versions since the newest rollout", _ages(rollouts)),
        ("by source", "drafted from", series.by_source(rollouts)),
        ("by length so far", "tokens of the response, from", series.by_length(rollouts)),
    ]
    panels = [panel for panel in panels if panel[2]]
    columns = 2
    rows = -(-max(1, len(panels)) // columns)
    figure = _figure(
        rows,
        columns,
        60 + 310 * rows,
        subplot_titles=[title for title, _, _ in panels],
        vertical_spacing=0.36 / rows,
        horizontal_spacing=0.1,
    )
    for number, (title, axis, rates) in enumerate(panels):
        at = {"row": number // columns + 1, "col": number % columns + 1}
        kinds = [rate.kind for rate in rates]
        hover = [f"{rate.accepted:,} of {rate.drafted:,} draft tokens" for rate in rates]
        shares = [_round(100 * rate.share) for rate in rates]
        common = {"y": shares, "hovertext": hover, "name": title, "showlegend": False}
        if title == "by training step":
            figure.add_scatter(
                x=[int(kind) for kind in kinds],
                mode="lines+markers",
                line={"color": ORANGE, "width": 2},
                marker={"size": 5},
                **common,
                **at,
            )
        else:
            figure.add_bar(x=kinds, marker_color=ORANGE, **common, **at)
            figure.update_xaxes(type="category", **at)
        figure.update_xaxes(title_text=axis, **at)
        figure.update_yaxes(title_text="accepted, %", range=[0, 100], **at)
    return figure


def _ages(rollouts: list[Rollout]) -> list[Rate]:
    names = {"none": "none", "older": "> 256"}
    return [Rate(names.get(r.kind, r.kind.replace("_", "–")), *r[1:]) for r in series.by_age(rollouts)]  # noqa: RUF001


def _saved(steps: Sequence[TrainingStep]) -> Any:
    figure = _figure(1, 2, 410, subplot_titles=("tokens per forward pass", "time of decoding"), horizontal_spacing=0.1)
    versions = [step.version for step in steps]
    figure.add_scatter(
        x=versions,
        y=[_round(step.tokens_per_forward) for step in steps],
        mode="lines+markers",
        line={"color": ORANGE, "width": 2},
        marker={"size": 5},
        name="tokens per forward pass",
        showlegend=False,
        row=1,
        col=1,
    )
    for name, colour, values in (
        ("spent", BLUE, [step.decode_seconds for step in steps]),
        ("saved", ORANGE, [step.saved_seconds for step in steps]),
    ):
        figure.add_bar(x=versions, y=[_round(value) for value in values], marker_color=colour, name=name, row=1, col=2)
    figure.update_layout(
        barmode="relative",
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.12, "yanchor": "bottom"},
        margin={"t": 80},
    )
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text="tokens of a request per pass", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="seconds, all engines", row=1, col=2)
    return figure


def _waits(waits: Mapping[int, float]) -> Any:
    figure = _figure(1, 1, 340)
    figure.add_scatter(
        x=list(waits),
        y=[_round(seconds) for seconds in waits.values()],
        mode="lines+markers",
        line={"color": BLUE, "width": 2},
        marker={"size": 5},
        name="exposed generation",
        showlegend=False,
    )
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text="seconds", rangemode="tozero")
    return figure


def _history(steps: Sequence[TrainingStep]) -> Any:
    figure = _figure(1, 2, 360, subplot_titles=("history hits", "size of the history"), horizontal_spacing=0.1)
    hits = [(step.version, _round(100 * step.history_hits)) for step in steps if step.history_hits is not None]
    sizes = [(step.version, step.history_tokens) for step in steps if step.history_tokens is not None]
    for column, (name, points) in enumerate((("history hits", hits), ("tokens", sizes)), 1):
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="lines+markers",
            name=name,
            line={"color": BLUE, "width": 2},
            marker={"size": 5},
            showlegend=False,
            row=1,
            col=column,
        )
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text="requests with history, %", range=[0, 105], row=1, col=1)
    figure.update_yaxes(title_text="tokens", rangemode="tozero", row=1, col=2)
    return figure


def _latency(rollouts: list[Rollout]) -> Any:
    steps = [s for r in rollouts for s in r.steps if s.predicted]
    figure = _figure(1, 1, 480)
    top = 1.1e3 * float(np.percentile([max(s.seconds, s.predicted or 0.0) for s in steps], 99)) if steps else 1.0
    for drafted, colour, name in ((False, BLUE, "without drafts"), (True, ORANGE, "with drafts")):
        points = [s for s in steps if (s.drafted > 0) == drafted]
        points = points[:: 1 + len(points) // MAX_POINTS]
        if points:
            figure.add_scatter(
                x=[_round(1e3 * s.seconds) for s in points],
                y=[_round(1e3 * (s.predicted or 0.0)) for s in points],
                mode="markers",
                marker={"color": colour, "size": 5, "opacity": 0.5},
                name=name,
            )
    figure.add_scatter(
        x=[0, top], y=[0, top], mode="lines", line={"color": INK, "width": 1}, name="exact", hoverinfo="skip"
    )
    figure.update_xaxes(title_text="measured step time, ms", range=[0, top])
    figure.update_yaxes(title_text="predicted step time, ms", range=[0, top])
    figure.update_layout(legend={"x": 0.02, "y": 0.98})
    return figure


def _similarity(shares: npt.NDArray[np.float64]) -> Any:
    figure = _figure(1, 1, 560)
    names = [str(epoch) for epoch in range(1, len(shares) + 1)]
    cells = [[None if np.isnan(cell) else _round(100 * float(cell)) for cell in row] for row in shares]
    figure.add_heatmap(
        z=cells,
        x=names,
        y=names,
        colorscale="Blues",
        colorbar={"title": "shared, %"},
        name="similarity",
        texttemplate="%{z:.0f}" if len(names) <= 12 else None,
        hovertemplate="%{z:.1f} % of epoch %{y}'s text is in epoch %{x}<extra></extra>",
    )
    figure.update_xaxes(title_text="is in epoch", type="category")
    figure.update_yaxes(title_text="text of epoch", type="category", autorange="reversed", scaleanchor="x")
    figure.update_layout(width=680)
    return figure


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _rounded(values: npt.NDArray[np.float64]) -> list[float]:
    return [_round(float(value)) for value in values]

"""How the plots of a report look: panels of lines over a logarithmic axis, and a legend that serves all of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's palette: distinct with every common form of colour blindness. Grey is for the baseline.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BASELINE_COLOUR = "#7F7F7F"
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
PANEL_INCHES = (3.9, 3.2)
MAX_COLUMNS = 3
DPI = 130


@dataclass(frozen=True)
class Style:
    """How a line looks."""

    colour: str
    marker: str = "o"
    dashes: str | tuple[int, tuple[float, ...]] = "-"


@dataclass(frozen=True)
class Ceiling:
    """The bandwidth that no kernel beats, if it is known, and what it is."""

    gb_s: float | None
    name: str


Line = tuple[str, Style, pd.DataFrame]  # label, looks, rows
Panel = tuple[str, Sequence[Line]]  # title, lines


def line_figure(panels: Sequence[Panel], x: str, xlabel: str, ceiling: Ceiling, kind: str = "") -> Figure:
    """Panels of bandwidth over the column `x` side by side, with the ceiling as a dashed line.

    `kind` says how the figures were obtained where they are no measurements.
    """
    stream_gb_s = ceiling.gb_s
    columns = min(len(panels), MAX_COLUMNS)
    rows = -(-len(panels) // columns)
    size = (PANEL_INCHES[0] * columns + 1.6, PANEL_INCHES[1] * rows + 0.9)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel().tolist()
    for unused in axes[len(panels) :]:
        unused.remove()
    handles: dict[str, Artist | ErrorbarContainer] = {}
    for index, (axis, (title, lines)) in enumerate(zip(axes, panels, strict=False)):
        for label, style, line in lines:
            handles.setdefault(label, _draw(axis, line.sort_values(x), x, style))
        if stream_gb_s is not None:
            handles[ceiling.name] = axis.axhline(stream_gb_s, color="black", linewidth=0.9, linestyle="--")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(xlabel)
        axis.set_ylabel(f"{kind} KV read, GB/s".strip() if index % columns == 0 else "")
    all_rows = pd.concat([line for _, lines in panels for _, _, line in lines])
    top = max(float(all_rows["high_gb_s"].max()), stream_gb_s or 0.0)
    _scale(axes[: len(panels)], sorted({int(v) for v in all_rows[x]}), top * 1.08)
    order = sorted(handles, key=lambda label: (label == ceiling.name, list(handles).index(label)))
    shown = cast(list[Artist], [handles[label] for label in order])  # containers serve as well
    figure.legend(shown, order, loc="outside right center", fontsize=8.5, frameon=False)
    return figure


def _draw(axis: Axes, rows: pd.DataFrame, x: str, style: Style) -> ErrorbarContainer:
    return axis.errorbar(
        rows[x],
        rows["gb_s"],
        yerr=[rows["gb_s"] - rows["low_gb_s"], rows["high_gb_s"] - rows["gb_s"]],
        color=style.colour,
        marker=style.marker,
        linestyle=style.dashes,
        markersize=5,
        capsize=3,
        linewidth=1.6,
    )


def _scale(axes: Sequence[Axes], values: Sequence[int], top: float) -> None:
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(values))
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axis.set_xlim(min(values) / 1.25, max(values) * 1.25)
        axis.set_ylim(0, top)
        axis.tick_params(labelbottom=True)
        tidy(axis)


def bar_figure(shares: Sequence[float], names: Sequence[str], texts: Sequence[str], colours: Sequence[str]) -> Figure:
    """Horizontal bars of percentages, the first at the bottom, each with a text in a column of its own."""
    figure = Figure(figsize=(8.6, 1.7 + 0.25 * len(shares)), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(shares)), shares, color=colours, height=0.72)
    column = max(102.0, *shares) + 1.5
    for position, (share, text) in enumerate(zip(shares, texts, strict=True)):
        inside = share > 12
        axis.text(
            share + (-1 if inside else 1),
            position,
            f"{share:.0f} %",
            va="center",
            ha="right" if inside else "left",
            fontsize=7.5,
            color="white" if inside else "black",
        )
        axis.text(column, position, text, va="center", fontsize=7.5)
    axis.axvline(100, color="black", linewidth=0.9, linestyle="--")
    axis.set_yticks(range(len(names)), names, fontsize=7.5)
    axis.set_ylim(-0.7, len(names) - 0.3)
    axis.set_xlim(0, column + 62)
    axis.set_xticks(range(0, 101, 20))
    tidy(axis)
    axis.grid(visible=False, axis="y")
    return figure


def tidy(axis: Axes) -> None:
    """A light grid, and no frame above and to the right."""
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def png_of(figure: Figure, title: str, source: str) -> bytes:
    """The picture with a title above and its source below; the same bytes for the same figure."""
    figure.suptitle(title, fontsize=11.5, fontweight="bold")
    figure.supxlabel(source, fontsize=8, color="#444444")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def short_number(value: float) -> str:
    """`4k` for 4096."""
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"

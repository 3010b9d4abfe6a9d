"""The plots of a report. Every one says on which device, in which timer mode and from how many samples it was made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from pagedtune.harness.prediction import UNCERTAINTY
from pagedtune.kernels.record import TimeEvidence

from .drawing import (
    BASELINE_COLOUR,
    COLOURS,
    DASHES,
    MARKERS,
    Ceiling,
    Line,
    Panel,
    Style,
    bar_figure,
    line_figure,
    png_of,
    short_number,
)
from .frames import best_per_variant, winners_of
from .select import BASELINE

MAX_BARS = 48


@dataclass(frozen=True)
class Scope:
    """What all plots of one kind of evidence share.

    Args:
        device: name and product.
        evidence: how the times were obtained.
        mode: timer mode.
        stream_gb_s: bandwidth of a plain read, if it is known.
    """

    device: str
    evidence: TimeEvidence
    mode: str
    stream_gb_s: float | None

    @property
    def predicted(self) -> bool:
        """Whether the times are a model's."""
        return self.evidence is TimeEvidence.PREDICTED

    @property
    def kind(self) -> str:
        """What goes before a figure that was not measured."""
        return "predicted" if self.predicted else ""

    @property
    def ceiling(self) -> Ceiling:
        """The device's bandwidth: as the data sheet has it where nothing was measured."""
        return Ceiling(self.stream_gb_s, "data sheet" if self.predicted else "plain read")


@dataclass(frozen=True)
class Plot:
    """A finished plot, or the reason why there is none.

    Args:
        name: file name without suffix.
        title: what it shows.
        png: the picture; empty if there is none.
        text: the caption, or what is missing and how to get it.
    """

    name: str
    title: str
    png: bytes
    text: str


def make_plots(frame: pd.DataFrame, scope: Scope) -> list[Plot]:
    """All plots of one kind of evidence."""
    makers: Sequence[Callable[[pd.DataFrame, Scope], Iterator[Plot]]] = (
        _context_plots,
        _block_size_plots,
        _gqa_plots,
        _stream_plots,
    )
    return [plot for maker in makers for plot in maker(frame, scope)]


def _context_plots(frame: pd.DataFrame, scope: Scope) -> Iterator[Plot]:
    """Bandwidth against context: one figure per model and dtype, one panel per batch size, one line per variant."""
    title = "Bandwidth against context"
    best = best_per_variant(frame).sort_values("gb_s", ascending=False)
    best = best.drop_duplicates(["model", "dtype", "bucket", "variant"])
    best = _with_several(best, ["model", "dtype", "num_seqs"], "context")
    groups = list(best.groupby(["model", "dtype"]))
    if not groups:
        yield _missing(scope, "context", title, "no model was timed at more than one context length of one batch size")
    for (model, dtype), group in groups:
        panels: list[Panel] = []
        for _, panel in group.groupby("num_seqs"):
            lines: list[Line] = [(str(v), Style(_colour(frame, str(v))), line) for v, line in panel.groupby("variant")]
            num_seqs = int(panel["num_seqs"].iloc[0])
            panels.append((f"{num_seqs} sequence" if num_seqs == 1 else f"{num_seqs} sequences", lines))
        figure = line_figure(panels, "context", "longest context, tokens", scope.ceiling, scope.kind)
        caption = f"{model}, {dtype}: each variant with its fastest config and block size at each point."
        yield _plot(figure, scope, f"context-{model}-{dtype}", f"{title}: {model}, {dtype}", caption, group)


def _block_size_plots(frame: pd.DataFrame, scope: Scope) -> Iterator[Plot]:
    """Bandwidth against block size: one figure per model, one panel per dtype, one line per bucket, winners only."""
    title = "Bandwidth against block size"
    best = winners_of(frame).sort_values("gb_s", ascending=False)
    best = best.drop_duplicates(["model", "dtype", "bucket", "block_size"])
    best = _with_several(best, ["model", "dtype", "bucket"], "block_size")
    groups = list(best.groupby("model"))
    if not groups:
        yield _missing(scope, "block-size", title, "no bucket was timed with more than one block size")
    for model, group in groups:
        panels = [(str(dtype), _bucket_lines(panel, best)) for dtype, panel in group.groupby("dtype")]
        figure = line_figure(panels, "block_size", "block size, tokens", scope.ceiling, scope.kind)
        caption = f"{model}: the winner of each cell. Lines: sequences × longest context."
        yield _plot(figure, scope, f"block-size-{model}", f"{title}: {model}", caption, group)


def _gqa_plots(frame: pd.DataFrame, scope: Scope) -> Iterator[Plot]:
    """Bandwidth against GQA ratio: the winners of different models in the same bucket."""
    title = "Bandwidth against GQA ratio"
    best = winners_of(frame).sort_values("gb_s", ascending=False).drop_duplicates(["dtype", "bucket", "gqa_ratio"])
    rows = _with_several(best, ["dtype", "bucket"], "gqa_ratio")
    if rows.empty:
        yield _missing(scope, "gqa", title, "no bucket was timed for models of different GQA ratios")
        return
    panels = [(str(dtype), _bucket_lines(panel, best)) for dtype, panel in rows.groupby("dtype")]
    figure = line_figure(panels, "gqa_ratio", "query heads per KV head", scope.ceiling, scope.kind)
    names = rows.groupby("gqa_ratio")["model"].unique()
    legend = "; ".join(f"{ratio}: {', '.join(sorted(models))}" for ratio, models in names.items())
    caption = (
        "The fastest winner at each ratio. Lines: sequences × longest context. Models differ in head dim and number "
        f"of heads too: {legend}."
    )
    yield _plot(figure, scope, "gqa", title, caption, rows)


def _stream_plots(frame: pd.DataFrame, scope: Scope) -> Iterator[Plot]:
    """Share of the stream bandwidth that the winner reaches in the fastest format of each bucket."""
    title = "Share of the data sheet's bandwidth" if scope.predicted else "Share of the stream bandwidth"
    if scope.stream_gb_s is None:
        yield _missing(scope, "stream", title, "the stream bandwidth of this device is not known")
        return
    best = winners_of(frame).sort_values("gb_s", ascending=False).drop_duplicates(["model", "problem", "bucket"])
    shown = best.head(MAX_BARS).sort_values(["model", "dtype", "num_seqs", "context"], ascending=False)
    figure = bar_figure(
        shares=(shown["stream_share"] * 100).tolist(),
        names=[f"{r.model}  {r.dtype}  {r.bucket}" for r in shown.itertuples()],
        texts=[
            f"{r.variant}, {r.format}, {scope.kind} {r.median_us:,.0f} µs".replace("  ", " ")
            for r in shown.itertuples()
        ],
        colours=[_colour(frame, str(v)) for v in shown["variant"]],
    )
    where = "of the data sheet" if scope.predicted else "of a plain read"
    figure.axes[0].set_xlabel(f"{scope.kind} % of the {scope.stream_gb_s:,.4g} GB/s {where}".strip(), loc="left")
    more = f" The best {MAX_BARS} of {len(best)} buckets." if len(best) > MAX_BARS else ""
    caption = f"The winner of each bucket in its fastest pool format. Buckets: n sequences, c longest context.{more}"
    yield _plot(figure, scope, "stream", title, caption, shown)


def _with_several(rows: pd.DataFrame, by: list[str], x: str) -> pd.DataFrame:
    """The groups that have more than one value of `x`: a single point is no curve."""
    return rows[rows.groupby(by)[x].transform("nunique") > 1]


def _bucket_lines(rows: pd.DataFrame, everything: pd.DataFrame) -> list[Line]:
    """One line per bucket: the colour says how many sequences, marker and dashes how long their contexts."""
    batches = sorted(everything["num_seqs"].unique())
    contexts = sorted(everything["context"].unique())
    lines: list[Line] = []
    for _, line in rows.groupby(["num_seqs", "context"]):
        num_seqs, context = int(line["num_seqs"].iloc[0]), int(line["context"].iloc[0])
        colour = COLOURS[batches.index(num_seqs) % len(COLOURS)]
        place = contexts.index(context)
        style = Style(colour, MARKERS[place % len(MARKERS)], DASHES[place % len(DASHES)])
        lines.append((f"{num_seqs} × {short_number(context)}", style, line))
    return lines


def _plot(figure: Figure, scope: Scope, name: str, title: str, caption: str, rows: pd.DataFrame) -> Plot:
    if scope.predicted:
        title, source = f"{title} (predicted, not measured)", f"{scope.device}; predicted by a model, not measured"
        text = f"{caption} {source}; error bars: the model's stated uncertainty, ± {UNCERTAINTY:.0%}."
        return Plot(_file_name(scope, name), title, png_of(figure, title, source), text)
    samples = _range_text(rows["num_samples"])
    source = f"{scope.device}; {scope.evidence.value}, mode {scope.mode}; {samples} samples a point"
    text = f"{caption} {source}; error bars: 95 % intervals of the median."
    return Plot(_file_name(scope, name), title, png_of(figure, title, source), text)


def _missing(scope: Scope, name: str, title: str, reason: str) -> Plot:
    text = f"Not plotted: {reason}. A larger sweep may have it: `pagedtune tune --sweep default`."
    return Plot(_file_name(scope, name), title, b"", text)


def _file_name(scope: Scope, name: str) -> str:
    plain = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    prefix = "" if scope.evidence is TimeEvidence.MEASURED else f"{scope.evidence.value}-"
    mode = "" if scope.mode == scope.evidence.value else f"{scope.mode}-"
    return f"{prefix}{mode}{plain}"


def _colour(frame: pd.DataFrame, variant: str) -> str:
    """The same colour for a variant in all plots of a report."""
    others = sorted(v for v in frame["variant"].unique() if v != BASELINE)
    return BASELINE_COLOUR if variant == BASELINE else COLOURS[others.index(variant) % len(COLOURS)]


def _range_text(values: pd.Series) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"

"""`pagedtune bench`: times named kernels on a problem of the user's, without searching or recording."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pagedtune.harness.environment import environment
from pagedtune.harness.external import VariantLoadError
from pagedtune.harness.statistics import median
from pagedtune.kernels.bounds import Bounds
from pagedtune.kernels.catalogue import variants_for
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, PoolFormat
from pagedtune.kernels.record import Timing
from pagedtune.kernels.serial import to_jsonable
from pagedtune.kernels.workload import Workload

from .bench_emulated import emulated_tables, family
from .bench_run import DEFAULT_PROBLEM, Choice, Setting, measure, parse_choice, parse_problem
from .cli_options import ConfigsOption, DeviceOption
from .configs import Configs
from .devices import find_device
from .emulated_bars import bars_for
from .emulated_peer import Cell
from .emulated_view import as_json as emulated_json
from .emulated_view import show, title
from .errors import UsageError
from .tables import console_for

EXIT_FAILED = 1


def bench_command(
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VARIANT]...",
            help="Kernels: NAME, file.py:ClassName, or with tunables NAME[num_splits=4]. Default: all for the device.",
        ),
    ] = None,
    against: Annotated[str, typer.Option("--against", metavar="VARIANT", help="What ratios are taken to.")] = "eager",
    problem: Annotated[
        str, typer.Option("--problem", metavar="Q/KVxDIM", help="Query heads, KV heads, head dim; or 32/8x128v64.")
    ] = DEFAULT_PROBLEM,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The first problem of a model instead.")
    ] = None,
    dtype: Annotated[DType, typer.Option("--dtype", help="Of query and output.")] = DType.BF16,
    kv_dtype: Annotated[DType | None, typer.Option("--kv-dtype", help="Of the pool; default: as --dtype.")] = None,
    block_size: Annotated[int, typer.Option("--block-size", min=1, metavar="TOKENS")] = 16,
    layout: Annotated[Layout, typer.Option("--layout")] = Layout.NHD,
    batch: Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Sequences.")] = 8,
    context: Annotated[int, typer.Option("--context", min=1, metavar="TOKENS", help="Longest context.")] = 4096,
    workload: Annotated[str, typer.Option("--workload", help="uniform, ragged or one_long.")] = "uniform",
    mode: Annotated[str, typer.Option("--mode", help="cold: KV from memory; hot: from the caches.")] = "cold",
    budget: Annotated[float, typer.Option("--budget", metavar="SECONDS", help="Time for sampling.")] = 10.0,
    emulated: Annotated[
        bool,
        typer.Option(
            "--emulated",
            help="No times: sectors, instructions, conflicts, occupancy of a GPU that need not be here.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Times with all samples as JSON.")] = False,
    device: DeviceOption = None,
    configs: ConfigsOption = None,
) -> None:
    """Time given kernels against each other, without a search; each is proven on small cases first.

    Example: pagedtune bench cpu_split 'cpu_split[num_splits=4]' --problem 32/8x128 --batch 8 --context 4096

    Ratios come from interleaved rounds in one process. Exit code 1 if a kernel could not be proven or timed.

    Example: pagedtune bench --device h100 --emulated --context 32768 --batch 1

    runs the kernels' PTX on the virtual GPU instead and says what it and their binaries tell, beside what is best
    possible; no table there has a time that was measured.
    """
    if not 0 < budget < float("inf"):
        raise UsageError(f"--budget {budget:g} must be a number of seconds above 0")
    files = Configs(configs)
    found = _emulated_device(device, files) if emulated else find_device(device, files).device
    try:
        setting = Setting(
            device=found,
            problem=parse_problem(problem, dtype) if model is None else files.model(model).problems(dtype)[0][0],
            pool_format=PoolFormat(block_size, kv_dtype or dtype, layout),
            workload=Workload.named(workload, Bounds(batch, context).max_num_seqs, context),
            mode=mode,
            budget_s=budget,
        )
        if emulated:
            _emulate(setting, variants, files, as_json)
            return
        names = variants or [v.name for v in variants_for(found.kind) if v.name != against]
        choices = [parse_choice(text) for text in dict.fromkeys((against, *names))]
        outcomes = measure(setting, choices)
    except (ValueError, VariantLoadError) as error:
        raise UsageError(str(error)) from error
    if as_json:
        print(json.dumps(_as_json(setting, choices, outcomes), indent=1))
    else:
        _show(console_for(), setting, choices, outcomes)
    if any(isinstance(outcome, str) for outcome in outcomes):
        raise typer.Exit(EXIT_FAILED)


def _emulated_device(name: str | None, files: Configs) -> Device:
    if name is None or files.gpu(name).kind is not DeviceKind.CUDA:
        raise UsageError("--emulated needs a GPU of configs/gpus: pagedtune bench --emulated --device h100")
    return find_device(name, files, may_predict=True).device


def _emulate(setting: Setting, variants: Sequence[str] | None, files: Configs, as_json: bool) -> None:
    """Prints the emulated table; exit code 1 where a named kernel has no figures."""
    cell = Cell(setting.problem, setting.pool_format, setting.workload, setting.device)
    title(cell)  # refuses a batch of unequal lengths before any work
    choices = [parse_choice(t) for t in variants or [v.name for v in variants_for(DeviceKind.CUDA)]]
    bars = bars_for(setting.device, family(files))
    (rows,), _ = emulated_tables([cell], choices, False, bars)
    if as_json:
        print(json.dumps(emulated_json(cell, rows, bars, " ".join(["pagedtune", *sys.argv[1:]])), indent=1))
    else:
        show(console_for(), cell, rows, bars)
    if any(row.reason for row in rows):
        raise typer.Exit(EXIT_FAILED)


def _show(console: Console, setting: Setting, choices: Sequence[Choice], outcomes: Sequence[Timing | str]) -> None:
    stream_gb_s = setting.device.bandwidth_gb_s
    console.print(
        f"{setting.device.product or setting.device.name}, {setting.device.num_units} cores; {setting.problem.key}, "
        f"{setting.pool_format.key}, {setting.workload.num_seqs} × {max(setting.workload.context_lens)} "
        f"({setting.workload.name}), {setting.mode}",
        markup=False,
    )
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("kernel", overflow="fold")
    for name in ("µs", "95% CI", "GB/s", "% stream", f"time / {choices[0].label}", "n"):
        view.add_column(name.replace("[", r"\["), justify="right", no_wrap=True)
    notes = []
    for choice, outcome in zip(choices, outcomes, strict=True):
        if isinstance(outcome, str):
            notes.append(f"{choice.label}: {outcome}")
            continue
        notes += [f"{choice.label}: {outcome.note}"] if outcome.note else []
        view.add_row(
            choice.label.replace("[", r"\["),
            f"{outcome.median_us:,.1f}",
            f"{outcome.ci_us[0]:,.1f}–{outcome.ci_us[1]:,.1f}",
            f"{outcome.bandwidth_gb_s:.1f}",
            f"{outcome.bandwidth_gb_s / stream_gb_s:.0%}" if stream_gb_s else "",
            _ratio_text(outcome, choice is choices[0]),
            str(len(outcome.samples_us)),
        )
    console.print(view)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)


def _ratio_text(timing: Timing, is_reference: bool) -> str:
    if is_reference:
        return "1"
    if timing.ratio_ci is None or not timing.pair_ratios:
        return ""
    low, high = timing.ratio_ci
    return f"{median(timing.pair_ratios):.3g} ({low:.3g}–{high:.3g})"


def _as_json(setting: Setting, choices: Sequence[Choice], outcomes: Sequence[Timing | str]) -> dict[str, Any]:
    return {
        **{name: to_jsonable(getattr(setting, name)) for name in ("device", "problem", "pool_format", "workload")},
        "mode": setting.mode,
        "environment": environment(),
        "results": [
            {
                "variant": c.ref,
                "config": c.config,
                **({"error": o} if isinstance(o, str) else {"timing": to_jsonable(o)}),
            }
            for c, o in zip(choices, outcomes, strict=True)
        ],
    }

"""`pagedtune replay`: request traces through scheduler and allocator, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pagedtune.runtime.errors import PagedRuntimeError

from .errors import UsageError
from .replay import Arrivals, ReplayResult, ReplaySettings, default_pool, replay, smallest_pool
from .tables import console_for
from .traces import Trace, load_trace
from .traces_compare import Figure, compare
from .traces_generator import generate_trace
from .traces_tables import TABLES

EXIT_FAILED = 1


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("replay")(replay_command)


def replay_command(
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TRACE]...",
            help=f"Azure .csv or Mooncake .jsonl files, or names to generate: {', '.join(TABLES)}. Default: all names.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N requests.")] = None,
    pool: Annotated[
        list[int] | None,
        typer.Option(
            "--pool", min=1, metavar="BLOCKS", help="Size of the pool; repeat to compare. Default: 64 mean requests."
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Pools from one longest request up, each double the one before.")
    ] = False,
    block_size: Annotated[int, typer.Option("--block-size", min=1, metavar="TOKENS")] = 16,
    arrivals: Annotated[
        Arrivals, typer.Option("--arrivals", help="trace: when they came; saturated: all at once.")
    ] = Arrivals.TRACE,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache/--no-prefix-cache")] = True,
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=1, max=2, metavar="N", help="Steps in flight, 1 or 2.")
    ] = 1,
    max_seqs: Annotated[
        int, typer.Option("--max-seqs", min=1, metavar="N", help="Most sequences that run at once.")
    ] = 256,
    budget: Annotated[
        int, typer.Option("--token-budget", min=1, metavar="N", help="Most query tokens of one step.")
    ] = 4096,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of generated traces.")] = 0,
    against: Annotated[
        bool, typer.Option("--against-generator", help="Replay each file's generated stand-in too, and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The results as JSON.")] = False,
) -> None:
    """Replay request traces through scheduler and allocator: pool use, concurrency, preemptions, hit rate.

    Example: pagedtune replay azure_llm_2023_conv --limit 2000 --arrivals saturated --sweep

    No model runs: a step takes simulated time by a stated formula. Exit code 1 if a replay gets stuck or loses a block,
    or, with --against-generator, if a figure is more than 10 % off and its difference not below its floor (0.5
    preemptions in 100 requests, half a percentage point of hits).
    """
    settings = ReplaySettings(
        block_size=block_size, max_num_seqs=max_seqs, token_budget=budget, prefix_cache=prefix_cache,
        arrivals=arrivals, steps_in_flight=in_flight,
    )  # fmt: skip
    console = console_for()
    results: list[ReplayResult] = []
    for name in traces or list(TABLES):
        trace = _find(name, seed).first(limit)
        stand_in = [_stand_in(name, seed).first(limit)] if against else []
        for blocks in _pools(trace, settings, pool, sweep):
            results += (_run(each, replace(settings, num_blocks=blocks), console) for each in (trace, *stand_in))
    compared = [compare(*pair) for pair in zip(results[::2], results[1::2], strict=True)] if against else []
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        console.print(as_table(results))
        if against:
            console.print(as_comparison(results[::2], compared))
    if not all(figure.agrees for figures in compared for figure in figures):
        raise typer.Exit(EXIT_FAILED)


def _find(name: str, seed: int) -> Trace:
    if name in TABLES:
        return generate_trace(TABLES[name], seed=seed)
    if not Path(name).exists():
        raise UsageError(f"{name} is neither a file nor a trace to generate: {', '.join(TABLES)}")
    return load_trace(Path(name))


def _stand_in(name: str, seed: int) -> Trace:
    tables = TABLES.get(Path(name).stem)
    if tables is None or name in TABLES:
        raise UsageError(f"--against-generator compares the file of a trace that can be generated, not {name}")
    return generate_trace(tables, seed=seed)


def _pools(trace: Trace, settings: ReplaySettings, pools: list[int] | None, sweep: bool) -> list[int]:
    """Sizes to try."""
    size = settings.block_size
    if not sweep:
        return pools or [default_pool(trace, size)]
    found = [smallest_pool(trace, size)]
    while found[-1] < default_pool(trace, size, settings.max_num_seqs):
        found.append(2 * found[-1])
    return found


def _run(trace: Trace, settings: ReplaySettings, console: Console) -> ReplayResult:
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{trace.name}, {settings.num_blocks} blocks", total=len(trace.requests))
        try:
            return replay(trace, settings, lambda done, total: progress.update(task, completed=done))
        except PagedRuntimeError as error:
            console.print(f"{trace.name} with {settings.num_blocks} blocks: {error}", markup=False)
            raise typer.Exit(EXIT_FAILED) from error
        except ValueError as error:
            raise UsageError(str(error)) from error


def as_table(results: Iterable[ReplayResult]) -> Table:
    """One line for each result."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("trace", overflow="fold")
    for name in ("blocks", "steps", "concurrency", "peak", "pool use", "filled", "preempted", "recomputed", "hit rate"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("µs/step", justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.trace, str(r.settings.num_blocks), str(r.steps), f"{r.concurrency:.1f}", str(r.peak_concurrency),
            f"{r.pool_use:.1%}", f"{r.utilisation:.2%}", str(r.preemptions), str(r.recomputed_tokens),
            f"{r.hit_rate:.2%}", f"{r.step_us:.0f}",
        )  # fmt: skip
    return table


def as_comparison(files: Sequence[ReplayResult], compared: Sequence[Sequence[Figure]]) -> Table:
    """How far each figure of the generated trace is from the file's: one line for each pair of replays."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("generated, against the file", overflow="fold")
    table.add_column("blocks", justify="right", no_wrap=True)
    for figure in compared[0]:
        table.add_column(figure.name, justify="right", no_wrap=True)
    for file, figures in zip(files, compared, strict=True):
        table.add_row(file.trace, str(file.settings.num_blocks), *map(_as_difference, figures))
    table.caption = "= : within the floor, where a relative difference says nothing; ! : neither within it nor in 10 %"
    return table


def _as_difference(figure: Figure) -> str:
    if figure.is_absolute:
        return "="
    return f"{figure.difference:+.1%}" + ("" if figure.agrees else " !")

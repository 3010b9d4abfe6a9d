"""`pagedtune emulate`: runs one case of a CUDA variant on the virtual GPU and shows what it did."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from pagedtune.harness.case import Case
from pagedtune.harness.emulation import SCHEDULES, emulate
from pagedtune.harness.external import VariantLoadError, load_variant
from pagedtune.harness.listing import parse_settings
from pagedtune.harness.vgpu.ptx_tokens import PtxError
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import LARGEST_STORED, Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import BuildError, Config, Op, Variant
from pagedtune.kernels.workload import Workload

from .cli_check import parse_pairs
from .cli_options import ConfigsOption
from .configs import Configs
from .emulate_view import as_json, show
from .errors import UsageError, unknown_name
from .tables import console_for

_SHAPE = re.compile(r"(\d+)/(\d+)x(\d+)(?:v(\d+))?")
EXIT_FAILED = 1


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("emulate")(emulate_command)


def emulate_command(
    variant: Annotated[str, typer.Option(help="a CUDA variant: its name, or path/to/file.py:ClassName")],
    device: Annotated[str, typer.Option(help="a GPU in configs/gpus; none needs to be here")] = "h100",
    problem: Annotated[
        str, typer.Option(help="a model in configs/models, or query heads/KV heads x head dim, e.g. 32/8x128")
    ] = "llama-3-8b",
    dtype: Annotated[str, typer.Option(help="of query and output: bf16, fp16 or fp32")] = "bf16",
    block_size: Annotated[int, typer.Option(min=1, help="tokens of a KV block")] = 16,
    layout: Annotated[str, typer.Option(help="of the KV pool: nhd, hnd or xpacked")] = "nhd",
    kv_dtype: Annotated[str | None, typer.Option(help="of the KV pool; default: as --dtype")] = None,
    scales: Annotated[
        str | None,
        typer.Option(help="none, per_tensor, per_head, per_token_head; default: per_tensor for 8-bit pools, else none"),
    ] = None,
    num_seqs: Annotated[int, typer.Option(min=1, help="sequences, of one query token each")] = 4,
    context_len: Annotated[int, typer.Option(min=0, help="tokens of each sequence's context")] = 512,
    config: Annotated[list[str] | None, typer.Option(help="a tunable as name=value; repeat for several")] = None,
    schedule: Annotated[
        str, typer.Option(help="order of warps, blocks and copies: plain, reverse, interleaved or adverse")
    ] = "plain",
    sites: Annotated[bool, typer.Option("--sites", help="show the instructions that ran or moved most")] = False,
    as_data: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
    configs: ConfigsOption = None,
) -> None:
    """Run one case of a CUDA variant without a GPU: the PTX of the very binary that ships, with every check on.

    Shows faults with their PTX lines, memory sectors beside the fewest possible, bank conflicts, bytes in flight,
    machine instructions, and the error against the oracle. Figures are counted, not timed: seconds are the emulator's.

    Example: pagedtune emulate --variant triton_split --problem 32/8x128 --context-len 1024 --sites

    Exit code 0: no fault, and the answer is the oracle's. 1: a fault or a wrong answer. 2: it could not be run.
    """
    files = Configs(configs)
    machine = _device(files, device)
    chosen = _variant(variant)
    if schedule not in SCHEDULES:
        raise unknown_name("--schedule", schedule, SCHEDULES)
    workload = Workload.uniform(num_seqs, context_len)
    asked = _problem(files, problem, _dtype("--dtype", dtype))
    case = _case(asked, workload, _format(asked, block_size, kv_dtype, layout, scales))
    settings = _config(chosen, case, machine, parse_pairs(config or ()))
    reason = chosen.reject(case.problem, case.pool_format, settings, machine)
    if reason is not None:
        raise UsageError(f"{chosen.name} refuses {case.problem.key} in {case.pool_format.key}: {reason}")
    try:
        found = emulate(chosen, settings, case, machine, SCHEDULES[schedule])
    except (BuildError, PtxError) as error:
        raise UsageError(f"{chosen.name} cannot be emulated for {machine.name}: {error}") from error
    except ValueError as error:
        raise UsageError(f"{chosen.name} cannot be launched on {machine.name}: {error}") from error
    if as_data:
        print(json.dumps(as_json(found, chosen.name, settings, case, machine.name, schedule, sites), indent=1))
    else:
        show(console_for(), found, chosen.name, settings, case, machine.name, schedule, sites)
    raise typer.Exit(0 if found.passed else EXIT_FAILED)


def _device(files: Configs, name: str) -> Device:
    device = files.gpu(name).device(name)
    if device.kind is not DeviceKind.CUDA:
        gpus = [n for n in files.names("gpus") if files.gpu(n).kind is DeviceKind.CUDA]
        raise UsageError(f"--device {name} is no CUDA GPU: only PTX is emulated, for one of {', '.join(gpus)}")
    return device


def _variant(ref: str) -> Variant:
    try:
        variant = load_variant(ref)
    except (ValueError, VariantLoadError) as error:
        raise UsageError(f"--variant: {error}") from error
    if variant.device_kind is not DeviceKind.CUDA:
        raise UsageError(f"--variant {ref} is for {variant.device_kind} devices: `pagedtune check {ref}` runs it here")
    if variant.op is not Op.ATTENTION:
        raise UsageError(f"--variant {ref} computes {variant.op}: only attention can be emulated so far")
    return variant


def _dtype(option: str, text: str) -> DType:
    known = {d.value: d for d in DType if d is not DType.FP64}
    if text not in known:
        raise unknown_name(option, text, known)
    return known[text]


def _problem(files: Configs, text: str, dtype: DType) -> Problem:
    match = _SHAPE.fullmatch(text)
    try:
        if match:
            q_heads, kv_heads, dim = (int(n) for n in match.groups()[:3])
            return Problem(q_heads, kv_heads, dim, int(match[4] or 0), q_dtype=dtype)
        if text in files.names("models"):
            return files.model(text).problems(dtype)[0][0]
    except ValueError as error:
        raise UsageError(f"--problem {text}: {error}") from error
    raise unknown_name("--problem", text, files.names("models"), "; or a shape such as 32/8x128")


def _format(problem: Problem, block_size: int, kv_dtype: str | None, layout: str, scales: str | None) -> PoolFormat:
    stored = problem.q_dtype if kv_dtype is None else _dtype("--kv-dtype", kv_dtype)
    layouts, kinds = {one.value: one for one in Layout}, {one.value: one for one in ScaleKind}
    if layout not in layouts:
        raise unknown_name("--layout", layout, layouts)
    if scales is not None and scales not in kinds:
        raise unknown_name("--scales", scales, kinds)
    if scales == ScaleKind.PER_TOKEN_HEAD and stored not in LARGEST_STORED:
        raise UsageError(f"--scales {scales} is made for 8-bit pools: add --kv-dtype int8 or --kv-dtype fp8_e4m3")
    usual = ScaleKind.PER_TENSOR if stored in LARGEST_STORED else ScaleKind.NONE
    return PoolFormat(block_size, stored, layouts[layout], usual if scales is None else kinds[scales])


def _case(problem: Problem, workload: Workload, pool_format: PoolFormat) -> Case:
    try:
        return Case(Op.ATTENTION, problem, pool_format, workload)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _config(variant: Variant, case: Case, device: Device, settings: dict[str, str]) -> Config:
    default = variant.default_config(case.problem, case.pool_format, case.bounds, device)
    try:
        return variant.config_from({**default.as_dict(), **parse_settings(variant, settings)})
    except ValueError as error:
        raise UsageError(f"--config: {error}") from error

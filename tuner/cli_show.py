"""`pagedtune devices` and `pagedtune variants`: what there is."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pagedtune.harness.external import VariantLoadError, load_variant
from pagedtune.harness.nvidia import probe_nvidia
from pagedtune.harness.probe import cpu_facts
from pagedtune.kernels.catalogue import VARIANTS
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op, Variant

from .cli_options import ConfigsOption
from .configs import Configs
from .errors import UsageError
from .tables import console_for

EXAMPLE = Problem(32, 8, 128)  # llama-3-8b
EXAMPLE_FORMAT = PoolFormat(16, DType.BF16)
EXAMPLE_GPU = "h100"


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command("devices")(devices_command)
    app.command("variants")(variants_command)


def devices_command(configs: ConfigsOption = None) -> None:
    """List the devices that configs describe, and what is in this machine.

    Example: pagedtune devices
    """
    files = Configs(configs)
    live = {d.name: d for d in (cpu_facts(), probe_nvidia()) if d is not None}
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("name", no_wrap=True)
    view.add_column("product", overflow="fold")  # the longest, and of any length
    view.add_column("arch", no_wrap=True)
    for name in ("units", "shared/block", "L2 or LLC", "memory", "GB/s"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("here", no_wrap=True)
    for name in dict.fromkeys((*live, *files.names("gpus"))):
        device = live.get(name) or files.gpu(name).device(name)
        view.add_row(*_device_row(device), "yes" if name in live else "no")
    console_for().print(view)


def _device_row(device: Device) -> list[str]:
    arch = f"sm_{device.capability}" if device.capability else device.isa
    return [
        device.name,
        device.product,
        arch,
        f"{device.num_units} {'SMs' if device.kind is DeviceKind.CUDA else 'cores'}",
        _size(device.shared_bytes_per_block),
        _size(device.l2_bytes),
        _size(device.memory_bytes),
        f"{device.bandwidth_gb_s:,.0f}"
        if device.bandwidth_gb_s
        else "measured"
        if device.kind is DeviceKind.CPU
        else "",
    ]


def _size(num_bytes: int | None) -> str:
    if not num_bytes:
        return ""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.0f} {name}"
    return f"{num_bytes / 2**10:.0f} KiB"


def variants_command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A variant, or file.py:ClassName.")] = None,
) -> None:
    """List the kernel variants, or describe one: algorithm, tunables, pools, constraints, numerics, promises.

    Example: pagedtune variants cpu_split
    """
    console = console_for()
    if name is None:
        _list_variants(console)
        return
    try:
        variant = load_variant(name)
    except (ValueError, VariantLoadError) as error:
        raise UsageError(str(error)) from error
    _describe(console, variant)


def _list_variants(console: Console) -> None:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "op", "device"):
        view.add_column(column, no_wrap=True)
    view.add_column("configs", justify="right", no_wrap=True)
    view.add_column("what it does")
    for variant in VARIANTS:
        count = len(_space(variant)[0])
        view.add_row(variant.name, variant.op.value, variant.device_kind.value, str(count), variant.summary)
    console.print(view)
    console.print("`pagedtune variants NAME` says more. To add one: README, section on variants.", markup=False)


def _describe(console: Console, variant: Variant) -> None:
    view = Table(box=None, show_header=False, pad_edge=False)
    view.add_column(style="bold", no_wrap=True)
    view.add_column(overflow="fold")
    accepted, rejected = _space(variant)
    view.add_row("name", variant.name)
    view.add_row("op", f"{variant.op.value} on {variant.device_kind.value}")
    view.add_row("algorithm", variant.summary)
    if variant.__doc__:
        view.add_row("", " ".join(variant.__doc__.split()))
    view.add_row("tunables", _tunables(variant))
    place = "this machine" if variant.device_kind is DeviceKind.CPU else EXAMPLE_GPU
    where = f"for llama-3-8b in {EXAMPLE_FORMAT.key} on {place}"
    view.add_row("space", f"{len(accepted)} configs {where}, {len(rejected)} refused".rstrip())
    view.add_row("pools", "\n".join(_pools(variant)))
    view.add_row("constraints", "\n".join(_constraints(variant)) or "none found")
    if variant.op is Op.ATTENTION:
        numerics = variant.numerics(EXAMPLE, EXAMPLE_FORMAT)
        view.add_row(
            "numerics", ", ".join(f"{f.name} {getattr(numerics, f.name)}" for f in fields(numerics)) + " (bf16 in)"
        )
    promises = [f.name.replace("_", " ") for f in fields(variant.properties) if getattr(variant.properties, f.name)]
    view.add_row("promises", ", ".join(promises) or "none")
    console.print(view)
    device = "" if variant.device_kind is DeviceKind.CPU else f" --device {EXAMPLE_GPU}"
    console.print(f"\nProve it: pagedtune check {variant.name}{device}", markup=False)


def _tunables(variant: Variant) -> str:
    values: dict[str, dict[Any, None]] = {f.name: {} for f in fields(variant.config_type)}
    for config in _space(variant)[0]:
        for name, value in config.as_dict().items():
            values[name][value] = None
    default = variant.config_type().as_dict()
    return (
        "\n".join(
            f"{name}: {', '.join(map(str, tried)) or 'not searched'} (default {default[name]})"
            for name, tried in values.items()
        )
        or "none"
    )


def _space(variant: Variant) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    summary = variant.summarise_space(EXAMPLE, EXAMPLE_FORMAT, _example_device(variant))
    return summary.accepted, summary.rejected


def _constraints(variant: Variant) -> list[str]:
    """What the variant refuses, in its own words, over shapes and formats chosen to provoke it."""
    from .provoke import provoked_rejections

    return provoked_rejections(variant, _example_device(variant))


def _pools(variant: Variant) -> list[str]:
    """Dtypes, layouts and scales of the pools it takes, by dtype of the query."""
    from .provoke import accepted_pools

    return accepted_pools(variant, _example_device(variant))


def _example_device(variant: Variant) -> Device:
    """What the descriptions are about: this CPU, or the GPU named `EXAMPLE_GPU`."""
    return cpu_facts() if variant.device_kind is DeviceKind.CPU else Configs().gpu(EXAMPLE_GPU).device(EXAMPLE_GPU)

"""Which device a command is about: the one of this machine, checked against what its config file states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pagedtune.harness.nvidia import probe_nvidia
from pagedtune.harness.prediction import UNCERTAINTY, missing_facts
from pagedtune.harness.probe import cpu_facts, probe_cpu
from pagedtune.kernels.build_native import find_compiler
from pagedtune.kernels.catalogue import variants_for
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.variant import BuildError

from .configs import Configs
from .errors import UsageError, unknown_name

EXACT_FACTS = ("capability", "num_units", "registers_per_unit", "shared_bytes_per_block", "shared_bytes_per_unit")
Check = Callable[[Device], None]
MEMORY_TOLERANCE = 0.10  # drivers report less than the data sheet: ECC and reserved memory take a part


@dataclass(frozen=True)
class Found:
    """The device of a command, with what the user should know about the choice (may be empty).

    Args:
        device: which.
        note: for the user.
        timed: whether its kernels can be timed in this machine; if not, times are predicted.
    """

    device: Device
    note: str = ""
    timed: bool = True


def find_device(
    name: str | None,
    configs: Configs,
    before_measuring: Check = lambda device: None,
    may_predict: bool = False,
) -> Found:
    """The device called `name`, or without a name the NVIDIA GPU of this machine, else its CPU.

    Args:
        name, configs: which, and where known devices are described.
        before_measuring: told the device before its bandwidth is measured, which takes seconds; may raise.
        may_predict: whether a GPU that cannot be timed here will do, as its config file describes it.

    Raises:
        UsageError: an unknown name, a device that is not here (or, with `may_predict`, whose facts do not suffice for
            a prediction), or facts that contradict the config file.
    """
    known = configs.names("gpus")
    if name is not None and name not in known:
        raise unknown_name("GPU", name, known, " (files in configs/gpus; `pagedtune devices` shows them)")
    if name == "cpu":
        return Found(_cpu(before_measuring))
    gpu = probe_nvidia()
    if name is None and gpu is not None and may_predict and gpu.name in known:
        name = gpu.name
    if name is None:
        return Found(_cpu(before_measuring)) if gpu is None else _default_gpu(gpu, configs, before_measuring)
    if may_predict:
        return _predicted(name, gpu, configs, before_measuring)
    if gpu is None or gpu.name != name:
        raise _absent(name, gpu)
    check_facts(configs.gpu(name).device(name), gpu)
    before_measuring(gpu)
    return Found(gpu)


def _predicted(name: str, gpu: Device | None, configs: Configs, before_measuring: Check) -> Found:
    """A GPU as its file describes it."""
    device = configs.gpu(name).device(name)
    if gpu is not None and gpu.name == name:
        check_facts(device, gpu)
        device = replace(device, l2_bytes=device.l2_bytes or gpu.l2_bytes)
    missing = missing_facts(device)
    if missing:
        raise UsageError(
            f"configs/gpus/{name}.yaml lacks {', '.join(missing)}, without which no time can be predicted: add them, "
            "with their source"
        )
    before_measuring(device)
    here = (
        "is here, but not timed by this command" if gpu is not None and gpu.name == name else "is not in this machine"
    )
    note = (
        f"{name} {here}: every kernel is proven by running its PTX on the virtual GPU (verdict emulated), and its time "
        f"is predicted by a model (± {UNCERTAINTY:.0%}), not measured"
    )
    return Found(device, note, timed=False)


def _cpu(before_measuring: Check) -> Device:
    before_measuring(cpu_facts())
    try:
        find_compiler()
        return probe_cpu()
    except BuildError as error:
        raise UsageError(str(error)) from error


def _default_gpu(gpu: Device, configs: Configs, before_measuring: Check) -> Found:
    if not variants_for(DeviceKind.CUDA):
        return Found(
            _cpu(before_measuring),
            f"found {gpu.product}, but this release cannot tune GPU kernels yet: working on the CPU of this machine",
        )
    if gpu.name in configs.names("gpus"):
        check_facts(configs.gpu(gpu.name).device(gpu.name), gpu)
    before_measuring(gpu)
    return Found(gpu)


def _absent(name: str, gpu: Device | None) -> UsageError:
    here = f"its GPU is {gpu.product}" if gpu is not None else "it has no NVIDIA GPU"
    if not variants_for(DeviceKind.CUDA):
        can = "and this release cannot tune GPU kernels yet, so nothing is built, proven or timed for it"
    else:
        can = f"so nothing can be timed for it; `pagedtune tune --device {name}` proves kernels and predicts times"
    return UsageError(
        f"{name} is not in this machine ({here}), {can}; `make tune` without GPU= tunes the CPU kernels here, "
        f"and `pagedtune devices` shows what is known about {name}"
    )


def check_facts(stated: Device, live: Device) -> None:
    """Compares a config file's facts with those of the live device; what either side does not know is skipped.

    Raises:
        UsageError: a contradiction; the message names both values.
    """
    wrong = [
        f"{fact} is {getattr(stated, fact)} in the file and {getattr(live, fact)} on the device"
        for fact in (*EXACT_FACTS, "l2_bytes")
        if getattr(stated, fact) and getattr(live, fact) and getattr(stated, fact) != getattr(live, fact)
    ]
    ours, theirs = stated.memory_bytes, live.memory_bytes
    if ours and theirs and abs(theirs / ours - 1) > MEMORY_TOLERANCE:
        wrong.append(f"memory_bytes is {ours} in the file and {theirs} on the device")
    if wrong:
        raise UsageError(
            f"configs/gpus/{stated.name}.yaml does not describe this {live.product or live.name}: {'; '.join(wrong)}; "
            "a partitioned or different card needs a file and a name of its own"
        )


def default_sweep(name: str | None, configs: Configs) -> str:
    """The sweep for a device where the user names none: `gpu` for a GPU, else `quick`."""
    if name is not None and name in configs.names("gpus"):
        return "gpu" if configs.gpu(name).kind is DeviceKind.CUDA else "quick"
    gpu = probe_nvidia() if name is None else None
    return "gpu" if gpu is not None and gpu.name in configs.names("gpus") else "quick"

"""`VirtualGpu`: runs launch plans by interpreting the PTX of their artifacts, with every check on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from pagedtune.kernels.arguments import Argument, check_abi, check_alignment
from pagedtune.kernels.artifact import Artifact, ArtifactKind, KernelAbi
from pagedtune.kernels.launch import Arg, BoundPlan, CType, KernelStep, MemsetStep, SlotArg
from pagedtune.kernels.native import usable_cores
from pagedtune.kernels.slot import Access

from .address_space import AddressSpace, unwritten_elements
from .core_library import RawOptions, core
from .decoder import decode
from .grid import MAX_FAULTS, forget_module, run_grid
from .parameters import check_places, pack
from .program import Program
from .ptx_parser import parse
from .ptx_tokens import PtxError
from .report import Fault, FaultKind, RunReport, StepReport, VirtualGpuError
from .summary import describe_fault, step_report


@dataclass(frozen=True)
class VirtualGpuOptions:
    """How a virtual GPU runs.

    Args:
        num_threads: CPU threads that share the CTAs; 0 is every core this process may use.
        reverse_warps: warps of a CTA take turns from the last to the first.
        reverse_ctas: CTAs start from the last to the first.
        async_early: asynchronous copies land when they are issued, not when they are waited for.
        quantum: instructions of a warp's turn; small values interleave warps finely.
        shuffle_seed: start each round of turns at a random warp; 0 is off.
        check_races: detect races.
        strict_stores: stores of the value that is already there race like any other. Off, they are counted as benign:
            no hardware shows them, and compilers rely on it where several threads hold one result.
        max_warp_instructions: a warp that executes more is in an endless loop.
        shared_bytes: shared memory of a CTA that the device has (0: no limit).
        capability: compute capability of the device, e.g. 90 (0: any artifact runs).
        raise_faults: raise on faults; otherwise read them from `report`.
        uninitialised: by slot, a boolean tensor (broadcast to the slot's) of elements that hold nothing yet.
        freed: slots whose memory was given back before the launch: any access is a fault.
        windows: by slot, the part of it that exists, one piece or rows far apart.
    """

    num_threads: int = 0
    reverse_warps: bool = False
    reverse_ctas: bool = False
    async_early: bool = False
    quantum: int = 512
    shuffle_seed: int = 0
    check_races: bool = True
    strict_stores: bool = False
    max_warp_instructions: int = 50_000_000
    shared_bytes: int = 0
    capability: int = 0
    raise_faults: bool = True
    uninitialised: Mapping[str, torch.Tensor] = field(default_factory=dict)
    freed: frozenset[str] = frozenset()
    windows: Mapping[str, torch.Tensor] = field(default_factory=dict)


_parse_once = lru_cache(maxsize=1)(parse)  # the entries of one text are loaded one after the other


@lru_cache(maxsize=128)
def load_program(ptx: str, entry: str) -> Program:
    """Parses, decodes and links one entry; the same text is decoded once in a process.

    Raises:
        PtxError: the PTX does not parse, or an instruction is unknown; the message names it and its line.
        ValueError: no such entry.
    """
    with _no_collections():
        program = decode(_parse_once(ptx), entry)
    missing = core().link(program.code, program.keys)
    if missing >= 0:
        raise PtxError(program.lines[missing], f"{program.opcodes[missing]} is not supported by the execution core")
    return program


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keeps the garbage collector from walking everything again and again while many small objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Kernel:
    program: Program
    abi: KernelAbi
    dynamic_shared: int  # what the compiler asked for, where a plan leaves it open


class VirtualGpu:
    """Runs plans whose kernels lie in `artifacts` (each with its PTX). `report` is that of the last run."""

    def __init__(self, artifacts: Sequence[Artifact], options: VirtualGpuOptions | None = None) -> None:
        self.options = options or VirtualGpuOptions()
        self.report = RunReport()
        self._kernels: dict[str, _Kernel] = {}
        for artifact in artifacts:
            self._load(artifact)

    def _load(self, artifact: Artifact) -> None:
        if artifact.kind is ArtifactKind.NATIVE or artifact.ptx_path is None:
            raise ValueError(f"{artifact.path} has no PTX, and the virtual GPU runs nothing else")
        ptx = artifact.ptx_path.read_text()
        for entry, abi in artifact.abi.items():
            program = load_program(ptx, entry)
            _check_target(program, self.options.capability)
            resources = artifact.resources.get(entry)
            self._kernels[entry] = _Kernel(program, abi, resources.dynamic_shared_bytes if resources else 0)

    def prepare(self, bound: BoundPlan) -> Callable[[], None]:
        """See `Executor.prepare`. The function raises VirtualGpuError where the run has faults.

        Raises:
            ValueError: a step names an entry that no artifact has, its arguments do not fit the binary's ABI, or it
                asks for more than the device has.
        """
        for step in bound.plan.steps:
            if isinstance(step, KernelStep):
                self._check_step(bound, step)
            elif not isinstance(step, MemsetStep):
                raise ValueError("a host call cannot run on the virtual GPU")

        def run() -> None:
            self.report = self._run(bound)
            if self.options.raise_faults and not self.report.clean:
                raise VirtualGpuError(self.report)

        return run

    def _check_step(self, bound: BoundPlan, step: KernelStep) -> None:
        if step.entry not in self._kernels:
            raise ValueError(f"no artifact has the entry {step.entry!r}; there are {sorted(self._kernels) or 'none'}")
        kernel = self._kernels[step.entry]
        program = kernel.program
        ctypes = [bound.resolve(arg)[0] for arg in step.args]
        check_abi(step.entry, kernel.abi, ctypes)
        check_places(program, kernel.abi, ctypes)
        if step.cluster != (1, 1, 1):
            raise ValueError(f"{step.entry}: clusters are not supported by the virtual GPU")
        threads = step.block[0] * step.block[1] * step.block[2]
        if not 1 <= threads <= 1024 or min(step.grid) < 1:
            raise ValueError(f"{step.entry}: grid {step.grid} of blocks {step.block} cannot be launched")
        if program.block and tuple(step.block[: len(program.block)]) != program.block:
            raise ValueError(f"{step.entry}: compiled for blocks of {program.block}, not {step.block}")
        if program.max_threads and threads > program.max_threads:
            raise ValueError(f"{step.entry}: compiled for at most {program.max_threads} threads, not {threads}")
        shared = program.static_shared + max(step.shared_bytes, kernel.dynamic_shared)
        if self.options.shared_bytes and shared > self.options.shared_bytes:
            raise ValueError(
                f"{step.entry}: {shared} bytes of shared memory, the device has {self.options.shared_bytes}: "
                "choose smaller tiles or fewer stages"
            )

    def _run(self, bound: BoundPlan) -> RunReport:
        space = AddressSpace(bound, self.options.uninitialised, self.options.freed, self.options.windows)
        values = [self._arguments(bound, space, s) if isinstance(s, KernelStep) else b"" for s in bound.plan.steps]
        steps: list[StepReport] = []
        faults: list[Fault] = []
        previous: StepReport | None = None
        written: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        for step, params in zip(bound.plan.steps, values, strict=True):
            if isinstance(step, MemsetStep):
                _memset(bound, space, step)
                previous = None
                continue
            if not isinstance(step, KernelStep):
                continue
            _set_pending(space, step, previous)
            report, found = self._launch(space, step, params)
            steps.append(report)
            previous = report
            faults += found
            for a in space.allocations:
                written[a.base] = written[a.base] | a.written if a.base in written else a.written
            if found:
                break
        if not faults:
            faults += _unwritten(bound, space, written)
        return RunReport(tuple(steps), tuple(faults), len(faults))

    def _arguments(self, bound: BoundPlan, space: AddressSpace, step: KernelStep) -> bytes:
        """The parameter buffer, with virtual addresses; checks the alignments that the binary assumes."""
        kernel = self._kernels[step.entry]
        arguments = [Argument(arg, *self._resolve(bound, space, arg)) for arg in step.args]
        check_alignment(step.entry, kernel.abi, arguments)
        return pack(kernel.program, kernel.abi, arguments)

    @staticmethod
    def _resolve(bound: BoundPlan, space: AddressSpace, arg: Arg) -> tuple[CType, int | float]:
        ctype, value = bound.resolve(arg)
        return ctype, space.address(arg.slot) if isinstance(arg, SlotArg) and value else value

    def _launch(self, space: AddressSpace, step: KernelStep, params: bytes) -> tuple[StepReport, list[Fault]]:
        kernel = self._kernels[step.entry]
        program = kernel.program
        dynamic_shared = max(step.shared_bytes, kernel.dynamic_shared)
        raw = run_grid(program, space, step.grid, step.block, params, dynamic_shared, self._raw_options(step))
        faults = [describe_fault(f, program, space, step) for f in raw.faults]
        report = step_report(program, space, raw.sites, raw.totals, raw.seconds)
        forget_module(space)
        return report, faults

    def _raw_options(self, step: KernelStep) -> RawOptions:
        o = self.options
        cooperative = step.attributes.cooperative
        return RawOptions(
            num_threads=1 if cooperative else o.num_threads or usable_cores(),
            reverse_warps=o.reverse_warps,
            reverse_ctas=o.reverse_ctas,
            async_early=o.async_early,
            check_races=o.check_races,
            max_faults=MAX_FAULTS,
            quantum=max(1, o.quantum),
            cooperative=cooperative,
            max_warp_instructions=o.max_warp_instructions,
            shuffle_seed=o.shuffle_seed,
            strict_stores=o.strict_stores,
        )


def _set_pending(space: AddressSpace, step: KernelStep, previous: StepReport | None) -> None:
    """Marks what a kernel must not touch before `griddepcontrol.wait`: what the one before it wrote or read.

    That one's own predecessors have ended where it waited for them; else they are still in flight.
    """
    if previous is None or not step.attributes.programmatic_dependent_launch:
        for a in space.allocations:
            a.pending_written = a.pending_read = None
        return
    waited = any(s.executed for s in previous.sites if s.instruction == "griddepcontrol.wait")
    for a in space.allocations:
        written, read = a.written, a.read
        if not waited and a.pending_written is not None and a.pending_read is not None:
            written, read = written | a.pending_written, read | a.pending_read
        a.pending_written, a.pending_read = written, read


def _check_target(program: Program, capability: int) -> None:
    digits = "".join(c for c in program.target if c.isdigit())
    specific = program.target[-1:] in ("a", "f")
    if not capability or not digits:
        return
    target = int(digits)
    if target > capability or (specific and target != capability):
        raise ValueError(
            f"{program.entry} is compiled for {program.target}; the device is sm_{capability}: build it for that"
        )


def _memset(bound: BoundPlan, space: AddressSpace, step: MemsetStep) -> None:
    tensor = bound.tensors[step.workspace]
    tensor.view(torch.uint8).fill_(step.byte)
    allocation = space.by_name(step.workspace)
    if allocation is not None and allocation.init is not None:
        allocation.init[:] = 255


def _unwritten(
    bound: BoundPlan, space: AddressSpace, written: Mapping[int, np.ndarray[tuple[int], np.dtype[np.uint8]]]
) -> list[Fault]:
    faults = []
    last = next((s.entry for s in reversed(bound.plan.steps) if isinstance(s, KernelStep)), "")
    for name, spec in bound.plan.slots.items():
        if spec.access is not Access.OUT or name not in bound.tensors:
            continue
        missing = 0
        for tensor, allocation in space.pieces(name):
            if allocation.base in written:
                allocation.written = written[allocation.base]
            missing += unwritten_elements(tensor, allocation)
        if missing:
            total = bound.tensors[name].numel()
            what = f"{missing} of {total} elements of {name}"
            faults.append(Fault(FaultKind.UNWRITTEN_OUTPUT, last, allocation=what))
    return faults

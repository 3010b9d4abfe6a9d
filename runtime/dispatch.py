"""Which variant and config serve a launch on this machine, why, and with what evidence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..kernels.artifact import Artifact
from ..kernels.bounds import Bounds, Bucket, bucket_of
from ..kernels.catalogue import VARIANTS
from ..kernels.device import Device
from ..kernels.dispatch import DispatchTable, Winner
from ..kernels.pool_format import PoolFormat
from ..kernels.problem import Problem
from ..kernels.record import TimeEvidence
from ..kernels.variant import Config, Op, Variant
from .artifact_source import ArtifactSource, ArtifactUnavailable, BuiltArtifacts
from .blocklist import Blocklist
from .errors import PagedRuntimeError
from .ladder import Rung, recompute_splits, rung_of

_LOG = logging.getLogger(__name__)
# By op, tried in order where no table decides, each on its own kind of device. The last CPU one of each needs no binary
# and takes every float format.
DEFAULT_FALLBACKS = {
    Op.ATTENTION: ("cpu_split", "eager", "triton_split", "cuda_paged"),
    Op.KV_WRITE: ("cpu_kv_write", "eager_kv_write", "cuda_kv_write"),
    Op.COPY_BLOCKS: ("cpu_copy_blocks", "eager_copy_blocks", "cuda_copy_blocks"),
    Op.GATHER_KV: ("cpu_gather_kv", "eager_gather_kv", "cuda_gather_kv"),
    Op.PACK_BLOCKS: ("cpu_pack_blocks", "eager_pack_blocks", "cuda_pack_blocks"),
    Op.UNPACK_BLOCKS: ("cpu_unpack_blocks", "eager_unpack_blocks", "cuda_unpack_blocks"),
}


class NoKernel(PagedRuntimeError):
    """No variant can serve a launch; the message gives the reason of each."""


@dataclass(frozen=True)
class Selection:
    """What runs within a bucket of bounds.

    Args:
        bucket: the largest bounds that it serves.
        variant, config: what runs.
        artifacts: its binaries.
        rung: how well the choice is founded.
        why: in one sentence.
        winner: the table's entry that decided, with its evidence; None below the measured rungs.
        passed_over: better choices that could not be taken, each with its reason.
    """

    bucket: Bucket
    variant: Variant
    config: Config
    artifacts: tuple[Artifact, ...]
    rung: Rung
    why: str
    winner: Winner | None = None
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Choice:
    name: str
    rung: Rung
    why: str
    winner: Winner | None = None


@dataclass(frozen=True)
class Dispatch:
    """Everything that a choice depends on, the same for all layers and ops of a model.

    Args:
        device: this machine.
        artifacts: where binaries come from.
        table: what tuning decided; None if nothing was tuned.
        variants: all that may run.
        fallbacks: by op, names of variants tried in order, with their default config, where no table decides.
        blocklist: variants that must not run.
        calibrated: entries measured on this very machine; each replaces the table's entry of the same cell.
    """

    device: Device
    artifacts: ArtifactSource = field(default_factory=BuiltArtifacts)
    table: DispatchTable | None = None
    variants: tuple[Variant, ...] = VARIANTS
    fallbacks: dict[Op, tuple[str, ...]] = field(default_factory=lambda: dict(DEFAULT_FALLBACKS))
    blocklist: Blocklist = field(default_factory=Blocklist.from_environment)
    calibrated: tuple[Winner, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(self.blocklist.names - {v.name for v in self.variants})
        if unknown:
            _LOG.warning("%s names %s, which is not installed here", self.blocklist.source, ", ".join(unknown))

    def select(self, op: Op, problem: Problem, pool_format: PoolFormat, bounds: Bounds) -> Selection:
        """The best choice that can run here for everything in the bucket of `bounds`.

        Raises:
            NoKernel: every choice is blocked, refuses the problem or lacks its binary.
        """
        bucket = bucket_of(bounds)
        passed_over: list[str] = []
        for choice in self._choices(op, problem, pool_format, bucket.bounds):
            taken = self._try(choice, op, problem, pool_format, bucket)
            if isinstance(taken, Selection):
                return replace(taken, passed_over=tuple(passed_over))
            if taken not in passed_over:
                passed_over.append(taken)
        raise NoKernel(
            f"no {op} kernel for {problem.key} on {pool_format.key} within {bucket.key}: {'; '.join(passed_over)}"
        )

    def _choices(self, op: Op, problem: Problem, pool_format: PoolFormat, bounds: Bounds) -> Iterator[_Choice]:
        """In order of preference."""
        if self.table is not None and any(e.op == op for e in self.table.entries):
            yield from self._tuned(self.table, op, problem, pool_format, bounds)
        others = {v.name for v in self.variants if v.device_kind is not self.device.kind}
        fallbacks = [name for name in self.fallbacks.get(op, ()) if name not in others]
        for i, name in enumerate(fallbacks):
            rung = Rung.SAFE if i == len(fallbacks) - 1 else Rung.UNTUNED
            yield _Choice(name, rung, "nothing was measured for this: default config")

    def _tuned(
        self, table: DispatchTable, op: Op, problem: Problem, pool_format: PoolFormat, bounds: Bounds
    ) -> Iterator[_Choice]:
        winner = table.lookup(problem, pool_format, bounds, op)
        here = next((e for e in self.calibrated if winner is not None and e.cell == winner.cell), None)
        if here is not None:
            yield _Choice(here.variant, Rung.EXACT, f"won {here.bucket.key} when calibrated on this machine", here)
        rung = rung_of(table.device, self.device)
        if rung is None:
            return
        if winner is not None:
            where = "this device" if rung is Rung.EXACT else table.device
            won = "is predicted to win" if winner.time_evidence is TimeEvidence.PREDICTED else "won"
            yield _Choice(winner.variant, rung, f"{won} {winner.bucket.key} ({winner.workload}) on {where}", winner)
        asked = (op, problem, pool_format)
        same = [e for e in table.entries if (e.op, e.problem, e.pool_format) == asked]
        # Beyond the tuned range, what won the largest launches is the best guess.
        for entry in sorted(same, key=lambda e: e.bucket, reverse=True)[:1]:
            why = f"no cell covers {bucket_of(bounds).key}: default config of the winner of {entry.bucket.key}"
            yield _Choice(entry.variant, Rung.UNTUNED, why)

    def _try(
        self, choice: _Choice, op: Op, problem: Problem, pool_format: PoolFormat, bucket: Bucket
    ) -> Selection | str:
        """The selection, or why it cannot be."""
        variant = next((v for v in self.variants if v.name == choice.name and v.op is op), None)
        if variant is None:
            return f"{choice.name} is not installed"
        if variant.name in self.blocklist.names:
            return f"{variant.name} is switched off by {self.blocklist.source}"
        if variant.device_kind is not self.device.kind:
            return f"{variant.name} runs on {variant.device_kind}, and this is {self.device.kind}"
        config = self._config(variant, choice, problem, pool_format, bucket.bounds)
        reason = variant.reject(problem, pool_format, config, self.device)
        if reason is not None:
            return f"{variant.name}: {reason}"
        try:
            artifacts = self.artifacts.artifacts(variant, problem, pool_format, config, self.device)
        except ArtifactUnavailable as error:
            return f"{variant.name}: {error}"
        return Selection(bucket, variant, config, artifacts, choice.rung, choice.why, choice.winner)

    def _config(
        self, variant: Variant, choice: _Choice, problem: Problem, pool_format: PoolFormat, bounds: Bounds
    ) -> Config:
        if choice.winner is None or self.table is None:
            return variant.default_config(problem, pool_format, bounds, self.device)
        config = variant.config_from(choice.winner.config)
        return config if choice.rung is Rung.EXACT else recompute_splits(config, self.table.device, self.device)

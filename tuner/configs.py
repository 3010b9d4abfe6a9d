"""Devices, models and sweeps as the files in `configs/` state them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from pagedtune.kernels.bounds import Bounds, Bucket, bucket_of
from pagedtune.kernels.device import Device, DeviceKind
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import LARGEST_STORED, Layout, PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload

from .errors import UsageError, unknown_name
from .yaml_files import StrictModel, read_yaml

Positive = Annotated[int, Field(ge=1)]
MAX_BLOCK_SIZE = 256  # tokens; serving engines use 8 to 256, and slots wasted in last blocks grow with it
BlockSize = Annotated[int, Field(ge=1, le=MAX_BLOCK_SIZE)]
CACHE_OPS = tuple(op for op in Op if op is not Op.ATTENTION)
WORKLOADS = ("uniform", "ragged", "one_long")
M = TypeVar("M", bound=StrictModel)


class GpuFile(StrictModel):
    """`configs/gpus/NAME.yaml`: what the vendor publishes about a device. See `Device` for the fields."""

    kind: DeviceKind = Field(description="cpu or cuda")
    source: str = Field(description="where the facts were published")
    product: str = ""
    capability: Annotated[int, Field(ge=0)] = 0
    num_units: Positive | None = None
    registers_per_unit: Annotated[int, Field(ge=0)] = 0
    shared_bytes_per_block: Annotated[int, Field(ge=0)] = 0
    shared_bytes_per_unit: Annotated[int, Field(ge=0)] = 0
    l2_bytes: Positive | None = None
    memory_bytes: Positive | None = None
    bandwidth_gb_s: Annotated[float, Field(gt=0)] | None = None
    base_clock_mhz: Annotated[float, Field(gt=0)] | None = None
    boost_clock_mhz: Annotated[float, Field(gt=0)] | None = None

    def device(self, name: str) -> Device:
        """The facts as a device called `name`."""
        facts = self.model_dump(exclude={"source", "num_units"})
        return Device(name=name, num_units=self.num_units or 1, **facts)


class ModelFile(StrictModel):
    """`configs/models/NAME.yaml`: attention of a model as published, before tensor parallelism."""

    num_q_heads: Positive = Field(description="query heads of the whole model")
    num_kv_heads: Positive = Field(description="KV heads of the whole model")
    head_dim: Positive = Field(description="elements of one head")
    num_layers: Positive = Field(description="layers with attention")
    dtypes: Annotated[tuple[DType, ...], Field(min_length=1)] = Field(description="query dtypes worth tuning")
    source: str = Field(description="where the facts were published")
    tensor_parallel: Positive = 1
    window: Positive | None = None
    num_full_layers: Annotated[int, Field(ge=0)] = 0  # layers without the window, where there is one
    soft_cap: Annotated[float, Field(gt=0)] | None = None
    sinks: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_q_heads % self.tensor_parallel:
            raise ValueError(
                f"num_q_heads={self.num_q_heads} does not divide over tensor_parallel={self.tensor_parallel} ranks"
            )
        ranks, heads = self.tensor_parallel, self.num_kv_heads
        if max(ranks, heads) % min(ranks, heads):
            raise ValueError(
                f"num_kv_heads={heads} and tensor_parallel={ranks}: one must be a multiple of the other, "
                "so that each rank has the same whole number of KV heads"
            )
        if self.num_full_layers >= self.num_layers or (self.num_full_layers and self.window is None):
            raise ValueError(
                f"num_full_layers={self.num_full_layers}: it counts the layers without the window, so it needs "
                f"`window` and must be below num_layers={self.num_layers}"
            )
        for dtype in self.dtypes:
            self.problems(dtype)
        return self

    @property
    def rank_heads(self) -> tuple[int, int]:
        """Query and KV heads of one rank; KV heads are replicated where there are fewer than ranks."""
        return self.num_q_heads // self.tensor_parallel, max(1, self.num_kv_heads // self.tensor_parallel)

    def problems(self, dtype: DType) -> tuple[tuple[Problem, int], ...]:
        """The attention problems of one rank, each with the number of layers that have it."""
        q_heads, kv_heads = self.rank_heads
        windows: list[tuple[int | None, int]] = [(self.window, self.num_layers - self.num_full_layers)]
        if self.num_full_layers:
            windows.append((None, self.num_full_layers))
        return tuple(
            (
                Problem(
                    q_heads,
                    kv_heads,
                    self.head_dim,
                    q_dtype=dtype,
                    window=window,
                    soft_cap=self.soft_cap,
                    sinks=self.sinks,
                ),
                layers,
            )
            for window, layers in windows
        )


class BucketEntry(StrictModel):
    """One class of batches: its largest bounds and the share of decode steps that fall into it."""

    num_seqs: Positive = Field(description="most sequences of the batch")
    context_len: Positive = Field(description="longest context in tokens")
    weight: Annotated[float, Field(gt=0)] = Field(description="share of decode steps, any positive number")

    @property
    def bucket(self) -> Bucket:
        """The bucket that these bounds fall into."""
        return bucket_of(Bounds(self.num_seqs, self.context_len))


class SweepFile(StrictModel):
    """`configs/sweeps/NAME.yaml`: what one tune covers."""

    description: str = Field(description="one line on what it is for")
    models: Annotated[tuple[str, ...], Field(min_length=1)] = Field(description="names in configs/models")
    dtypes: Annotated[tuple[DType, ...], Field(min_length=1)] = Field(description="query dtypes")
    block_sizes: Annotated[tuple[BlockSize, ...], Field(min_length=1)] = Field(
        description=f"tokens per KV block, 1 to {MAX_BLOCK_SIZE}"
    )
    layouts: Annotated[tuple[Layout, ...], Field(min_length=1)] = Field(description="nhd, hnd or xpacked")
    buckets: Annotated[tuple[BucketEntry, ...], Field(min_length=1)] = Field(description="batch shapes with weights")
    workloads: Annotated[tuple[str, ...], Field(min_length=1)] = Field(description="distributions of lengths")
    kv_dtypes: tuple[DType, ...] = ()  # empty: the dtype of the query
    scale_kinds: Annotated[tuple[ScaleKind, ...], Field(min_length=1)] = (ScaleKind.NONE,)
    mode: Literal["cold", "hot"] = "cold"  # a hot time is of KV that the last launch left in the caches
    max_candidates: Positive | None = None  # of a variant in a cell; none: all that it lists
    # Tuned beside attention where times are predicted, i.e. for a GPU that is not timed here. A tune of a CPU leaves
    # them out whatever this says: only attention is timed. Empty: none.
    cache_ops: tuple[Op, ...] = CACHE_OPS
    max_cache_candidates: Positive | None = None  # of a variant in a cell of a cache operation; none: max_candidates
    candidate_limit_s: Annotated[float, Field(gt=0)] = 30.0  # a gate job of one candidate that takes longer hangs

    @field_validator("workloads")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in WORKLOADS:
                raise ValueError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
        return names

    @field_validator("cache_ops")
    @classmethod
    def _cache_ops(cls, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        if Op.ATTENTION in ops:
            raise ValueError(f"attention is always tuned; cache operations are {', '.join(CACHE_OPS)}")
        return ops

    @field_validator("buckets")
    @classmethod
    def _distinct(cls, entries: tuple[BucketEntry, ...]) -> tuple[BucketEntry, ...]:
        keys = [entry.bucket.key for entry in entries]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"two entries fall into the bucket {key} (limits round up to powers of two)")
        return entries

    def formats(self, dtype: DType) -> tuple[PoolFormat, ...]:
        """The pool formats to compare for queries of `dtype`; scales of tokens for 8-bit pools only."""
        return tuple(
            PoolFormat(size, kv_dtype, layout, scale_kind)
            for kv_dtype in self.kv_dtypes or (dtype,)
            for scale_kind in self.scale_kinds
            if scale_kind is not ScaleKind.PER_TOKEN_HEAD or kv_dtype in LARGEST_STORED
            for layout in self.layouts
            for size in self.block_sizes
        )

    def workload(self, name: str, bucket: Bucket) -> Workload:
        """The batch of distribution `name` at the bounds of `bucket`."""
        return Workload.named(name, bucket.max_num_seqs, bucket.max_context_len)


class Configs:
    """The config files of one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        """Uses `folder`, or the one that belongs to the package."""
        self.folder = config_dir() if folder is None else folder
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder} is not a folder: --configs needs one with gpus/, models/ and sweeps/")

    def names(self, group: str) -> tuple[str, ...]:
        """Names in `gpus`, `models` or `sweeps`."""
        return tuple(sorted(path.stem for path in (self.folder / group).glob("*.yaml")))

    def gpu(self, name: str) -> GpuFile:
        """A device's published facts."""
        return self._read("gpus", "GPU", name, GpuFile)

    def model(self, name: str) -> ModelFile:
        """A model's attention."""
        return self._read("models", "model", name, ModelFile)

    def sweep(self, name: str) -> SweepFile:
        """A sweep by name, or by the path of a YAML file."""
        if name.endswith((".yaml", ".yml")):
            return read_yaml(Path(name), SweepFile)
        return self._read("sweeps", "sweep", name, SweepFile)

    def _read(self, group: str, kind: str, name: str, model: type[M]) -> M:
        if name not in self.names(group):
            raise unknown_name(kind, name, self.names(group), f" (files in {self._shown(group)})")
        return read_yaml(self.folder / group / f"{name}.yaml", model, self._shown(f"{group}/{name}.yaml"))

    def _shown(self, inner: str) -> str:
        path = self.folder / inner
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def config_dir() -> Path:
    """The folder `configs` that belongs to this package, in a checkout or installed."""
    spec = importlib.util.find_spec("pagedtune.configs")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not locations:
        raise UsageError("the package's configs folder is missing: install pagedtune again, or pass --configs FOLDER")
    return Path(locations[0]).resolve()

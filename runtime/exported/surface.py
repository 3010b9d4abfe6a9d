"""Everything that an engine imports from an exported package."""

from __future__ import annotations

from ...kernels.bounds import Bounds
from ...kernels.device import Device, DeviceKind
from ...kernels.dtypes import DType
from ...kernels.pool_format import Layout, PoolFormat, ScaleKind
from ...kernels.problem import Problem
from ..adapters.attention_probe import UnsupportedModel
from ..adapters.config_problem import problem_of_config
from ..adapters.transformers import PagedTransformer
from ..allocator import BlockAllocator
from ..attention import PagedAttention, PagedOp, Workspaces
from ..beam import BeamParams, BeamSearch, Hypothesis
from ..block_memory import BlockMemory
from ..block_tables import BlockTables
from ..decode_loop import DecodeLoop, Forward, StepModel
from ..dispatch import Dispatch, NoKernel
from ..errors import (
    CacheInUse,
    InvalidRequest,
    InvalidToken,
    InvariantViolation,
    PagedRuntimeError,
    PoolExhausted,
    RequestFinished,
    RequestTooLarge,
    UnknownRequest,
)
from ..explanation import Explanation
from ..graph_batch import GraphBatch
from ..host_pool import HostPool
from ..kv_cache import KVCache
from ..kv_ledger import KVLedger
from ..kv_shadow import Fault, KVShadow
from ..latent_cache import LatentCache
from ..launch_group import LayerAttention
from ..limits import BatchLimits
from ..metrics import PoolBytes, SequenceReport, Snapshot
from ..model_attention import ModelAttention
from ..plan import StepOutput, StepPlan
from ..prefix_cache import PrefixCache
from ..prefix_events import Namespace, PrefixStatistics
from ..sampling import SamplingParams
from ..scheduler import Scheduler
from ..scheduler_config import SchedulerConfig
from ..sequence import Finished, FinishReason, Request
from ..step_times import StepTimes
from ..swap import Preemption, SwapPolicy, SwapSpace, copy_blocks
from .calibrate import calibrate
from .integrity import PackageError
from .package import Package, load

__all__ = [
    "BatchLimits",
    "BeamParams",
    "BeamSearch",
    "BlockAllocator",
    "BlockMemory",
    "BlockTables",
    "Bounds",
    "CacheInUse",
    "DType",
    "DecodeLoop",
    "Device",
    "DeviceKind",
    "Dispatch",
    "Explanation",
    "Fault",
    "FinishReason",
    "Finished",
    "Forward",
    "GraphBatch",
    "HostPool",
    "Hypothesis",
    "InvalidRequest",
    "InvalidToken",
    "InvariantViolation",
    "KVCache",
    "KVLedger",
    "KVShadow",
    "LatentCache",
    "LayerAttention",
    "Layout",
    "ModelAttention",
    "Namespace",
    "NoKernel",
    "Package",
    "PackageError",
    "PagedAttention",
    "PagedOp",
    "PagedRuntimeError",
    "PagedTransformer",
    "PoolBytes",
    "PoolExhausted",
    "PoolFormat",
    "Preemption",
    "PrefixCache",
    "PrefixStatistics",
    "Problem",
    "Request",
    "RequestFinished",
    "RequestTooLarge",
    "SamplingParams",
    "ScaleKind",
    "Scheduler",
    "SchedulerConfig",
    "SequenceReport",
    "Snapshot",
    "StepModel",
    "StepOutput",
    "StepPlan",
    "StepTimes",
    "SwapPolicy",
    "SwapSpace",
    "UnknownRequest",
    "UnsupportedModel",
    "Workspaces",
    "calibrate",
    "copy_blocks",
    "load",
    "problem_of_config",
]

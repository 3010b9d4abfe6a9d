"""The cells of cache operations: launches as the runtime plans them (`cache_limits` says what bounds mean for each op).

A cell's winner serves all smaller launches of its op, so each op is tuned at the largest launch that is usual, and
writes at two: a batch that decodes, a token a sequence, and a chunk of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedtune.kernels.bounds import Bounds, Bucket, bucket_of
from pagedtune.kernels.pool_format import PoolFormat
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload
from pagedtune.runtime.host_pool import STAGING_BYTES

from .configs import Configs, SweepFile
from .space import Cell, pools_of

CHUNK_TOKENS = 2048  # of a prompt that are prefilled in one step: what serving engines take, or more than they do
DECODE, CHUNK, PAIRS, LISTED = "decode", "chunk", "pairs", "blocks"  # names of workloads
Launch = tuple[Bucket, Workload]


def cache_cells_of(configs: Configs, sweep: SweepFile, models: Sequence[str] = ()) -> tuple[Cell, ...]:
    """The cells of the sweep's cache operations in its own order; `models` replaces the sweep's list.

    They have no share of the decode steps, so their bucket weight is 0.

    Raises:
        UsageError: see `cells_of`.
    """
    return tuple(
        Cell(op, name, problem, pool_format, bucket, workload, layers, 0.0)
        for name in models or sweep.models
        for problem, pool_format, layers in pools_of(configs, sweep, name)
        for op in dict.fromkeys(sweep.cache_ops)
        for bucket, workload in launches_of(op, sweep, problem, pool_format)
    )


def launches_of(op: Op, sweep: SweepFile, problem: Problem, pool_format: PoolFormat) -> list[Launch]:
    """What a cache operation is tuned at: each launch fills the bounds of its bucket.

    - K/V write: a token for each sequence of the sweep's largest batch, each in a block of its own; and
      `CHUNK_TOKENS` adjacent tokens of one prompt.
    - Block copy: a pair for each sequence of the largest batch, as when all of them fork.
    - Gather: the sweep's batches with the longest context and with the most sequences.
    - Pack and unpack: the blocks, all layers together, that fill the staging buffer of `HostPool`.
    """
    most = max(entry.bucket.max_num_seqs for entry in sweep.buckets)
    if op is Op.KV_WRITE:
        chunk = Workload((CHUNK_TOKENS,), (CHUNK_TOKENS,), CHUNK)
        return _distinct([_units(most, DECODE), (bucket_of(Bounds(CHUNK_TOKENS, 1)), chunk)])
    if op is Op.COPY_BLOCKS:
        return [_units(most, PAIRS)]
    if op is Op.GATHER_KV:
        buckets = [entry.bucket for entry in sweep.buckets]
        ends = (max(buckets, key=lambda b: (b.max_context_len, b)), max(buckets))
        return _distinct([(bucket, sweep.workload(sweep.workloads[0], bucket)) for bucket in ends])
    block_bytes = pool_format.block_size * pool_format.bytes_per_token(problem)
    return [_units(max(1, STAGING_BYTES // block_bytes), LISTED)]


def _units(count: int, name: str) -> Launch:
    """As many tokens, pairs or blocks as the bucket of `count` holds, each a sequence of one token."""
    bucket = bucket_of(Bounds(count, 1))
    return bucket, Workload((1,) * bucket.max_num_seqs, name=name)


def _distinct(launches: Sequence[Launch]) -> list[Launch]:
    """One launch of each bucket, the first."""
    return list({bucket: (bucket, workload) for bucket, workload in reversed(launches)}.values())[::-1]


def launch_text(op: str, bucket: Bucket, workload: str) -> str:
    """What a cell's launch does, for people, e.g. `write chunk of 2,048`: tokens, blocks, or sequences and tokens."""
    count = f"{bucket.max_num_seqs:,}"
    texts = {
        Op.KV_WRITE: f"write chunk of {count}" if workload == CHUNK else f"write {count} decoded",
        Op.COPY_BLOCKS: f"copy {count} blocks",
        Op.GATHER_KV: f"gather {count} x {bucket.max_context_len:,}",
        Op.PACK_BLOCKS: f"pack {count} blocks",
        Op.UNPACK_BLOCKS: f"unpack {count} blocks",
    }
    return texts[Op(op)]

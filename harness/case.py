"""What one check of the gate runs: a problem, a pool format, lengths, how the numbers are made, and the hazards."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import StrEnum

from pagedtune.kernels.bounds import Bounds, bucket_of
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import PoolFormat, ScaleKind
from pagedtune.kernels.problem import Problem
from pagedtune.kernels.variant import Op
from pagedtune.kernels.workload import Workload


class Family(StrEnum):
    """How the numbers are made. The gate always uses all three: each hides the faults that another one finds."""

    RANDOM = "random"  # normal numbers: finds faults of scale and precision
    NEEDLE = "needle"  # each query aimed at one token (first, last, block or split edge): finds faults of structure
    CODED = "coded"  # V holds block, slot, head and dim as small integers: a wrong read shows what was read


class Hazard(StrEnum):
    """What else is unusual about a case. NaN and finite poison, guard bands and canaries are part of every case."""

    IDENTITY_TABLE = "identity_table"
    SHARED_BLOCKS = "shared_blocks"
    TAIL_MINUS_ONE = "tail_minus_one"
    TAIL_INT_MAX = "tail_int_max"
    TAIL_FOREIGN = "tail_foreign"
    STRIDED = "strided"
    OFFSET_BASE = "offset_base"
    STRIDED_POOL = "strided_pool"
    HIGH_POOL = "high_pool"
    LOOSE_BOUNDS = "loose_bounds"
    REPLAY = "replay"
    NO_LSE = "no_lse"
    SATURATED_CAP = "saturated_cap"
    HUGE_SINKS = "huge_sinks"
    INF_SINKS = "inf_sinks"
    LIVE_NAN = "live_nan"
    NAN_SCORES = "nan_scores"
    FAR_QUERIES = "far_queries"
    ZERO_SCALES = "zero_scales"
    STEEP_SCALES = "steep_scales"
    SKIPPED_TOKENS = "skipped_tokens"
    HIGH_STAGING = "high_staging"
    HIGH_ROWS = "high_rows"
    GAPPED_POOL = "gapped_pool"

    @property
    def reason(self) -> str:
        """Why it is tested, in one line."""
        return HAZARD_REASONS[self]


HAZARD_REASONS = {
    Hazard.IDENTITY_TABLE: "block i of the pool is block i of the batch: address arithmetic without indirection",
    Hazard.SHARED_BLOCKS: "two sequences name the same blocks (a shared prefix): one copy must serve both",
    Hazard.TAIL_MINUS_ONE: "table entries past the end are -1: following one reads before the pool",
    Hazard.TAIL_INT_MAX: "table entries past the end are 2^31-1: following one leaves the pool",
    Hazard.TAIL_FOREIGN: "table entries past the end name another sequence's block: following one reads its tokens",
    Hazard.STRIDED: "q, out, lse and table are slices of larger tensors: a kernel must use the strides it is given",
    Hazard.OFFSET_BASE: "base pointers are aligned to one element only: wide loads must not assume more",
    Hazard.STRIDED_POOL: "K and V blocks alternate in one allocation: the block stride is not the block's size",
    Hazard.HIGH_POOL: "live blocks lie above 2^32 elements: a 32-bit offset wraps to the start of the pool",
    Hazard.LOOSE_BOUNDS: "the plan's bounds exceed the batch, as after a graph capture at the maximum",
    Hazard.REPLAY: "the bound plan ran before with other lengths: nothing may be remembered between launches",
    Hazard.NO_LSE: "the optional LSE output is absent: nothing may be written through a null pointer",
    Hazard.SATURATED_CAP: "|score / soft_cap| exceeds 88: a tanh made of exp overflows in fp32",
    Hazard.HUGE_SINKS: "sinks of ±10^4: exp(sink) alone overflows, so the sink must take part in the maximum",
    Hazard.INF_SINKS: "sinks of ±inf: -inf must change nothing, +inf gives O = 0 and LSE = inf, never NaN",
    Hazard.LIVE_NAN: "one V element of one sequence is NaN: it must reach that sequence's dimension and no other",
    Hazard.NAN_SCORES: "an element of a query and one of a key are NaN: so are their rows and LSE, which hide no NaN",
    Hazard.FAR_QUERIES: "queries of 2^40 and 2^-40, K's scales the other way: a half holds neither, bf16 does",
    Hazard.ZERO_SCALES: "a sequence of zeros whose tokens have scale 0: nothing may be divided by a scale",
    Hazard.STEEP_SCALES: "V's scales grow 2^20-fold every 64 tokens: a half does not hold weights times scales",
    Hazard.SKIPPED_TOKENS: "a written token has slot -1 and NaN as its value, a listed block is -1: no trace of them",
    Hazard.GAPPED_POOL: "there are gaps inside the blocks of a pool: a block is not one piece of memory",
    Hazard.HIGH_STAGING: "the one live row of the staging buffer lies above 2^32 elements: a 32-bit offset wraps",
    Hazard.HIGH_ROWS: "the last rows of q, out and lse lie above 2^32 elements: a 32-bit offset wraps",
}


class Level(StrEnum):
    """How much is run."""

    TINY = "tiny"  # a few seconds: is it plausible at all
    CORNER = "corner"  # pairwise covering arrays over every dimension, small shapes
    PRODUCTION = "production"  # heads of real models, longer contexts, on a GPU also the corners of the config space


@dataclass(frozen=True)
class Case:
    """One check. A pure function of its fields makes the inputs, so that a failure can be repeated anywhere.

    Args:
        op: what is computed.
        problem: `max_query_len` covers the workload.
        pool_format: layout of the pool.
        workload: lengths. Of the cache operations, `kv_write` writes the query tokens of each sequence, `gather_kv`
            gathers the contexts, `copy_blocks` copies half of the blocks of the contexts, `pack_blocks` and
            `unpack_blocks` move most of the blocks.
        family: how the numbers are made.
        hazards: sorted, without repetition.
        seed: of all random numbers.
        planned_for: bounds that the plan is made for, where they are not to follow from the workload.

    Raises:
        ValueError: a combination that `reject_case` refuses.
    """

    op: Op
    problem: Problem
    pool_format: PoolFormat
    workload: Workload
    family: Family = Family.RANDOM
    hazards: tuple[Hazard, ...] = ()
    seed: int = 0
    planned_for: Bounds | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hazards", tuple(sorted(set(self.hazards))))
        reason = reject_case(self)
        if reason is not None:
            raise ValueError(f"case {self.key}: {reason}")

    @property
    def key(self) -> str:
        """Identity in one line, e.g. `attention|8/2x64-bf16|b16-nhd-bf16|edges-1a2b3c4d|needle|tail_foreign|s7`."""
        lens = zlib.crc32(repr((self.workload.context_lens, self.workload.query_lens)).encode())
        hazards = "+".join(self.hazards) or "plain"
        workload = f"{self.workload.name}-{lens:08x}"
        parts = (self.op, self.problem.key, self.pool_format.key, workload, self.family, hazards, f"s{self.seed}")
        planned = "" if self.planned_for is None else f"|planned-{bucket_of(self.planned_for).key}"
        return "|".join(parts) + planned

    @property
    def bounds(self) -> Bounds:
        """The bounds that the plan is made for.

        Gathered rows count as query tokens, a block pair and a listed block as a sequence: `Bounds` knows no other
        sizes.
        """
        if self.planned_for is not None:
            return self.planned_for
        tight = self.workload.bounds
        num_seqs, context_len, query_len = tight.max_num_seqs, tight.max_context_len, tight.max_query_len
        if self.op is Op.GATHER_KV:
            context_len += self.pool_format.block_size
            query_len = context_len
        elif self.op is Op.COPY_BLOCKS:
            num_seqs = max(num_seqs, self.workload.num_blocks(self.pool_format.block_size))
        elif self.op in SWAPS:
            num_seqs = max(num_seqs, 2, self.workload.num_blocks(self.pool_format.block_size))
        if Hazard.LOOSE_BOUNDS in self.hazards:
            return Bounds(num_seqs + 3, 4 * context_len + 70, query_len + (query_len > 1))
        return Bounds(num_seqs, context_len, query_len)


SWAPS = (Op.PACK_BLOCKS, Op.UNPACK_BLOCKS)
_EXCLUSIVE = (
    (Hazard.TAIL_MINUS_ONE, Hazard.TAIL_INT_MAX, Hazard.TAIL_FOREIGN),
    (Hazard.IDENTITY_TABLE, Hazard.SHARED_BLOCKS),
    (Hazard.STRIDED_POOL, Hazard.HIGH_POOL),
    (Hazard.GAPPED_POOL, Hazard.HIGH_POOL),
    (Hazard.HUGE_SINKS, Hazard.INF_SINKS),
    (Hazard.STRIDED, Hazard.HIGH_ROWS),
    (Hazard.OFFSET_BASE, Hazard.HIGH_ROWS),
    (Hazard.HIGH_STAGING, Hazard.SKIPPED_TOKENS),  # all rows but the last are skipped as it is
)
_ATTENTION_ONLY = {
    Hazard.REPLAY,
    Hazard.NO_LSE,
    Hazard.SATURATED_CAP,
    Hazard.HUGE_SINKS,
    Hazard.INF_SINKS,
    Hazard.LIVE_NAN,
    Hazard.NAN_SCORES,
    Hazard.FAR_QUERIES,
    Hazard.ZERO_SCALES,
    Hazard.STEEP_SCALES,
    Hazard.HIGH_ROWS,
}


def reject_case(case: Case) -> str | None:
    """Why the fields of a case contradict each other, or None. Each rule is stated here once."""
    hazards, problem, decode = set(case.hazards), case.problem, max(case.workload.query_lens) <= 1
    for group in _EXCLUSIVE:
        if len(hazards.intersection(group)) > 1:
            return f"only one of {', '.join(group)} can hold"
    if case.op is not Op.ATTENTION and hazards & _ATTENTION_ONLY:
        return f"{', '.join(sorted(hazards & _ATTENTION_ONLY))} belong to attention"
    if Hazard.SKIPPED_TOKENS in hazards and case.op not in (Op.KV_WRITE, Op.COPY_BLOCKS, *SWAPS):
        return "skipped_tokens belongs to kv_write, copy_blocks, pack_blocks and unpack_blocks"
    if Hazard.HIGH_STAGING in hazards and case.op not in SWAPS:
        return "high_staging belongs to pack_blocks and unpack_blocks"
    if Hazard.HIGH_ROWS in hazards and sum(case.workload.query_lens) < 2:
        return "high_rows needs two query tokens: a single row is the first one"
    if hazards & {Hazard.HUGE_SINKS, Hazard.INF_SINKS} and not problem.sinks:
        return "a hazard of sinks needs a problem with sinks"
    if Hazard.SATURATED_CAP in hazards and (problem.soft_cap is None or case.family is not Family.RANDOM):
        return "saturated_cap needs a problem with a soft cap and the random family"
    if Hazard.LIVE_NAN in hazards and not (decode and case.family is Family.RANDOM):
        return "live_nan needs one query token per sequence and the random family"
    if Hazard.LIVE_NAN in hazards and case.pool_format.kv_dtype is DType.INT8:
        return "live_nan needs a pool whose dtype has a NaN"
    if Hazard.LIVE_NAN in hazards and hazards & {Hazard.HUGE_SINKS, Hazard.INF_SINKS}:
        return "live_nan needs a weight above 0 for the NaN: a huge sink leaves none"
    if (reason := _reject_extremes(case)) is not None:
        return reason
    if Hazard.REPLAY in hazards and not decode:
        return "replay needs one query token per sequence: the earlier launch has length 0"
    if problem.max_query_len < max(case.workload.query_lens):
        return f"max_query_len={problem.max_query_len} is below the workload's {max(case.workload.query_lens)}"
    return case.pool_format.reject(problem)


def _reject_extremes(case: Case) -> str | None:
    pool_format, hazards = case.pool_format, set(case.hazards)
    extremes = hazards & {Hazard.NAN_SCORES, Hazard.FAR_QUERIES, Hazard.ZERO_SCALES, Hazard.STEEP_SCALES}
    if extremes and case.family is not Family.RANDOM:
        return f"{', '.join(sorted(extremes))} needs the random family"
    if Hazard.NAN_SCORES in extremes and pool_format.kv_dtype is DType.INT8:
        return "nan_scores needs a pool whose dtype has a NaN"
    if {Hazard.NAN_SCORES, Hazard.ZERO_SCALES} & extremes and not max(case.workload.context_lens):
        return f"{', '.join(sorted(extremes))} needs a sequence with keys"
    if Hazard.FAR_QUERIES in extremes and pool_format.scale_kind not in (ScaleKind.PER_HEAD, ScaleKind.PER_TOKEN_HEAD):
        return "far_queries needs scales of each head, which bring the scores back"
    if Hazard.FAR_QUERIES in extremes and case.problem.q_dtype is DType.FP16:
        return "far_queries needs queries of more range than fp16"
    if {Hazard.ZERO_SCALES, Hazard.STEEP_SCALES} & extremes and not pool_format.has_token_scales:
        return f"{', '.join(sorted(extremes))} needs scales of tokens"
    return None

"""Faults planted in `cpu_split`, by class. `#n` numbers a public bug of another project with that root cause."""

from __future__ import annotations

from collections.abc import Callable

from pagedtune.harness.case import Case, Hazard
from pagedtune.harness.verdicts import Check
from pagedtune.kernels.dtypes import DType
from pagedtune.kernels.pool_format import Layout, ScaleKind

from .planted import ATTENTION, HOST, Edit, Planted

Where = Callable[[Case], bool]
VALUE = (Check.EXACT, Check.ELEMENT, Check.ROW, Check.LSE, Check.NONFINITE)
DEAD = (Check.POISON, *VALUE)  # something that must not matter did


def anywhere(case: Case) -> bool:
    """Every case."""
    return True


def with_hazard(*hazards: Hazard) -> Where:
    """Cases with one of these hazards."""
    return lambda case: bool(set(hazards) & set(case.hazards))


def longer_than(tokens: int) -> Where:
    """Cases with a context beyond this many tokens."""
    return lambda case: max(case.workload.context_lens) > tokens


def scaled(*kinds: ScaleKind) -> Where:
    """Cases whose pool has scales of one of these kinds."""
    return lambda case: case.pool_format.scale_kind in kinds


def with_empty_row(case: Case) -> bool:
    """A sequence without keys has a query token."""
    return any(c == 0 and q for c, q in zip(case.workload.context_lens, case.workload.query_lens, strict=True))


def many_queries(case: Case) -> bool:
    """Some sequence has several query tokens."""
    return max(case.workload.query_lens) > 1


def fault(
    name: str, source: str, file: str, edit: tuple[str, str], expected: tuple[Check, ...], where: Where = anywhere,
    num_splits: int = 1,
) -> Planted:  # fmt: skip
    """A planted fault of one edit."""
    return Planted(name, source, (Edit(file, *edit),), expected, where, num_splits)


K_ROW = "const KvStored* k_row = k + block * args.k_block + slot * args.k_slot;"
V_ROW = "const KvStored* v_row = v + block * args.v_block + slot * args.v_slot;"
PART_COPY = "__builtin_memcpy(args.partial_out + part * DV, s.row, DV * sizeof(float));"
SOFT_CAP = "x = hyperbolic_tangent(x * (1.0f / args.soft_cap)) * args.soft_cap;"
SINK = "const float* const sink = direct && args.sinks != nullptr ? args.sinks + q_head : nullptr;"
PROBABILITY = "const F p = exponential(load<F>(s.scores + i) - base);"
KEY_SCALE = "const float k_scale = args.k_scale != nullptr ? args.k_scale[tile.head * args.scale_stride] : 1.0f;"
VALUE_SCALE = "const float v_scale = args.v_scale != nullptr ? args.v_scale[tile.head * args.scale_stride] : 1.0f;"

OVERFLOW = (
    fault("K offset in 32 bits", "#1, #2, #3, #7", ATTENTION,
          (K_ROW, K_ROW.replace("block * args.k_block", "static_cast<uint32_t>(block * args.k_block)")),
          DEAD, with_hazard(Hazard.HIGH_POOL)),
    fault("V offset in 32 bits", "#1, #4", ATTENTION,
          (V_ROW, V_ROW.replace("block * args.v_block", "static_cast<uint32_t>(block * args.v_block)")),
          DEAD, with_hazard(Hazard.HIGH_POOL)),
    fault("block id cut to 16 bits", "#6", ATTENTION,
          ("const int64_t block = *table++;", "const int64_t block = *table++ & 0xffff;"),
          DEAD, with_hazard(Hazard.HIGH_POOL)),
)  # fmt: skip

TAIL = (
    fault("one key past the end is seen", "#9, #22", HOST,
          ("const int64_t high = std::max<int64_t>(0, item.position + 1);",
           "const int64_t high = item.position < 0 ? 0 : item.position + 1 + (item.position % args.block_size != "
           "args.block_size - 1);"), DEAD),
    fault("the last key is dropped", "needle class", HOST,
          ("const int64_t high = std::max<int64_t>(0, item.position + 1);",
           "const int64_t high = item.position > 0 ? item.position : item.position + 1;"), VALUE, longer_than(1)),
    Planted("weights of masked keys are 0, but their V is multiplied", "#8, #10",
            (Edit(ATTENTION, "tile.v[i] = tile.v[tile.count - 1];", "tile.v[i] = tile.v[i - 1] + args.v_slot;"),
             Edit(ATTENTION, "rows.v, tile.count, ahead_v,",
                  "rows.v, (tile.count * PADDED + W - 1) / W * W / PADDED, ahead_v,")),
            DEAD, lambda case: case.problem.gqa_ratio <= 2 and case.pool_format.layout is not Layout.XPACKED),
    fault("a partial last block is dropped", "published experiment", HOST,
          ("const int64_t high = std::max<int64_t>(0, item.position + 1);",
           "const int64_t high = item.position < args.block_size ? std::max<int64_t>(0, item.position + 1) "
           ": (item.position + 1) / args.block_size * args.block_size;"), VALUE, longer_than(17)),
)  # fmt: skip

TABLE = (
    fault("the table is read one entry late", "#21", ATTENTION,
          ("const int64_t block = *table++;", "const int64_t block = *(i == 0 ? table : table - 1), next = *table++; "
           "(void)next;"), DEAD, longer_than(17)),
    fault("V uses the block of the first sequence", "published experiment", ATTENTION,
          (V_ROW, V_ROW.replace("block * args.v_block", "args.block_table[0] * args.v_block")),
          DEAD, lambda case: case.workload.context_lens[0] > 0 and longer_than(17)(case)),
    fault("block stride assumed dense", "layout assumption", ATTENTION,
          (K_ROW, K_ROW.replace("args.k_block", "(args.block_size * args.num_kv_heads * DK)")),
          DEAD, with_hazard(Hazard.STRIDED_POOL)),
    fault("the table's row stride is ignored", "#23", ATTENTION,
          ("item.sequence * args.block_table_stride", "item.sequence * ((args.context_lens[0] + args.block_size - 1) "
           "/ args.block_size)"), DEAD, lambda case: case.workload.context_lens[0] > 0 and case.workload.num_seqs > 1),
)  # fmt: skip

SPLIT = (
    fault("splits merged without their maximum", "published experiment", HOST,
          ("std::exp(static_cast<double>(lse[i]) - top)", "std::exp(lse[i])"),
          VALUE, longer_than(32), num_splits=4),
    fault("an empty split counts with LSE 0", "#12", HOST,
          ("if (maximum == -INFINITY) return {0.0f, -INFINITY, true};",
           "if (maximum == -INFINITY) return {0.0f, 0.0f, true};"),
          (Check.PARTIALS, *VALUE), with_empty_row, num_splits=4),
    fault("a row without keys is divided by its sum of 0", "#12, #13", HOST,
          ("if (maximum == -INFINITY) return {0.0f, -INFINITY, true};", ""), (Check.PARTIALS, *VALUE), with_empty_row),
    fault("partials rounded to bf16, fp32 declared", "#37", ATTENTION,
          (PART_COPY, "for (int d = 0; d < DV; ++d) { uint32_t bits; __builtin_memcpy(&bits, s.row + d, 4); "
           "bits = (bits + 0x8000u) & 0xffff0000u; __builtin_memcpy(s.row + d, &bits, 4); }\n" + PART_COPY),
          (Check.PARTIALS, Check.ELEMENT, Check.ROW), longer_than(32), num_splits=4),
    fault("the last split is lost in the merge", "#39", HOST,
          ("for (int64_t i = 0; i < a.num_splits; ++i) {\n", "for (int64_t i = 0; i < a.num_splits - 1; ++i) {\n"),
          VALUE, longer_than(80), num_splits=4),
    fault("the split count follows the batch size", "#38", HOST,
          ("const int64_t splits = std::min(args.num_splits, useful);",
           "const int64_t splits = std::min({args.num_splits, useful, std::max<int64_t>(1, 5 - args.num_seqs)});"),
          (Check.BATCH_INVARIANT, Check.PARTIALS),
          lambda case: longer_than(64)(case) and case.workload.num_seqs > 1, num_splits=4),
    fault("two splits share a boundary key", "#39", HOST,
          ("std::min(high, item.begin + share) : item.begin;", "std::min(high, item.begin + share + 1) : item.begin;"),
          (Check.PARTIALS, *VALUE), longer_than(32), num_splits=4),
)  # fmt: skip

SOFTMAX = (
    fault("earlier tiles are not rescaled", "online softmax", ATTENTION,
          ("store(alpha, rescale);", "store(alpha, broadcast(1.0f));"), VALUE, longer_than(16)),
    fault("scale off by 1 %", "published experiment", ATTENTION,
          ("const float scale = args.softmax_scale * k_scale;",
           "const float scale = args.softmax_scale * k_scale * 1.01f;"), VALUE, longer_than(16)),
    fault("weights rounded to bf16, fp32 declared", "declared numerics", ATTENTION,
          (PROBABILITY, PROBABILITY.replace("exponential(load<F>(s.scores + i) - base)",
                                           "(F)((U)exponential(load<F>(s.scores + i) - base) & 0xffff0000u)")),
          VALUE, lambda case: case.problem.q_dtype is DType.FP32 and longer_than(16)(case)),
    fault("LSE in base 2", "convention", HOST,
          ("return {1.0f / sum, static_cast<float>(maximum + std::log(static_cast<double>(sum))), false};",
           "return {1.0f / sum, static_cast<float>((maximum + std::log(static_cast<double>(sum))) * 1.44269504), "
           "false};"), (Check.LSE,), lambda case: not case.problem.sinks and Hazard.NO_LSE not in case.hazards),
    fault("a row without keys has LSE +inf", "#14", HOST,
          ("if (maximum == -INFINITY) return {0.0f, -INFINITY, true};",
           "if (maximum == -INFINITY) return {0.0f, INFINITY, true};"), VALUE,
          lambda case: with_empty_row(case) and not case.problem.sinks and Hazard.NO_LSE not in case.hazards),
)  # fmt: skip

FEATURES = (
    fault("window one key too wide", "#35", HOST,
          ("std::max<int64_t>(0, high - args.window)", "std::max<int64_t>(0, high - args.window - 1)"),
          DEAD, lambda case: case.problem.window is not None and longer_than(case.problem.window + 1)(case)),
    fault("window ignored", "#35, #11", HOST, ("args.window > 0 ?", "args.window < 0 ?"),
          DEAD, lambda case: case.problem.window is not None and longer_than(case.problem.window + 1)(case)),
    fault("soft cap by exp / exp", "#34", ATTENTION,
          (SOFT_CAP, "{ const F e = exponential(x * (2.0f / args.soft_cap)); "
           "x = (e * e - e * e + e - 1.0f) / (e + 1.0f) * args.soft_cap; }"),
          VALUE, with_hazard(Hazard.SATURATED_CAP)),
    fault("soft cap ignored", "feature dropped", ATTENTION, ("if (args.soft_cap > 0.0f) x =", "if (false) x ="),
          VALUE, lambda case: case.problem.soft_cap is not None and longer_than(8)(case)),
    fault("sink joins once per split", "#31", ATTENTION, (SINK, SINK.replace("direct && ", "")),
          (Check.PARTIALS, *VALUE), lambda case: case.problem.sinks and longer_than(32)(case), num_splits=4),
    fault("sink ignored by the merge", "#32", HOST,
          ("a.sinks != nullptr ? a.sinks + head : nullptr", "nullptr"), VALUE,
          lambda case: case.problem.sinks and longer_than(32)(case), num_splits=4),
    fault("sink folded against 0, not the maximum", "#33", HOST,
          ("const double top = std::max(maximum, *sink);", "const double top = std::max(maximum, 0.0f);"), VALUE,
          lambda case: Hazard.HUGE_SINKS in case.hazards and Hazard.NO_LSE not in case.hazards),
    fault("a row of only a sink has LSE -inf", "#33", HOST,
          ("if (maximum == -INFINITY || *sink == INFINITY) return {0.0f, *sink, true};",
           "if (maximum == -INFINITY || *sink == INFINITY) return {0.0f, maximum, true};"), VALUE,
          lambda case: case.problem.sinks and with_empty_row(case) and Hazard.NO_LSE not in case.hazards
          and Hazard.INF_SINKS not in case.hazards),
    fault("ALiBi slope of the KV head", "feature dropped", ATTENTION,
          ("args.alibi_slopes[first_head + chunk * CHUNK + head]", "args.alibi_slopes[tile.head]"), VALUE,
          lambda case: case.problem.alibi and case.problem.gqa_ratio > 1 and longer_than(8)(case)),
    fault("all query tokens see the whole context", "mask of q_len > 1", HOST,
          ("item.position = context - (query_end - item.token);", "item.position = context - 1;"), VALUE, many_queries),
)  # fmt: skip

HEADS = (
    fault("query heads interleaved over KV heads", "#36", ATTENTION,
          ("+ first_head * args.q_head;\n    for (int head = 0; head < GROUP; ++head, q += args.q_head) {",
           "+ tile.head * args.q_head;\n"
           "    for (int head = 0; head < GROUP; ++head, q += args.num_kv_heads * args.q_head) {"),
          VALUE, lambda case: case.problem.gqa_ratio > 1 and case.problem.num_kv_heads > 1),
    fault("q assumed dense", "#5", ATTENTION,
          ("+ tile.token * args.q_token +", "+ tile.token * args.num_kv_heads * GROUP * DK +"),
          DEAD, with_hazard(Hazard.STRIDED)),
    fault("k_scale dropped", "#16", ATTENTION, (KEY_SCALE, "const float k_scale = 1.0f;"), VALUE,
          scaled(ScaleKind.PER_TENSOR, ScaleKind.PER_HEAD)),
    fault("v_scale dropped", "#17, #18", ATTENTION, (VALUE_SCALE, "const float v_scale = 1.0f;"), VALUE,
          scaled(ScaleKind.PER_TENSOR, ScaleKind.PER_HEAD)),
    fault("k_scale used for V", "#16", ATTENTION,
          (VALUE_SCALE, VALUE_SCALE.replace("args.v_scale[", "args.k_scale[")), VALUE,
          scaled(ScaleKind.PER_TENSOR, ScaleKind.PER_HEAD)),
    fault("scale of the first head for all", "#17", ATTENTION,
          (VALUE_SCALE, VALUE_SCALE.replace("tile.head * args.scale_stride", "0")), VALUE,
          lambda case: scaled(ScaleKind.PER_HEAD)(case) and case.problem.num_kv_heads > 1),
)  # fmt: skip

MEMORY = (
    fault("accumulators keep the previous item's sums", "uninitialised scratch", ATTENTION,
          ("__builtin_memset(s.o, 0, sizeof(s.o));", "if (tile.token == 0) __builtin_memset(s.o, 0, sizeof(s.o));"),
          (Check.DETERMINISTIC, Check.BATCH_INVARIANT, *DEAD)),
    fault("one element past the row is written", "out of bounds", ATTENTION,
          ("narrow_row<Qo>(s.row, DV, out +", "narrow_row<Qo>(s.row, DV + 1, out +"),
          (Check.GUARDS, *DEAD), lambda case: Hazard.NO_LSE not in case.hazards),
    fault("a row without keys is not written", "stale output memory", ATTENTION,
          ("if (direct) {", "if (direct && norm.empty) continue;\n        if (direct) {"),
          (Check.WRITTEN, Check.NONFINITE), with_empty_row),
    fault("the query is scaled in place", "input edited", ATTENTION,
          ("widen_row<Qo>(q, DK, s.row);", "const_cast<QoStored*>(q)[0] ^= 1; widen_row<Qo>(q, DK, s.row);"),
          (Check.INPUTS,), lambda case: case.problem.q_dtype is not DType.FP32),
    fault("the answer of the last launch is returned", "cached result", HOST,
          ("if (path == nullptr) return PT_BAD_ISA;",
           "static const void* last = nullptr;\n    if (last == args.out) return PT_OK;\n    last = args.out;"
           "\n    if (path == nullptr) return PT_BAD_ISA;"),
          (Check.WRITTEN, Check.DETERMINISTIC, *DEAD)),
)  # fmt: skip

FAULTS = (*OVERFLOW, *TAIL, *TABLE, *SPLIT, *SOFTMAX, *FEATURES, *HEADS, *MEMORY)

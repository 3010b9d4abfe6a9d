// Paged decode attention of one code path; included after vec.h, inside that path's namespace.
//
// A thread sees its work as a stream of tiles (up to tile_tokens keys of one work item). Tiles are laid out a few ahead: row
// pointers of the tile `ahead` feed the software prefetch while the current tile is computed, across work items too,
// so that short contexts do not start cold. Per tile and chunk of query heads: scores (dot products blocked over tokens
// and heads in registers), online softmax, then P V with the accumulators of a slice of the head dim in registers.
// Scores are kept as [token][padded head] so that the softmax works on whole vectors.

using Kv = Element<PT_KV_DTYPE>;
using Qo = Element<PT_Q_DTYPE>;
using KvStored = Kv::Stored;
using QoStored = Qo::Stored;

constexpr int PAIR = 2 * W;
constexpr int at_least_pair(int dim) { return dim < PAIR ? PAIR : dim; }
constexpr int K_PAIRS = (DK + PAIR - 1) / PAIR, V_PAIRS = (DV + PAIR - 1) / PAIR;
constexpr int K_ROW = at_least_pair(DK), V_ROW = at_least_pair(DV);  // staged rows, zero padded
// The last pair of a row ends at the row's end: it overlaps the one before instead of reading past the row. Query
// elements it repeats are zero; output elements it repeats are computed twice.
PT_FN int pair_offset(int pair, int dim) {
    if (dim < PAIR) return 0;
    return pair * PAIR <= dim - PAIR ? pair * PAIR : dim - PAIR;
}

constexpr int ACCUMULATORS = W == 16 ? 24 : 12;  // of 32 or 16 registers
constexpr int MAX_CHUNK = W < 8 ? W : 8;
constexpr int CHUNKS = (GROUP + MAX_CHUNK - 1) / MAX_CHUNK;
constexpr int CHUNK = (GROUP + CHUNKS - 1) / CHUNKS;
constexpr int LAST_CHUNK = GROUP - CHUNK * (CHUNKS - 1);
constexpr int padded(int heads) { return heads <= 1 ? 1 : heads <= 2 ? 2 : heads <= 4 ? 4 : 8; }
constexpr int MAX_AHEAD = 4;
constexpr int LINE = 64;  // bytes

struct Tile {
    int64_t token, position, start;  // query token and its position, first key
    int32_t head, split, count;      // KV head, keys in the tile
    bool first, last;                // of its work item
    const KvStored* k[MAX_TILE];
    const KvStored* v[MAX_TILE];
};

struct alignas(64) Scratch {
    float q[GROUP][K_PAIRS * PAIR];
    float o[GROUP][V_PAIRS * PAIR];
    float scores[MAX_TILE * 8];
    float maximum[CHUNKS][W], sum[CHUNKS][W], slope[CHUNKS][W];  // lane i belongs to head i % padded(chunk)
    float row[at_least_pair(DK > DV ? DK : DV) + W];
    KvStored staged_k[MAX_TILE][K_ROW], staged_v[MAX_TILE][V_ROW];
    const KvStored* staged_k_rows[MAX_TILE];
    const KvStored* staged_v_rows[MAX_TILE];
    Tile ring[MAX_AHEAD + 1];
};

PT_FN void prefetch_bytes(const KvStored* row, int from, int count) {
    for (int line = 0; line < count; line += LINE) PT_PREFETCH(reinterpret_cast<const char*>(row) + from + line);
}

// ---- the stream of tiles
struct Stream {
    WorkItem item;
    int64_t at;  // next key of the item
    bool open;   // the item has tiles left
};

// Row pointers of the tile's keys, padded to a multiple of 16 with the last one: padding reads live keys only.
PT_FN void place_rows(const SplitArgs& args, const WorkItem& item, Tile& tile) {
    if (tile.count == 0) return;
    const KvStored* const k = static_cast<const KvStored*>(args.k) + item.head * args.k_head;
    const KvStored* const v = static_cast<const KvStored*>(args.v) + item.head * args.v_head;
    const int32_t* table = args.block_table + item.sequence * args.block_table_stride + tile.start / args.block_size;
    int64_t slot = tile.start % args.block_size;
    int i = 0;
    while (i < tile.count) {
        const int64_t block = *table++;
        const KvStored* k_row = k + block * args.k_block + slot * args.k_slot;
        const KvStored* v_row = v + block * args.v_block + slot * args.v_slot;
        const int64_t left = args.block_size - slot;
        const int stop = left < tile.count - i ? i + static_cast<int>(left) : tile.count;
        for (; i < stop; ++i, k_row += args.k_slot, v_row += args.v_slot) tile.k[i] = k_row, tile.v[i] = v_row;
        slot = 0;
    }
    for (; i % 16 != 0; ++i) tile.k[i] = tile.k[tile.count - 1], tile.v[i] = tile.v[tile.count - 1];
}

// Lays out the next tile. Claims a new item ahead of need only if others are not left without work.
PT_FN bool next_tile(const SplitArgs& args, Claims& claims, Stream& stream, Tile& tile, bool needed) {
    while (!stream.open) {
        const int64_t index = claims.next(!needed);
        if (index < 0) return false;
        stream.open = locate_item(args, index, stream.item);
        stream.at = stream.item.begin;
    }
    const WorkItem& item = stream.item;
    const int64_t left = item.end - stream.at;
    tile.token = item.token, tile.position = item.position, tile.start = stream.at;
    tile.head = item.head, tile.split = item.split;
    tile.count = static_cast<int32_t>(left < args.tile_tokens ? left : args.tile_tokens);
    tile.first = stream.at == item.begin, tile.last = left <= args.tile_tokens;
    place_rows(args, item, tile);
    stream.at += tile.count;
    stream.open = !tile.last;
    return true;
}

// ---- scores
template <int HEADS, int STEP>
PT_FN void dot_step(const float (*q)[K_PAIRS * PAIR], const KvStored* const* rows, float* scores) {
    // With few sums each half of a pair gets its own, or the latency of dependent additions would show.
    constexpr int PADDED = padded(HEADS), SETS = 2 * HEADS * STEP <= ACCUMULATORS ? 2 : 1;
    F sums[SETS][STEP * PADDED] = {};
#pragma GCC unroll 1
    for (int pair = 0; pair < K_PAIRS; ++pair) {
        const int at = pair_offset(pair, DK);
        F a[STEP], b[STEP];
#pragma GCC unroll 16
        for (int token = 0; token < STEP; ++token) Kv::pair(rows[token] + at, a[token], b[token]);
#pragma GCC unroll 8
        for (int head = 0; head < HEADS; ++head) {
            const F query = load<F>(q[head] + pair * PAIR);
#pragma GCC unroll 16
            for (int token = 0; token < STEP; ++token) sums[0][token * PADDED + head] += query * a[token];
        }
#pragma GCC unroll 8
        for (int head = 0; head < HEADS; ++head) {
            const F query = load<F>(q[head] + pair * PAIR + W);
#pragma GCC unroll 16
            for (int token = 0; token < STEP; ++token) sums[SETS - 1][token * PADDED + head] += query * b[token];
        }
    }
    if (SETS == 2) {
#pragma GCC unroll 16
        for (int i = 0; i < STEP * PADDED; ++i) sums[0][i] += sums[SETS - 1][i];
    }
    store(scores, sum_each(sums[0]));
}

template <int HEADS>
PT_FN void dot_tile(const float (*q)[K_PAIRS * PAIR], const KvStored* const* rows, int count,
                    const KvStored* const* ahead, int ahead_count, float* scores) {
    constexpr int PADDED = padded(HEADS), STEP = W / PADDED;
    constexpr int BYTES = DK * sizeof(KvStored);
    int token = 0;
    for (; token < count; token += STEP) {
        if (token < ahead_count) {
            for (int i = token; i < token + STEP; ++i) prefetch_bytes(ahead[i], 0, BYTES);
        }
        dot_step<HEADS, STEP>(q, rows + token, scores + token * PADDED);
    }
    for (; token < ahead_count; ++token) prefetch_bytes(ahead[token], 0, BYTES);
}

PT_FN F lane_numbers(int divisor) {
    float lanes[W];
    for (int i = 0; i < W; ++i) lanes[i] = static_cast<float>(i / divisor);
    return load<F>(lanes);
}
// The maximum over the lanes of one head, in all of them.
template <int PADDED>
PT_FN F maximum_per_head(F x) {
    float lanes[W];
    store(lanes, x);
    for (int i = PADDED; i < W; ++i) lanes[i % PADDED] = lanes[i] > lanes[i % PADDED] ? lanes[i] : lanes[i % PADDED];
    for (int i = PADDED; i < W; ++i) lanes[i] = lanes[i % PADDED];
    return load<F>(lanes);
}

// Turns dot products into probabilities relative to the new maximum; `alpha` rescales what was summed before.
template <int HEADS>
PT_FN void softmax_tile(const SplitArgs& args, const Tile& tile, float scale, int chunk, Scratch& s, float* alpha) {
    constexpr int PADDED = padded(HEADS);
    const int lanes = tile.count * PADDED;
    const F before = load<F>(s.maximum[chunk]), slope = load<F>(s.slope[chunk]), token = lane_numbers(PADDED);
    const float first_distance = static_cast<float>(tile.start - tile.position);
    F top = before;
    for (int i = 0; i < lanes; i += W) {
        F x = load<F>(s.scores + i) * scale;
        if (args.soft_cap > 0.0f) x = hyperbolic_tangent(x * (1.0f / args.soft_cap)) * args.soft_cap;
        if (args.alibi_slopes != nullptr) x += slope * (token + (first_distance + static_cast<float>(i / PADDED)));
        const I live = (I)(token + static_cast<float>(i / PADDED) < static_cast<float>(tile.count));
        x = select(live, x, broadcast(-INFINITY));
        store(s.scores + i, x);
        top = maximum(x, top);
    }
    top = maximum_per_head<PADDED>(top);
    store(s.maximum[chunk], top);
    const F base = select((I)(top == -INFINITY), F{}, top);
    const F rescale = exponential(before - base);
    F sum = {};  // of this tile alone, like P V below: long contexts lose no precision to long chains of additions
    for (int i = 0; i < lanes; i += W) {
        const F p = exponential(load<F>(s.scores + i) - base);
        store(s.scores + i, p);
        sum += p;
    }
    store(s.sum[chunk], load<F>(s.sum[chunk]) * rescale + sum);
    store(alpha, rescale);
}

// ---- P V
template <int HEADS, int PADDED, int PAIRS>
PT_FN void accumulate_pass(float (*o)[V_PAIRS * PAIR], const float* p, const float* alpha, int pair,
                           const KvStored* const* rows, int count, const KvStored* const* ahead, int ahead_count) {
    constexpr int BYTES = PAIRS * PAIR * sizeof(KvStored);
    const int first_line = (pair * PAIR * static_cast<int>(sizeof(KvStored)) + LINE - 1) / LINE * LINE;
    const int end = pair * PAIR * static_cast<int>(sizeof(KvStored)) + BYTES;
    if (first_line >= end) ahead_count = 0;
    F sums[HEADS][2 * PAIRS] = {};
    int at[PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; ++i) at[i] = pair_offset(pair + i, DV);
#pragma GCC unroll 1
    for (int token = 0; token < count; ++token) {
        if (token < ahead_count) prefetch_bytes(ahead[token], first_line, BYTES);
        const KvStored* const row = rows[token];
        const float* weights = p + token * PADDED;
#pragma GCC unroll 8
        for (int i = 0; i < PAIRS; ++i) {
            F a, b;
            Kv::pair(row + at[i], a, b);
            PT_FORGET(weights);
#pragma GCC unroll 8
            for (int head = 0; head < HEADS; ++head) {
                const F weight = broadcast(weights[head]);
                sums[head][2 * i] += weight * a, sums[head][2 * i + 1] += weight * b;
            }
        }
    }
    for (int token = count; token < ahead_count; ++token) prefetch_bytes(ahead[token], first_line, BYTES);
#pragma GCC unroll 8
    for (int head = 0; head < HEADS; ++head)
#pragma GCC unroll 16
        for (int i = 0; i < 2 * PAIRS; ++i) {
            float* const to = o[head] + pair * PAIR + i * W;
            store(to, load<F>(to) * alpha[head] + sums[head][i]);
        }
}

template <int HEADS, int PADDED>
PT_FN void accumulate_tile(float (*o)[V_PAIRS * PAIR], const float* p, const float* alpha,
                           const KvStored* const* rows, int count, const KvStored* const* ahead, int ahead_count) {
    constexpr int FIT = ACCUMULATORS / (2 * HEADS), PAIRS = FIT < 1 ? 1 : FIT > 4 ? 4 : FIT;
    int pair = 0;
    for (; pair + PAIRS <= V_PAIRS; pair += PAIRS)
        accumulate_pass<HEADS, PADDED, PAIRS>(o, p, alpha, pair, rows, count, ahead, ahead_count);
    constexpr int REST = V_PAIRS % PAIRS;
    if constexpr (REST != 0) accumulate_pass<HEADS, PADDED, REST>(o, p, alpha, pair, rows, count, ahead, ahead_count);
}

// ---- one tile
struct Rows {
    const KvStored* const* k;
    const KvStored* const* v;
};

template <int HEADS>
PT_FN void chunk_tile(const SplitArgs& args, const Tile& tile, Rows rows, const Tile* ahead, float scale, int chunk,
                      Scratch& s) {
    constexpr int PADDED = padded(HEADS), FIRST = 2 * HEADS > ACCUMULATORS ? (HEADS + 1) / 2 : HEADS;
    const int ahead_count = ahead != nullptr ? ahead->count : 0;
    const KvStored* const* ahead_k = ahead != nullptr ? ahead->k : nullptr;
    const KvStored* const* ahead_v = ahead != nullptr ? ahead->v : nullptr;
    alignas(64) float alpha[W];
    dot_tile<HEADS>(s.q + chunk * CHUNK, rows.k, tile.count, ahead_k, args.k_packed ? 0 : ahead_count, s.scores);
    softmax_tile<HEADS>(args, tile, scale, chunk, s, alpha);
    float(*const o)[V_PAIRS * PAIR] = s.o + chunk * CHUNK;
    const float* const p = s.scores;
    accumulate_tile<FIRST, PADDED>(o, p, alpha, rows.v, tile.count, ahead_v, args.v_dim == 1 ? ahead_count : 0);
    if constexpr (FIRST < HEADS)
        accumulate_tile<HEADS - FIRST, PADDED>(o + FIRST, p + FIRST, alpha + FIRST, rows.v, tile.count, nullptr, 0);
}

static PT_TARGET_ATTR void begin_item(const SplitArgs& args, const Tile& tile, Scratch& s) {
    const int64_t first_head = static_cast<int64_t>(tile.head) * GROUP;
    const QoStored* q = static_cast<const QoStored*>(args.q) + tile.token * args.q_token + first_head * args.q_head;
    for (int head = 0; head < GROUP; ++head, q += args.q_head) {
        widen_row<Qo>(q, DK, s.row);
        for (int i = DK; i < PAIR; ++i) s.row[i] = 0.0f;
        for (int pair = 0; pair < K_PAIRS; ++pair) {
            float part[PAIR];
            const int at = pair_offset(pair, DK);
            for (int i = 0; i < PAIR; ++i) part[i] = at + i < pair * PAIR ? 0.0f : s.row[at + i];
            const F x = load<F>(part), y = load<F>(part + W);
            store(s.q[head] + pair * PAIR, Kv::INTERLEAVED ? even_lanes(x, y) : x);
            store(s.q[head] + pair * PAIR + W, Kv::INTERLEAVED ? odd_lanes(x, y) : y);
        }
    }
    __builtin_memset(s.o, 0, sizeof(s.o));
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const int heads = chunk == CHUNKS - 1 ? LAST_CHUNK : CHUNK;
        for (int i = 0; i < W; ++i) {
            const int head = i % padded(heads);
            s.maximum[chunk][i] = -INFINITY, s.sum[chunk][i] = 0.0f;
            const bool live = args.alibi_slopes != nullptr && head < heads;
            s.slope[chunk][i] = live ? args.alibi_slopes[first_head + chunk * CHUNK + head] : 0.0f;
        }
    }
}

static PT_TARGET_ATTR void finish_item(const SplitArgs& args, const Tile& tile, Scratch& s) {
    const float v_scale = args.v_scale != nullptr ? args.v_scale[tile.head * args.scale_stride] : 1.0f;
    for (int head = 0; head < GROUP; ++head) {
        const int chunk = head / CHUNK, pad = padded(chunk == CHUNKS - 1 ? LAST_CHUNK : CHUNK);
        float sum = 0.0f;
        for (int i = head % CHUNK; i < W; i += pad) sum += s.sum[chunk][i];
        const int64_t q_head = static_cast<int64_t>(tile.head) * GROUP + head;
        const bool direct = args.num_splits == 1;
        const float* const sink = direct && args.sinks != nullptr ? args.sinks + q_head : nullptr;
        const Normaliser norm = normalise(s.maximum[chunk][head % CHUNK], sum, sink);
        const float factor = norm.factor * v_scale;
        for (int pair = 0; pair < V_PAIRS; ++pair) {
            const F a = load<F>(s.o[head] + pair * PAIR) * factor, b = load<F>(s.o[head] + pair * PAIR + W) * factor;
            float* const to = s.row + pair_offset(pair, DV);
            store(to, Kv::INTERLEAVED ? interleave_low(a, b) : a);
            store(to + W, Kv::INTERLEAVED ? interleave_high(a, b) : b);
        }
        if (norm.empty) __builtin_memset(s.row, 0, sizeof(s.row));
        if (direct) {
            QoStored* const out = static_cast<QoStored*>(args.out);
            narrow_row<Qo>(s.row, DV, out + tile.token * args.out_token + q_head * args.out_head);
            if (args.lse != nullptr) args.lse[tile.token * args.lse_token + q_head] = norm.lse;
        } else {
            const int64_t part = (tile.token * args.num_kv_heads * GROUP + q_head) * args.num_splits + tile.split;
            __builtin_memcpy(args.partial_out + part * DV, s.row, DV * sizeof(float));
            args.partial_lse[part] = norm.lse;
        }
    }
}

// Copies rows whose head dim is not contiguous, or shorter than a pair, into contiguous zero-padded ones.
static PT_TARGET_ATTR Rows stage_rows(const SplitArgs& args, const Tile& tile, Scratch& s) {
    Rows rows{tile.k, tile.v};
    const int padded_count = (tile.count + 15) / 16 * 16;
    if (args.k_packed || DK < PAIR) {
        for (int i = 0; i < padded_count; ++i) {
            KvStored* const to = s.staged_k[i];
            for (int d = 0; d < DK; ++d)
                to[d] = tile.k[i][d / args.k_pack * args.k_outer + d % args.k_pack * args.k_inner];
            for (int d = DK; d < K_ROW; ++d) to[d] = 0;
            s.staged_k_rows[i] = to;
        }
        rows.k = s.staged_k_rows;
    }
    if (args.v_dim != 1 || DV < PAIR) {
        for (int i = 0; i < tile.count; ++i) {
            KvStored* const to = s.staged_v[i];
            for (int d = 0; d < DV; ++d) to[d] = tile.v[i][d * args.v_dim];
            for (int d = DV; d < V_ROW; ++d) to[d] = 0;
            s.staged_v_rows[i] = to;
        }
        rows.v = s.staged_v_rows;
    }
    return rows;
}

static PT_TARGET_ATTR void compute_tile(const SplitArgs& args, const Tile& tile, const Tile* ahead, Scratch& s) {
    const bool staged = args.k_packed || args.v_dim != 1 || DK < PAIR || DV < PAIR;
    const Rows rows = staged ? stage_rows(args, tile, s) : Rows{tile.k, tile.v};
    const float k_scale = args.k_scale != nullptr ? args.k_scale[tile.head * args.scale_stride] : 1.0f;
    const float scale = args.softmax_scale * k_scale;
    for (int chunk = 0; chunk < CHUNKS - 1; ++chunk)
        chunk_tile<CHUNK>(args, tile, rows, chunk == 0 ? ahead : nullptr, scale, chunk, s);
    chunk_tile<LAST_CHUNK>(args, tile, rows, CHUNKS == 1 ? ahead : nullptr, scale, CHUNKS - 1, s);
}

static PT_TARGET_ATTR void split_body(void* context, Claims& claims) {
    const SplitArgs& args = *static_cast<const SplitArgs*>(context);
    Scratch s;
    Stream stream;
    stream.open = false;
    int head = 0, held = 0;
    while (true) {
        const Tile* ahead = nullptr;
        while (held <= args.tiles_ahead) {
            Tile& tile = s.ring[(head + held) % (MAX_AHEAD + 1)];
            if (!next_tile(args, claims, stream, tile, held == 0)) break;
            if (held++ > 0) ahead = &tile;
        }
        if (held == 0) return;
        const Tile& tile = s.ring[head];
        if (tile.first) begin_item(args, tile, s);
        if (tile.count > 0) compute_tile(args, tile, ahead, s);
        if (tile.last) finish_item(args, tile, s);
        head = (head + 1) % (MAX_AHEAD + 1);
        --held;
    }
}

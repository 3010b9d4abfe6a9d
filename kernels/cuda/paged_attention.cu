// Paged decode attention in the shape of the first paged kernels: one block per query token and query head, each warp
// walks every WARPS-th KV block with an online softmax, and the warps' results are merged in shared memory.
//
// Compile-time definitions:
//   PT_HEAD_DIM_K, PT_HEAD_DIM_V   elements of a head
//   PT_GROUP                       query heads of a KV head
//   PT_BLOCK_SIZE                  tokens of a KV block
//   PT_WARPS                       warps of a block
//   PT_Q_DTYPE, PT_KV_DTYPE        0 fp32, 1 bf16, 2 fp16; KV also 3 e4m3, 4 int8
//   PT_CHUNK_K, PT_CHUNK_V         adjacent elements that a lane loads at once
//   PT_WINDOW                      keys that a query sees, 0 for all
//   PT_HAS_CAP, PT_HAS_SINKS, PT_HAS_ALIBI
//   PT_HAS_SCALES, PT_SCALE_STRIDE of the pool or of each head; PT_TOKEN_SCALES: of each token and head
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define PT_INFINITY __int_as_float(0x7f800000)

constexpr int DK = PT_HEAD_DIM_K, DV = PT_HEAD_DIM_V, CK = PT_CHUNK_K, CV = PT_CHUNK_V;
constexpr int STEPS_K = (DK + 32 * CK - 1) / (32 * CK), STEPS_V = (DV + 32 * CV - 1) / (32 * CV);
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

template <int DTYPE> struct Type;
template <> struct Type<0> { using T = float; };
template <> struct Type<1> { using T = __nv_bfloat16; };
template <> struct Type<2> { using T = __half; };
template <> struct Type<3> { using T = __nv_fp8_e4m3; };
template <> struct Type<4> { using T = signed char; };
using Q = Type<PT_Q_DTYPE>::T;
using KV = Type<PT_KV_DTYPE>::T;

// N adjacent elements as floats, loaded in one piece.
template <class T, int N> struct alignas(sizeof(T) * N) Chunk { T x[N]; };
template <int N, class T> __device__ void load(const T* at, float* out) {
    const Chunk<T, N> chunk = *reinterpret_cast<const Chunk<T, N>*>(at);
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = float(chunk.x[k]);
}

extern "C" __global__ void __launch_bounds__(32 * PT_WARPS) attention_paged(
    Q* __restrict__ out,                      // [num_tokens, num_q_heads, DV]
    const Q* __restrict__ q,                  // [num_tokens, num_q_heads, DK]
    const KV* __restrict__ k_cache, const KV* __restrict__ v_cache,
    const int* __restrict__ block_table,      // [num_seqs, max_blocks]
    const int* __restrict__ context_lens,     // [num_seqs]
    const int* __restrict__ query_start_loc,  // [num_seqs + 1]
    const float* __restrict__ sinks, const float* __restrict__ alibi_slopes,
    const float* __restrict__ k_scale, const float* __restrict__ v_scale, float* __restrict__ lse,
    long long q_token, long long q_head, long long k_block, long long k_slot, long long k_head, long long k_outer,
    long long pack, long long v_block, long long v_slot, long long v_head, long long v_dim, long long out_token,
    long long out_head, long long lse_token, long long table_seq, long long num_seqs, float scale, float soft_cap,
    long long k_scale_block, long long k_scale_head, long long v_scale_block, long long v_scale_head) {
    __shared__ float warp_top[PT_WARPS], warp_total[PT_WARPS], warp_acc[PT_WARPS][DV];
    const int token = blockIdx.x, head = blockIdx.y, kv_head = head / PT_GROUP;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= query_start_loc[num_seqs]) return;
    int low = 0, high = int(num_seqs);
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (query_start_loc[middle] <= token) low = middle; else high = middle;
    }
    const int* table = block_table + low * table_seq;
    const int position = context_lens[low] - (query_start_loc[low + 1] - token);
    const int first = PT_WINDOW > 0 && position - PT_WINDOW + 1 > 0 ? position - PT_WINDOW + 1 : 0;

    float query[STEPS_K][CK];
#pragma unroll
    for (int s = 0; s < STEPS_K; ++s) {
        const int d = (s * 32 + lane) * CK;
#pragma unroll
        for (int k = 0; k < CK; ++k) query[s][k] = 0.0f;
        if (d < DK) load<CK>(q + token * q_token + head * q_head + d, query[s]);
    }
    float score_scale = scale, value_scale = 1.0f, slope = 0.0f;
    if (PT_HAS_SCALES) { score_scale *= k_scale[kv_head * PT_SCALE_STRIDE]; value_scale = v_scale[kv_head * PT_SCALE_STRIDE]; }
    if (PT_HAS_ALIBI) slope = alibi_slopes[head];

    float top = -PT_INFINITY, total = 0.0f, lost = 0.0f, acc[STEPS_V][CV];
#pragma unroll
    for (int s = 0; s < STEPS_V; ++s)
#pragma unroll
        for (int k = 0; k < CV; ++k) acc[s][k] = 0.0f;
    for (int b = first / PT_BLOCK_SIZE + warp; b * PT_BLOCK_SIZE <= position; b += PT_WARPS) {
        const long long block = table[b];
        const int begin = max(first, b * PT_BLOCK_SIZE), end = min(position + 1, (b + 1) * PT_BLOCK_SIZE);
        for (int t = begin; t < end; ++t) {
            const int slot = t - b * PT_BLOCK_SIZE;
            const KV* k_row = k_cache + block * k_block + slot * k_slot + kv_head * k_head;
            float score = 0.0f;
#pragma unroll
            for (int s = 0; s < STEPS_K; ++s) {
                const int d = (s * 32 + lane) * CK;
                float key[CK];
                if (d >= DK) continue;
                load<CK>(k_row + (d / pack) * k_outer + d % pack, key);
#pragma unroll
                for (int k = 0; k < CK; ++k) score += query[s][k] * key[k];
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
            score *= score_scale;
            if (PT_TOKEN_SCALES) score *= k_scale[block * k_scale_block + kv_head * k_scale_head + slot];
            if (PT_HAS_CAP) score = soft_cap * tanhf(score / soft_cap);
            if (PT_HAS_ALIBI) score += slope * float(t - position);
            score *= LOG2E;
            const float new_top = fmaxf(top, score), shrink = exp2f(top - new_top), p = exp2f(score - new_top);
            top = new_top;
            // One sum over a whole context: without what each addition lost, thousands of small weights would drift.
            total *= shrink;
            const float added = p - lost * shrink, sum = total + added;
            lost = (sum - total) - added;
            total = sum;
            const float weight = PT_TOKEN_SCALES ? p * v_scale[block * v_scale_block + kv_head * v_scale_head + slot] : p;
            const KV* v_row = v_cache + block * v_block + slot * v_slot + kv_head * v_head;
#pragma unroll
            for (int s = 0; s < STEPS_V; ++s) {
                const int d = (s * 32 + lane) * CV;
                float value[CV];
                if (d >= DV) continue;
                load<CV>(v_row + d * v_dim, value);
#pragma unroll
                for (int k = 0; k < CV; ++k) acc[s][k] = acc[s][k] * shrink + weight * value[k];
            }
        }
    }
    if (lane == 0) { warp_top[warp] = top; warp_total[warp] = total; }
#pragma unroll
    for (int s = 0; s < STEPS_V; ++s)
#pragma unroll
        for (int k = 0; k < CV; ++k)
            if ((s * 32 + lane) * CV + k < DV) warp_acc[warp][(s * 32 + lane) * CV + k] = acc[s][k];
    __syncthreads();

    top = -PT_INFINITY;
    for (int w = 0; w < PT_WARPS; ++w) top = fmaxf(top, warp_top[w]);
    const float sink = PT_HAS_SINKS ? sinks[head] * LOG2E : -PT_INFINITY;
    top = fmaxf(top, sink);
    const float safe_top = top == -PT_INFINITY ? 0.0f : top;
    total = 0.0f;
    if (PT_HAS_SINKS) total = sink == PT_INFINITY ? 1.0f : exp2f(sink - safe_top);  // inf - inf is no weight
    for (int w = 0; w < PT_WARPS; ++w) total += warp_total[w] * exp2f(warp_top[w] - safe_top);
    const float out_scale = total == 0.0f ? 0.0f : value_scale / total;  // a NaN stays one
    for (int d = threadIdx.x; d < DV; d += 32 * PT_WARPS) {
        float value = 0.0f;
        for (int w = 0; w < PT_WARPS; ++w) value += warp_acc[w][d] * exp2f(warp_top[w] - safe_top);
        out[token * out_token + head * out_head + d] = Q(value * out_scale);
    }
    if (lse != nullptr && threadIdx.x == 0)
        lse[token * lse_token + head] = total == 0.0f ? top : (top + log2f(total)) * LN2;
}

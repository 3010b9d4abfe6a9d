// Read bandwidth of a buffer by several threads: what a paged-attention kernel can at most be fed with.
// Each thread sums its own contiguous part `repeats` times between a common start and its own end.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#define PT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

typedef uint64_t Vec16 __attribute__((vector_size(16)));
typedef uint64_t Vec32 __attribute__((vector_size(32)));
typedef uint64_t Vec64 __attribute__((vector_size(64)));

constexpr int64_t kStepBytes = 512;    // read between two prefetches of the same size
constexpr int64_t kAheadBytes = 2048;  // 1 to 4 KiB read equally fast

// One function per instruction set, with vectors exactly as wide as its registers (wider ones are split badly) and
// eight independent sums, so that the additions do not bound the loads. The prefetch crosses page boundaries, at which
// the hardware's own prefetchers stop.
#define PT_DEFINE_SUM(NAME, TARGET, VEC, AHEAD)                                                       \
    TARGET uint64_t NAME(const char* data, int64_t num_bytes) {                                       \
        VEC a = {}, b = {}, c = {}, d = {}, e = {}, f = {}, g = {}, h = {};                           \
        for (int64_t i = 0; i < num_bytes; i += kStepBytes) {                                         \
            if (AHEAD) {                                                                              \
                for (int64_t j = 0; j < kStepBytes; j += 64) __builtin_prefetch(data + i + AHEAD + j); \
            }                                                                                         \
            for (int64_t j = 0; j < kStepBytes; j += 8 * static_cast<int64_t>(sizeof(VEC))) {         \
                const VEC* lines = reinterpret_cast<const VEC*>(data + i + j);                        \
                a += lines[0];                                                                        \
                b += lines[1];                                                                        \
                c += lines[2];                                                                        \
                d += lines[3];                                                                        \
                e += lines[4];                                                                        \
                f += lines[5];                                                                        \
                g += lines[6];                                                                        \
                h += lines[7];                                                                        \
            }                                                                                         \
        }                                                                                             \
        a += b + c + d + e + f + g + h;                                                               \
        uint64_t total = 0;                                                                           \
        for (uint64_t k = 0; k < sizeof(VEC) / 8; ++k) total += a[k];                                 \
        return total;                                                                                 \
    }

PT_DEFINE_SUM(sum_portable, , Vec16, 0)
PT_DEFINE_SUM(sum_portable_ahead, , Vec16, kAheadBytes)
#if defined(__x86_64__)
PT_DEFINE_SUM(sum_avx2, __attribute__((target("avx2"))), Vec32, 0)
PT_DEFINE_SUM(sum_avx2_ahead, __attribute__((target("avx2"))), Vec32, kAheadBytes)
PT_DEFINE_SUM(sum_avx512, __attribute__((target("avx512f"))), Vec64, 0)
PT_DEFINE_SUM(sum_avx512_ahead, __attribute__((target("avx512f"))), Vec64, kAheadBytes)
#endif

using Sum = uint64_t (*)(const char*, int64_t);

Sum best_sum(bool ahead) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return ahead ? sum_avx512_ahead : sum_avx512;
    if (__builtin_cpu_supports("avx2")) return ahead ? sum_avx2_ahead : sum_avx2;
#endif
    return ahead ? sum_portable_ahead : sum_portable;
}

}  // namespace

// Seconds of reading `num_bytes` at `data` (64-byte aligned, a multiple of 512 bytes) `repeats` times with
// `num_threads` threads, with software prefetch if `ahead` is not 0. `sink` takes the sum.
PT_EXPORT double pagedtune_stream_read(const void* data, int64_t num_bytes, int32_t num_threads, int64_t repeats,
                                       int32_t ahead, uint64_t* sink) {
    const Sum sum = best_sum(ahead != 0);
    const char* bytes = static_cast<const char*>(data);
    const int64_t steps = num_bytes / kStepBytes;
    std::atomic<int32_t> waiting{0};
    std::atomic<bool> start{false};
    std::atomic<uint64_t> total{0};
    auto read = [&](int32_t thread) {
        const int64_t first = steps * thread / num_threads * kStepBytes;
        const int64_t last = steps * (thread + 1) / num_threads * kStepBytes;
        waiting.fetch_add(1);
        while (!start.load(std::memory_order_acquire)) std::this_thread::yield();
        uint64_t result = 0;
        for (int64_t i = 0; i < repeats; ++i) {
            result += sum(bytes + first, last - first);
            asm volatile("" : "+r"(result) : : "memory");  // every pass reads anew
        }
        total.fetch_add(result);
    };
    std::vector<std::thread> threads;
    for (int32_t thread = 1; thread < num_threads; ++thread) threads.emplace_back(read, thread);
    while (waiting.load() != num_threads - 1) std::this_thread::yield();
    const auto begin = std::chrono::steady_clock::now();
    start.store(true, std::memory_order_release);
    read(0);
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    *sink += total.load();
    return seconds.count();
}

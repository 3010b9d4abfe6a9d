// Threads of the library. Work is a count of items; participants claim items one by one from a ticket that names the
// job, and the caller takes part. The caller waits only for CLAIMED items, so that a worker which the kernel of the
// machine schedules late, or never, cannot delay a launch: it finds the ticket of a job that is over.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "pagedtune_cpu.h"

namespace pagedtune {

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Iterations of cpu_relax before a worker sleeps: some tens of microseconds (pause takes 40-140 cycles).
constexpr int SPIN_ROUNDS = 1500;

class Pool;

// A participant's view of one job.
class Claims {
public:
    Claims(std::atomic<uint64_t>& ticket, uint64_t job, uint32_t count, int participants)
        : ticket_(ticket), job_(job), count_(count), participants_(participants) {}

    // The next item, or -1. With `ahead` only if enough items are left to keep the other participants busy.
    int64_t next(bool ahead) {
        uint64_t seen = ticket_.load(std::memory_order_acquire);
        while (true) {
            const uint32_t item = static_cast<uint32_t>(seen);
            if ((seen >> 32) != job_ || item >= count_) return -1;
            if (ahead && count_ - item < static_cast<uint32_t>(participants_)) return -1;
            if (ticket_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) {
                ++claimed_;
                return item;
            }
        }
    }
    uint32_t claimed() const { return claimed_; }

private:
    std::atomic<uint64_t>& ticket_;
    uint64_t job_;
    uint32_t count_;
    int participants_;
    uint32_t claimed_ = 0;
};

// Processes items until claims run out; every claimed item must be finished on return.
using Body = void (*)(void* context, Claims& claims);

class Pool {
public:
    Pool() : pid_(getpid()) {}

    pid_t pid() const { return pid_; }

    void run(Body body, void* context, uint32_t count, int num_threads) {
        std::lock_guard<std::mutex> one_launch(launch_);
        const int helpers = grow(num_threads - 1);
        const uint64_t job = publish(body, context, count, helpers + 1);
        Claims claims(ticket_, job, count, helpers + 1);
        body(context, claims);
        finished_.fetch_add(claims.claimed(), std::memory_order_acq_rel);
        for (int spins = 0; finished_.load(std::memory_order_acquire) != count; ++spins) {
            cpu_relax();
            if (spins > SPIN_ROUNDS) std::this_thread::yield();
        }
    }

    // Ends the threads; the pool must be idle afterwards. Called before the code could be unmapped.
    void stop() {
        std::lock_guard<std::mutex> one_launch(launch_);
        {
            std::lock_guard<std::mutex> lock(sleep_);
            stopping_.store(true, std::memory_order_seq_cst);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
    }

private:
    int grow(int wanted) {
        try {
            while (static_cast<int>(workers_.size()) < wanted) {
                const int index = static_cast<int>(workers_.size());
                workers_.emplace_back(&Pool::work, this, index, ticket_.load(std::memory_order_acquire) >> 32);
            }
        } catch (const std::system_error&) {  // no more threads to be had: the caller does the rest of the work
        } catch (const std::bad_alloc&) {
        }
        const int have = static_cast<int>(workers_.size());
        return have < wanted ? have : wanted;
    }

    // Even job numbers are open, the odd one in between has no items: no thread can pair the fields of one job with
    // the ticket of another.
    uint64_t publish(Body body, void* context, uint32_t count, int participants) {
        const uint64_t job = ((ticket_.load(std::memory_order_relaxed) >> 32) + 2) & 0xffffffffu;
        ticket_.store(((job - 1) & 0xffffffffu) << 32 | 0xffffffffu, std::memory_order_seq_cst);
        body_.store(body, std::memory_order_release);
        context_.store(context, std::memory_order_release);
        count_.store(count, std::memory_order_release);
        participants_.store(participants, std::memory_order_release);
        finished_.store(0, std::memory_order_release);
        ticket_.store(job << 32, std::memory_order_seq_cst);
        if (participants > 1 && sleepers_.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(sleep_); }
            wake_.notify_all();
        }
        return job;
    }

    // Waits until the ticket names another job than `last`; false at the end of the pool.
    bool wait(uint64_t last) {
        for (int spins = 0; spins < SPIN_ROUNDS; ++spins) {
            if (stopping_.load(std::memory_order_relaxed)) return false;
            if ((ticket_.load(std::memory_order_acquire) >> 32) != last) return true;
            cpu_relax();
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] {
            return stopping_.load(std::memory_order_seq_cst) ||
                   (ticket_.load(std::memory_order_seq_cst) >> 32) != last;
        });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        return !stopping_.load(std::memory_order_relaxed);
    }

    void work(int index, uint64_t last) {
        while (wait(last)) {
            // If the ticket names the same open job before and after the fields are read, they belong to it.
            last = ticket_.load(std::memory_order_acquire) >> 32;
            const Body body = body_.load(std::memory_order_acquire);
            void* const context = context_.load(std::memory_order_acquire);
            const uint32_t count = count_.load(std::memory_order_acquire);
            const int participants = participants_.load(std::memory_order_acquire);
            if ((ticket_.load(std::memory_order_seq_cst) >> 32) != last || (last & 1) != 0) continue;
            if (index + 1 >= participants) continue;
            Claims claims(ticket_, last, count, participants);
            body(context, claims);
            // Nothing claimed: the job may be over and its context gone; `body` touches it only for claimed items.
            if (claims.claimed() > 0) finished_.fetch_add(claims.claimed(), std::memory_order_acq_rel);
        }
    }

    const pid_t pid_;
    std::mutex launch_, sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    alignas(64) std::atomic<uint64_t> ticket_{0};  // job number (32 bits), next item (32 bits)
    alignas(64) std::atomic<uint32_t> finished_{0};
    alignas(64) std::atomic<Body> body_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<uint32_t> count_{0};
    std::atomic<int> participants_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
};

// The pool of this process. A forked child has none of its parent's threads: it leaves that pool alone and makes one.
class PoolHolder {
public:
    ~PoolHolder() {
        Pool* pool = pool_.load(std::memory_order_acquire);
        if (pool == nullptr || pool->pid() != getpid()) return;
        pool->stop();
        delete pool;
    }
    Pool* get() {
        Pool* pool = pool_.load(std::memory_order_acquire);
        while (pool == nullptr || pool->pid() != getpid()) {
            Pool* fresh = new (std::nothrow) Pool();
            if (fresh == nullptr) return nullptr;
            if (pool_.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return fresh;
            delete fresh;
        }
        return pool;
    }

private:
    std::atomic<Pool*> pool_{nullptr};
};

inline PoolHolder pool_holder;

// Runs items 0..count-1 (fewer than 2^31) of `body` on up to num_threads threads.
inline int32_t parallel(Body body, void* context, int64_t count, int num_threads) {
    if (count <= 0) return PT_OK;
    if (num_threads <= 1 || count == 1) {
        std::atomic<uint64_t> ticket{0};
        Claims claims(ticket, 0, static_cast<uint32_t>(count), 1);
        body(context, claims);
        return PT_OK;
    }
    Pool* const pool = pool_holder.get();
    if (pool == nullptr) return PT_NO_MEMORY;
    pool->run(body, context, static_cast<uint32_t>(count), num_threads);
    return PT_OK;
}

}  // namespace pagedtune

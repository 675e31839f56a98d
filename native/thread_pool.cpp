#include "thread_pool.hpp"

#include <algorithm>
#include <chrono>

#if ETE_X86
#include <immintrin.h>
#endif

namespace ete {

namespace {

// Long enough to bridge the Python code between two ops of a layer, short enough not to burn a core between tokens.
constexpr auto kSpinTime = std::chrono::microseconds(200);

inline void relax() {
#if ETE_X86
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(std::max(1, threads)) {
  workers_.reserve(threads_ - 1);
  for (int thread = 1; thread < threads_; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_.store(true, std::memory_order_seq_cst);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_part(int thread) const {
  const int64_t grains = (job_count_ + job_grain_ - 1) / job_grain_;
  const int64_t begin = grains * thread / threads_ * job_grain_;
  const int64_t end = std::min(grains * (thread + 1) / threads_ * job_grain_, job_count_);
  if (begin < end) job_(job_context_, thread, begin, end);
}

void ThreadPool::dispatch() {
  pending_.store(threads_ - 1, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) {
    // Taking the lock orders this after a worker's check of the generation, so the notification cannot be missed.
    { const std::lock_guard lock(mutex_); }
    wake_.notify_all();
  }
  run_part(0);
  // The worker this waits for may have lost its core to another process: give ours away now and then.
  for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins > 20000) {
      std::this_thread::yield();
    } else {
      relax();
    }
  }
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  while (true) {
    auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen && !stopping_.load(std::memory_order_acquire)) {
      relax();
      if ((++spins & 63) == 0 && std::chrono::steady_clock::now() > deadline) {
        std::unique_lock lock(mutex_);
        parked_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen || stopping_.load(); });
        parked_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
    if (stopping_.load(std::memory_order_acquire)) return;
    seen = generation_.load(std::memory_order_acquire);
    run_part(thread);
    pending_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace ete

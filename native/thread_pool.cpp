#include "thread_pool.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

#if ETE_X86
#include <immintrin.h>
#endif

namespace ete {

namespace {

// Long enough to bridge the Python code between two ops of a layer, short enough not to burn a core between tokens.
constexpr auto kSpinTime = std::chrono::microseconds(200);
// Waits this many times (about 20 ns each) before offering the core to others at every turn: where another process has
// taken one core of ours, the thread that is waited for may be queueing behind the one that spins. Measured with one of
// two cores taken: an empty job took 230 us, the whole spin of a worker, without.
constexpr int kSpinsAlone = 100;
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t(2) << 20;

inline void relax() {
#if ETE_X86
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

inline void wait_turn(int spins) {
  if (spins < kSpinsAlone) {
    relax();
  } else {
    std::this_thread::yield();
  }
}

constexpr size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::atomic<int> fork_count{0};

int current_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });
  (void)registered;
  return fork_count.load(std::memory_order_relaxed);
}

// Signals belong to the thread that runs Python; faults stay with the thread that makes them.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t set;
    sigfillset(&set);
    for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP}) sigdelset(&set, fault);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Scratch::~Scratch() { std::free(data_); }

void Scratch::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  const size_t alignment = bytes >= kHugePage ? kHugePage : kPage;
  const size_t rounded = round_up(bytes, alignment);
  auto* fresh = static_cast<std::byte*>(std::aligned_alloc(alignment, rounded));
  if (!fresh) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (alignment == kHugePage) madvise(fresh, rounded, MADV_HUGEPAGE);
#endif
  std::free(data_);
  data_ = fresh;
  bytes_ = rounded;
}

ThreadPool::ThreadPool(int threads) : threads_(std::max(1, threads)), forks_(current_forks()) {
  const BlockedSignals blocked;
  workers_->reserve(threads_ - 1);
  try {
    for (int thread = 1; thread < threads_; ++thread) workers_->emplace_back([this, thread] { work(thread); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (forked()) {
    // The threads are the parent's: joining them, or destroying what they wait on, would wait for ever.
    (void)workers_.release();
    (void)wake_.release();
    return;
  }
  stop();
}

bool ThreadPool::forked() const { return fork_count.load(std::memory_order_relaxed) != forks_; }

void ThreadPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_.store(true, std::memory_order_seq_cst);
  }
  wake_->notify_all();
  for (auto& worker : *workers_) worker.join();
  workers_->clear();
}

void ThreadPool::reserve(size_t shared_bytes, size_t thread_bytes) {
  shared_.reserve(shared_bytes);
  if (thread_bytes > thread_bytes_) {
    const size_t rounded = round_up(thread_bytes, kPage);
    private_.reserve(rounded * threads_);
    thread_bytes_ = rounded;
  }
}

void ThreadPool::run_part(int thread) const noexcept {
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
    {
      const std::lock_guard lock(mutex_);
    }
    wake_->notify_all();
  }
  run_part(0);
  for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins) wait_turn(spins);
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  while (true) {
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen && !stopping_.load(std::memory_order_acquire)) {
      wait_turn(spins);
      if ((++spins & 63) == 0 && std::chrono::steady_clock::now() > deadline) {
        std::unique_lock lock(mutex_);
        parked_.fetch_add(1, std::memory_order_seq_cst);
        wake_->wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen || stopping_.load(); });
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

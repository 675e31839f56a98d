// A persistent pool: the caller works too, the others spin for a while after each job, then park.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ete {

// Memory for kernels, aligned to 4096 (huge pages where the system gives them). Grows only when asked to.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Holds at least `bytes` afterwards; the content is lost. Throws std::bad_alloc.
  void reserve(size_t bytes);
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class ThreadPool {
 public:
  // Throws std::system_error when a thread cannot be started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Scratch shared by the threads of a job, and scratch of each. Called at load, never while a job runs.
  void reserve(size_t shared_bytes, size_t thread_bytes);
  size_t shared_bytes() const { return shared_.bytes(); }
  size_t thread_bytes() const { return thread_bytes_; }
  std::byte* shared_scratch() const { return shared_.data(); }
  std::byte* thread_scratch(int thread) const { return private_.data() + thread * thread_bytes_; }

  // Calls function(thread, begin, end) once per thread with the static, contiguous parts of [0, count), each part a
  // multiple of `grain` (the last one excepted), and returns when all are done. Not reentrant: one job at a time.
  // A job must not throw: there is nobody to hand an exception of a worker to, so one ends the process
  // (std::terminate), on whatever thread. What can fail, memory above all, is taken before the job.
  // In a child process made by fork() the workers do not exist: the caller does it all.
  template <typename Function>
  void run(int64_t count, int64_t grain, const Function& function) {
    const Job job = [](const void* context, int thread, int64_t begin, int64_t end) noexcept {
      (*static_cast<const Function*>(context))(thread, begin, end);
    };
    if (threads_ == 1 || count <= grain || forked()) {
      if (count > 0) job(&function, 0, int64_t(0), count);
      return;
    }
    job_context_ = &function;
    job_ = job;
    job_count_ = count;
    job_grain_ = grain;
    dispatch();
  }

 private:
  using Job = void (*)(const void* context, int thread, int64_t begin, int64_t end) noexcept;

  bool forked() const;
  void dispatch();
  void work(int thread);
  void run_part(int thread) const noexcept;
  void stop();

  int threads_;
  int forks_;  // count of fork() calls this process had come from when the pool was made
  Job job_ = nullptr;
  const void* job_context_ = nullptr;
  int64_t job_count_ = 0;
  int64_t job_grain_ = 1;
  // Apart from each other: workers read the first while they spin, and write the second.
  alignas(64) std::atomic<uint64_t> generation_{0};
  alignas(64) std::atomic<int> pending_{0};
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  // Apart from the pool, so that a child process can leave them behind.
  std::unique_ptr<std::condition_variable> wake_ = std::make_unique<std::condition_variable>();
  std::unique_ptr<std::vector<std::thread>> workers_ = std::make_unique<std::vector<std::thread>>();
  Scratch shared_;
  Scratch private_;
  size_t thread_bytes_ = 0;
};

}  // namespace ete

// A persistent pool: the caller works too, the others spin for a while after each job, then park.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ete {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls function(thread, begin, end) once per thread with the static, contiguous parts of [0, count), each part a
  // multiple of `grain` (the last one excepted), and returns when all are done. Not reentrant: one job at a time.
  template <typename Function>
  void run(int64_t count, int64_t grain, const Function& function) {
    if (threads_ == 1 || count <= grain) {
      function(0, int64_t(0), count);
      return;
    }
    job_context_ = &function;
    job_ = [](const void* context, int thread, int64_t begin, int64_t end) {
      (*static_cast<const Function*>(context))(thread, begin, end);
    };
    job_count_ = count;
    job_grain_ = grain;
    dispatch();
  }

 private:
  void dispatch();
  void work(int thread);
  void run_part(int thread) const;

  int threads_;
  void (*job_)(const void*, int, int64_t, int64_t) = nullptr;
  const void* job_context_ = nullptr;
  int64_t job_count_ = 0;
  int64_t job_grain_ = 1;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace ete

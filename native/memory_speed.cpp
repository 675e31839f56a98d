#include "memory_speed.hpp"

#include <cstring>
#include <vector>

namespace ete {

uint64_t read_memory(ThreadPool& pool, const void* data, int64_t bytes) {
  constexpr int64_t kBlock = 4096;
  std::vector<uint64_t> sums(size_t(pool.threads()) * 8);  // a cache line for each thread
  const auto* base = static_cast<const char*>(data);
  pool.run(bytes / kBlock, 1, [&](int thread, int64_t begin, int64_t end) {
    uint64_t lanes[16] = {};
    for (const char* p = base + begin * kBlock; p < base + end * kBlock; p += sizeof lanes) {
      uint64_t words[16];
      std::memcpy(words, p, sizeof words);
      for (int i = 0; i < 16; ++i) lanes[i] += words[i];
    }
    for (const uint64_t lane : lanes) sums[size_t(thread) * 8] += lane;
  });
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace ete

// Work units of unequal cost over the threads of a pool: contiguous ranges whose costs are nearly equal.
#pragma once
#include <algorithm>
#include <cstdint>

#include "thread_pool.hpp"

namespace ete {

// Calls body(thread, unit) once for every unit in [0, count). cost(unit) >= 0 is called several times per unit. Jobs
// whose total cost is below `worth_threads` stay in the caller, as waking the others would take longer.
template <typename Cost, typename Body>
void run_balanced(ThreadPool& pool, int64_t count, int64_t worth_threads, const Cost& cost, const Body& body) {
  int64_t total = 0;
  for (int64_t unit = 0; unit < count; ++unit) total += cost(unit);
  const int64_t parts = pool.threads();
  if (parts == 1 || total < worth_threads) {
    for (int64_t unit = 0; unit < count; ++unit) body(0, unit);
    return;
  }
  pool.run(parts, 1, [&](int thread, int64_t first, int64_t last) {
    // A unit belongs to the part in which the middle of its cost lies.
    int64_t before = 0;
    for (int64_t unit = 0; unit < count; ++unit) {
      const int64_t size = cost(unit);
      const int64_t part = std::min((2 * before + size) * parts / (2 * total), parts - 1);
      before += size;
      if (part >= last) return;
      if (part >= first) body(thread, unit);
    }
  });
}

}  // namespace ete

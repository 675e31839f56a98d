// How fast this machine reads memory: the ceiling of every product with one token.
#pragma once
#include <cstdint>

#include "thread_pool.hpp"

namespace ete {

// Reads whole 4096-byte blocks of [data, data + bytes) once, shared out over the pool; returns the sum of their words,
// so that no compiler leaves the reading out.
uint64_t read_memory(ThreadPool& pool, const void* data, int64_t bytes);

}  // namespace ete

// CUDA's language on a CPU: force-included before a kernel source, which g++ then compiles as it is.
//
// The threads of a block are fibers that run in lane order, or its reverse, until they wait for each other. Shared
// memory is filled with 0xff bytes (NaN) for each block and fenced. What a GPU leaves undefined is an error here where
// it can be seen: a collective that not all lanes reach, a barrier that threads have left behind, an unaligned vector
// access.
#pragma once
#define ETE_EMULATOR 1

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __constant__ static const
#define ETE_LAUNCH_BOUNDS
#define ETE_INFINITY std::numeric_limits<float>::infinity()

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

inline uint32_t __float_as_uint(float v) { return __builtin_bit_cast(uint32_t, v); }
inline int __float_as_int(float v) { return __builtin_bit_cast(int, v); }
inline float __uint_as_float(uint32_t v) { return __builtin_bit_cast(float, v); }
inline float __int_as_float(int v) { return __builtin_bit_cast(float, v); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

namespace ete_emulator {

struct Dim {
  unsigned x, y, z;
};

// Why a fiber does not run.
enum class Wait { none, warp, block, done };

constexpr int kMaxThreads = 1024;
constexpr int kMaxArrays = 64;
constexpr size_t kFence = 64;
constexpr size_t kStack = 128 << 10;

struct AsyncCopy {
  void* to;
  const void* from;
  int bytes;
  int group;
};

struct Fiber {
  void* stack_pointer;
  Wait wait;
  const char* collective;  // what it waits at
  const void* in;          // its operand of the collective, on its own stack
  void* out;
  AsyncCopy* copies;
  int copy_count, copy_capacity, group;
};

struct Array {
  unsigned char* at;
  size_t bytes;
};

struct Block {
  Fiber fibers[kMaxThreads];
  int threads;
  bool descending;
  int arrived[kMaxThreads / 32];
  int at_barrier;
  int left;
  Array arrays[kMaxArrays];
  unsigned char* shared;  // arena of the static and dynamic arrays
  size_t shared_capacity, shared_used;
  unsigned char* dynamic;
  size_t dynamic_bytes;
  unsigned char* stacks;
  void (*body)(void**);
  void** arguments;
  void* scheduler;
  int current, step;  // the thread that runs, and its place in the order
  char error[512];
};

extern Block block;

using Action = void (*)(const void* const* in, void* const* out);

[[noreturn]] void fail(const char* format, ...);
// Wait for the other 31 lanes; the last to come performs `action` for all.
void warp_collective(const char* name, const void* in, void* out, Action action);
void barrier();
void* static_array(int id, size_t bytes);
inline void check_aligned(const void* at, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0) fail("%zu bytes accessed at %p, which is not aligned", bytes, at);
}

// One character (and size) for each parameter: r: pointer to const, w: pointer, i4, i8: integer, f4: float.
template <class T>
struct Kind {
  static constexpr char letter = std::is_floating_point_v<T> ? 'f' : 'i';
};
template <class T>
struct Kind<T*> {
  static constexpr char letter = std::is_const_v<T> ? 'r' : 'w';
};
template <class... P>
const char* signature(void (*)(P...)) {
  static char text[3 * sizeof...(P) + 1];
  char* at = text;
  ((*at++ = Kind<P>::letter, *at++ = static_cast<char>('0' + sizeof(P)), *at++ = ' '), ...);
  return text;
}
template <class... P, size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<P>*>(arguments[I])...);
}
template <class... P>
void invoke(void (*kernel)(P...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>{});
}

}  // namespace ete_emulator

extern ete_emulator::Dim threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { ete_emulator::barrier(); }
inline void __trap() { ete_emulator::fail("__trap()"); }

#define ETE_SHARED(type, name, count) \
  type(&name)[count] =                \
      *reinterpret_cast<type(*)[count]>(ete_emulator::static_array(__COUNTER__, sizeof(type) * (count)))
#define ETE_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(ete_emulator::block.dynamic)

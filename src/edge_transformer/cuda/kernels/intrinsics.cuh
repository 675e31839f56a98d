// Every PTX instruction and intrinsic the kernels use, each as a small device function with a body for the emulator.
// Included by prelude.cuh. A collective ("warp_...", mma, ldmatrix) is called by all 32 lanes of a warp, all alive.
#pragma once

#ifdef ETE_EMULATOR
#include "emulator_intrinsics.hpp"
#else

// ---- warp

ETE_DEVICE float warp_shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
ETE_DEVICE int warp_shuffle(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
ETE_DEVICE uint32_t warp_shuffle(uint32_t value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
ETE_DEVICE float warp_shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
ETE_DEVICE int warp_shuffle_xor(int value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
ETE_DEVICE uint32_t warp_shuffle_xor(uint32_t value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
// Lanes whose source would lie past the warp keep their own value.
ETE_DEVICE float warp_shuffle_down(float value, int by) { return __shfl_down_sync(0xffffffffu, value, by); }
ETE_DEVICE float warp_shuffle_up(float value, int by) { return __shfl_up_sync(0xffffffffu, value, by); }
ETE_DEVICE uint32_t warp_ballot(bool value) { return __ballot_sync(0xffffffffu, value); }
ETE_DEVICE bool warp_any(bool value) { return __any_sync(0xffffffffu, value) != 0; }
ETE_DEVICE bool warp_all(bool value) { return __all_sync(0xffffffffu, value) != 0; }
// Orders shared memory among the lanes of a warp.
ETE_DEVICE void warp_sync() { __syncwarp(0xffffffffu); }

// ---- memory. Addresses are multiples of the size loaded or stored (the emulator checks).

ETE_DEVICE uint4 load16(const void* at) { return *reinterpret_cast<const uint4*>(at); }
ETE_DEVICE float4 load16_float(const void* at) { return *reinterpret_cast<const float4*>(at); }
ETE_DEVICE uint2 load8(const void* at) { return *reinterpret_cast<const uint2*>(at); }
ETE_DEVICE float2 load8_float(const void* at) { return *reinterpret_cast<const float2*>(at); }
ETE_DEVICE uint32_t load4(const void* at) { return *reinterpret_cast<const uint32_t*>(at); }
ETE_DEVICE uint16_t load2(const void* at) { return *reinterpret_cast<const uint16_t*>(at); }
ETE_DEVICE void store16(void* at, uint4 value) { *reinterpret_cast<uint4*>(at) = value; }
ETE_DEVICE void store16(void* at, float4 value) { *reinterpret_cast<float4*>(at) = value; }
ETE_DEVICE void store8(void* at, uint2 value) { *reinterpret_cast<uint2*>(at) = value; }
ETE_DEVICE void store8(void* at, float2 value) { *reinterpret_cast<float2*>(at) = value; }
ETE_DEVICE void store4(void* at, uint32_t value) { *reinterpret_cast<uint32_t*>(at) = value; }
ETE_DEVICE void store2(void* at, uint16_t value) { *reinterpret_cast<uint16_t*>(at) = value; }

// Global memory that nothing writes during the launch and that is read once (weights): past the first-level cache.
ETE_DEVICE uint4 load16_once(const void* at) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at));
  return value;
}
ETE_DEVICE uint2 load8_once(const void* at) {
  uint2 value;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(at));
  return value;
}
ETE_DEVICE uint32_t load4_once(const void* at) {
  uint32_t value;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}
ETE_DEVICE uint16_t load2_once(const void* at) {
  uint16_t value;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(value) : "l"(at));
  return value;
}

// Loads that stay on their side of wait_for_kernels_ahead, past the first-level cache. The others may be moved across
// it by the compiler where it takes the memory for read-only. Before the wait: what no kernel of the pass writes.
ETE_DEVICE uint4 load16_ordered(const void* at) {
  uint4 value;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at)
               : "memory");
  return value;
}
ETE_DEVICE uint2 load8_ordered(const void* at) {
  uint2 value;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(at) : "memory");
  return value;
}
ETE_DEVICE uint32_t load4_ordered(const void* at) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// Asks for the 128 bytes around an address to come to the second-level cache. What they hold may still change.
ETE_DEVICE void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }

// Copies of 16 bytes from global to shared memory that run beside the thread (sm_80; before, at once). What a thread
// copied is there for it after cp_async_wait, for its block after a barrier that follows.
// With bytes < 16 the rest of the 16 is zero; with bytes 0 nothing is read.
ETE_DEVICE void cp_async16(void* shared, const void* global, int bytes = 16) {
#if ETE_ARCH >= 80
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
#else
  uint4 value = make_uint4(0, 0, 0, 0);
  if (bytes == 16) {
    value = load16(global);
  } else {
    for (int i = 0; i < bytes; ++i) reinterpret_cast<uint8_t*>(&value)[i] = reinterpret_cast<const uint8_t*>(global)[i];
  }
  store16(shared, value);
#endif
}
ETE_DEVICE void cp_async_commit() {
#if ETE_ARCH >= 80
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Wait until at most `pending` of this thread's latest groups are under way.
template <int pending>
ETE_DEVICE void cp_async_wait() {
#if ETE_ARCH >= 80
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// ---- numbers

ETE_DEVICE float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
// Round to nearest even.
ETE_DEVICE uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
// 2^value to about 2 ulp, 0 where that would be denormal.
ETE_DEVICE float exp2_approximate(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}
// Two floats rounded to bf16 (nearest even) in one word, `low` in the lower half.
ETE_DEVICE uint32_t pack_bf16(float low, float high) {
#if ETE_ARCH >= 80
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const uint32_t a = __float_as_uint(low), b = __float_as_uint(high);
  const uint32_t first = (a & 0x7fffffffu) > 0x7f800000u ? a | 0x400000u : a + 0x7fffu + ((a >> 16) & 1u);
  const uint32_t second = (b & 0x7fffffffu) > 0x7f800000u ? b | 0x400000u : b + 0x7fffu + ((b >> 16) & 1u);
  return __byte_perm(first, second, 0x7632);
#endif
}
#if ETE_ARCH >= 80
// Two bf16 in a word: a * b + c, rounded once to nearest even.
ETE_DEVICE uint32_t bf16_pair_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}
#endif
// Bytes of the eight of (b:a), chosen by the nibbles of `selector`, lowest first.
ETE_DEVICE uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
// Sum of four products of signed bytes, plus c.
ETE_DEVICE int dp4a(uint32_t a, uint32_t b, int c) { return __dp4a(static_cast<int>(a), static_cast<int>(b), c); }
ETE_DEVICE int population_count(uint32_t bits) { return __popc(bits); }

// The same value, which the compiler takes for another: what is computed from it is computed there, not kept in
// registers from before.
ETE_DEVICE int made_again(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// ---- kernels one after another (sm_90; before, a kernel starts when the one ahead of it has ended)

// Kernels launched with early_start may start once every block of this one has said so, or ended. Not before: they
// take room on the multiprocessors.
ETE_DEVICE void let_next_kernel_start() {
#if ETE_ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until all kernels ahead have ended and their writes are seen. A kernel launched with early_start calls this in every
// thread before it leaves, and before it touches what another kernel writes or reads.
ETE_DEVICE void wait_for_kernels_ahead() {
#if ETE_ARCH >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- tensor cores

// d += a b for a bf16 16 x 16 (rows), b bf16 16 x 8, d f32 16 x 8, in the registers of mma.m16n8k16: with g = lane / 4
// and t = lane % 4, a = {(g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..)}, b = {(2t.., g), (2t + 8.., g)},
// d = {(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)}. The unit truncates its sums. ETE_ARCH >= 80.
#if ETE_ARCH >= 80
ETE_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d = a b: the same, of a sum that begins.
ETE_DEVICE void mma_bf16_first(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
// The same for f16 operands.
ETE_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// Four (two) 8 x 8 matrices of 16-bit numbers from shared memory. Lane 8 i + r gives the address of row r of matrix i
// (16 bytes, aligned); out[i] is the pair (row lane / 4, columns 2 (lane % 4)..) of matrix i, or of its transpose.
ETE_DEVICE void ldmatrix4(uint32_t (&out)[4], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}
ETE_DEVICE void ldmatrix4_transposed(uint32_t (&out)[4], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}
ETE_DEVICE void ldmatrix2(uint32_t (&out)[2], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(from)
               : "memory");
}
ETE_DEVICE void ldmatrix2_transposed(uint32_t (&out)[2], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(from)
               : "memory");
}

#endif

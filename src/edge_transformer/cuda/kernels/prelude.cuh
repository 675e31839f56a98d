// What every kernel includes first: types, shared memory, lanes, numbers and reductions. No instruction of its own:
// those are in intrinsics.cuh.
//
// The compiler sets ETE_ARCH (75, 80, 86, 89, 90, 120: the path to take, which may be lower than the card's) and
// ETE_THREADS (threads of a block, a multiple of 32). An entry point is written
//   extern "C" __global__ void ETE_LAUNCH_BOUNDS name(const float *__restrict__ x, float *__restrict__ out, int rows)
// with pointers and scalars of 4 or 8 bytes as parameters; `const T *` means that the kernel only reads there.
// Products are not contracted (--fmad=false): write fmaf where one rounding is wanted, so that every specialisation
// rounds alike.
#pragma once

#ifndef ETE_EMULATOR
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

// A kernel that would rather have registers than blocks beside it defines ETE_MIN_BLOCKS (1) before its includes.
#ifdef ETE_MIN_BLOCKS
#define ETE_LAUNCH_BOUNDS __launch_bounds__(ETE_THREADS, ETE_MIN_BLOCKS)
#else
#define ETE_LAUNCH_BOUNDS __launch_bounds__(ETE_THREADS)
#endif
// `type name[count]` in shared memory, aligned to 16 bytes, undefined at first.
#define ETE_SHARED(type, name, count) __shared__ __align__(16) type name[count]
// `type *name`: the shared memory whose size the launch gives. Once in a kernel.
#define ETE_DYNAMIC_SHARED(type, name)                                \
  extern __shared__ __align__(16) unsigned char ete_dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(ete_dynamic_shared)
#define ETE_INFINITY __int_as_float(0x7f800000)
#endif

#define ETE_DEVICE static __device__ __forceinline__

constexpr int kWarp = 32;

#include "intrinsics.cuh"

ETE_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) & (kWarp - 1); }
ETE_DEVICE int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

// ---- numbers

// bf16 is the upper half of an f32.
ETE_DEVICE float bf16_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
// The two bf16 of a word, the one at the lower address first.
ETE_DEVICE float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
ETE_DEVICE float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Round to nearest even; a NaN stays a NaN.
ETE_DEVICE uint16_t float_to_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// value = high + middle + low, each a bf16, to 2^-24 of value or better. Returned as packed pairs by split_bf16_pair.
ETE_DEVICE void split_bf16(float value, float& high, float& middle, float& low) {
  high = bf16_to_float(float_to_bf16(value));
  const float rest = value - high;  // exact
  middle = bf16_to_float(float_to_bf16(rest));
  low = rest - middle;  // exact; rounded to bf16 when packed
}

// Two values as three words of bf16 pairs (`first` in the lower half), as the operands of mma_bf16 take them.
ETE_DEVICE void split_bf16_pair(float first, float second, uint32_t& high, uint32_t& middle, uint32_t& low) {
  high = pack_bf16(first, second);
  const float first_rest = first - bf16_low(high);
  const float second_rest = second - bf16_high(high);
  middle = pack_bf16(first_rest, second_rest);
  low = pack_bf16(first_rest - bf16_low(middle), second_rest - bf16_high(middle));
}

// ---- reductions over a warp: every lane takes part and gets the result; the order is fixed

ETE_DEVICE float warp_sum(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += warp_shuffle_xor(value, step);
  return value;
}

ETE_DEVICE float warp_max(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = fmaxf(value, warp_shuffle_xor(value, step));
  return value;
}

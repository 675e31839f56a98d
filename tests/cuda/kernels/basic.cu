// Small kernels for the tests of driver, compiler and emulator: what each shows is in its name.
#include "prelude.cuh"

#ifndef ETE_STEP
#define ETE_STEP 1
#endif

// out[i] = x[i] * factor + y[i] for i < count
extern "C" __global__ void ETE_LAUNCH_BOUNDS scale_add(const float* __restrict__ x, const float* __restrict__ y,
                                                       float* __restrict__ out, float factor, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * ETE_THREADS + threadIdx.x;
  if (i < count) out[i] = fmaf(x[i], factor, y[i]);
}

// counter[0] += ETE_STEP
extern "C" __global__ void ETE_LAUNCH_BOUNDS count_up(int* counter) {
  if (threadIdx.x == 0) counter[0] += ETE_STEP;
}

// out[block] = sum of the block's ETE_THREADS values of x, through static shared memory
extern "C" __global__ void ETE_LAUNCH_BOUNDS block_sum(const float* __restrict__ x, float* __restrict__ out) {
  ETE_SHARED(float, parts, ETE_THREADS / 32);
  const float sum = warp_sum(x[blockIdx.x * ETE_THREADS + threadIdx.x]);
  if (lane_id() == 0) parts[warp_id()] = sum;
#ifndef ETE_WITHOUT_BARRIER
  __syncthreads();
#endif
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int i = 0; i < ETE_THREADS / 32; ++i) total += parts[i];
    out[blockIdx.x] = total;
  }
}

// out = x reversed within each block, through dynamic shared memory
extern "C" __global__ void ETE_LAUNCH_BOUNDS reverse_block(const uint32_t* __restrict__ x, uint32_t* __restrict__ out) {
  ETE_DYNAMIC_SHARED(uint32_t, values);
  const int from = blockIdx.x * ETE_THREADS + threadIdx.x;
  values[threadIdx.x] = x[from];
  __syncthreads();
  out[from] = values[ETE_THREADS - 1 - threadIdx.x];
}

// The same, with the values fetched beside the threads.
extern "C" __global__ void ETE_LAUNCH_BOUNDS reverse_async(const uint4* __restrict__ x, uint4* __restrict__ out) {
  ETE_SHARED(uint4, values, ETE_THREADS);
  const int from = blockIdx.x * ETE_THREADS + threadIdx.x;
  cp_async16(&values[threadIdx.x], &x[from]);
  cp_async_commit();
#ifndef ETE_WITHOUT_WAIT
  cp_async_wait<0>();
#endif
  __syncthreads();
  out[from] = values[ETE_THREADS - 1 - threadIdx.x];
}

// Every conversion of numbers: out[0][i] = f32 of the f16 bits[i], out[1][i] of the bf16 bits[i]; back[0][i] = f16 bits
// of value[i], back[1][i] = bf16 bits, back[2][i] = bf16 bits through pack_bf16.
extern "C" __global__ void ETE_LAUNCH_BOUNDS convert(const uint16_t* __restrict__ bits, const float* __restrict__ value,
                                                     float* __restrict__ out, uint16_t* __restrict__ back, int count) {
  const int i = blockIdx.x * ETE_THREADS + threadIdx.x;
  if (i >= count) return;
  out[i] = half_to_float(bits[i]);
  out[count + i] = bf16_to_float(bits[i]);
  back[i] = float_to_half(value[i]);
  back[count + i] = float_to_bf16(value[i]);
  const uint32_t pair = pack_bf16(value[i], 0.0f);
  back[2 * count + i] = static_cast<uint16_t>(pair & 0xffffu);
}

// out[0..5][lane]: each way of passing values between lanes. One warp.
extern "C" __global__ void ETE_LAUNCH_BOUNDS lanes(const int* __restrict__ x, int* __restrict__ out) {
  const int lane = lane_id();
  const int mine = x[lane];
  out[lane] = warp_shuffle(mine, (lane * 7) % 32);
  out[32 + lane] = warp_shuffle_xor(mine, 5);
  out[64 + lane] = __float_as_int(warp_shuffle_down(__int_as_float(mine), 3));
  out[96 + lane] = __float_as_int(warp_shuffle_up(__int_as_float(mine), 4));
  out[128 + lane] = static_cast<int>(warp_ballot(mine % 3 == 0));
  out[160 + lane] = warp_any(mine == 5) * 2 + warp_all(mine >= 0);
}

// out[i] = dp4a(a, b, 7), byte_permute(a, b, c), population_count(a)
extern "C" __global__ void ETE_LAUNCH_BOUNDS words(const uint32_t* __restrict__ a, const uint32_t* __restrict__ b,
                                                   const uint32_t* __restrict__ c, uint32_t* __restrict__ out) {
  const int i = threadIdx.x;
  out[i] = static_cast<uint32_t>(dp4a(a[i], b[i], 7));
  out[ETE_THREADS + i] = byte_permute(a[i], b[i], c[i]);
  out[2 * ETE_THREADS + i] = static_cast<uint32_t>(population_count(a[i]));
}

#if ETE_ARCH >= 80
// d = c + a b for a [16][16] and b [16][8] in bf16 (f16 with ETE_HALF), c, d [16][8]; operands through ldmatrix. One warp.
extern "C" __global__ void ETE_LAUNCH_BOUNDS multiply(const uint16_t* __restrict__ a, const uint16_t* __restrict__ b,
                                                      const float* __restrict__ c, float* __restrict__ d) {
  ETE_SHARED(uint16_t, a_rows, 16 * 16);
  ETE_SHARED(uint16_t, b_rows, 16 * 8);
  const int lane = lane_id();
  for (int i = lane; i < 16 * 16; i += 32) a_rows[i] = a[i];
  for (int i = lane; i < 16 * 8; i += 32) b_rows[i] = b[i];
  warp_sync();
  uint32_t a_words[4], b_words[2];
  ldmatrix4(a_words, &a_rows[(lane % 16) * 16 + lane / 16 * 8]);
  ldmatrix2_transposed(b_words, &b_rows[(lane % 16) * 8]);
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
#ifdef ETE_HALF
  mma_f16(sums, a_words, b_words);
#else
  mma_bf16(sums, a_words, b_words);
#endif
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}
#endif

// ---- faults

extern "C" __global__ void ETE_LAUNCH_BOUNDS barrier_for_half(float* out) {
  if (threadIdx.x < ETE_THREADS / 2) __syncthreads();
  out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void ETE_LAUNCH_BOUNDS lanes_apart(float* out) {
  float value = 1.0f;
  if (lane_id() < 16) value = warp_shuffle_xor(value, 1);
  out[threadIdx.x] = value;
}

extern "C" __global__ void ETE_LAUNCH_BOUNDS shared_overrun(float* out) {
  ETE_SHARED(float, values, ETE_THREADS);
  values[threadIdx.x + 1] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void ETE_LAUNCH_BOUNDS unaligned(const float* __restrict__ x, float* __restrict__ out) {
  out[threadIdx.x] = load16_float(x + 1).x;
}

// Writes ETE_STEP floats past out + ETE_THREADS.
extern "C" __global__ void ETE_LAUNCH_BOUNDS overrun(float* out) {
  out[threadIdx.x] = 1.0f;
  if (threadIdx.x == 0) out[ETE_THREADS - 1 + ETE_STEP] = 2.0f;
}

extern "C" __global__ void ETE_LAUNCH_BOUNDS last_writer(float* out) { out[0] = static_cast<float>(threadIdx.x); }

extern "C" __global__ void ETE_LAUNCH_BOUNDS wild_write(int64_t address) {
  *reinterpret_cast<float*>(address) = 1.0f;
}

// Counts the instructions that unpack a group of 32 codes on a GPU, for docs/weight-layout.md.
//   nvcc -arch=sm_75 -cubin -o unpack.cubin lab/weight_layout/unpack_cuda.cu && cuobjdump -sass unpack.cubin
// Each kernel's loop body is one group of 32 by one thread: one 16-byte load of codes.
#include <stdint.h>

// 2^23 + byte `selector & 3` of w, as a float: the bytes of 0x4b000000 around it.
__device__ inline float magic_byte(uint32_t w, uint32_t selector) {
  return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440u | selector));
}

// fp32 activations; 2^23 times their sum over the group is taken off once per group by the caller.
extern "C" __global__ void dot_4bit_fp32(const uint4* codes, const float4* x, float* out, int n) {
  float sum = 0;
#pragma unroll 1
  for (int g = threadIdx.x; g < n; g += 32) {
    const uint4 v = codes[g];
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float4 first = x[g * 8 + k], second = x[g * 8 + 4 + k];
      const uint32_t low = w[k] & 0x0f0f0f0f, high = (w[k] >> 4) & 0x0f0f0f0f;
      sum = fmaf(magic_byte(low, 0), first.x, sum);
      sum = fmaf(magic_byte(low, 1), first.y, sum);
      sum = fmaf(magic_byte(low, 2), first.z, sum);
      sum = fmaf(magic_byte(low, 3), first.w, sum);
      sum = fmaf(magic_byte(high, 0), second.x, sum);
      sum = fmaf(magic_byte(high, 1), second.y, sum);
      sum = fmaf(magic_byte(high, 2), second.z, sum);
      sum = fmaf(magic_byte(high, 3), second.w, sum);
    }
  }
  out[threadIdx.x] = sum;
}

// Codes as bf16 128 + q in pairs (columns 4k, 4k + 2), (4k + 1, 4k + 3), and the same 16 further: operands of mma.
extern "C" __global__ void to_bf16_4bit(const uint4* codes, uint4* out, int n) {
#pragma unroll 1
  for (int g = threadIdx.x; g < n; g += 32) {
    const uint4 v = codes[g];
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      out[g * 4 + k] = make_uint4((w[k] & 0x000f000f) | 0x43004300, ((w[k] >> 8) & 0x000f000f) | 0x43004300,
                                  ((w[k] >> 4) & 0x000f000f) | 0x43004300, ((w[k] >> 12) & 0x000f000f) | 0x43004300);
    }
  }
}

// The 5th bits of four columns spread over the bytes of a word: bits 0..3 go to bits 4, 12, 20, 28.
extern "C" __global__ void dot_5bit_dp4a(const uint4* codes, const uint32_t* high_bits, const int4* x, int* out,
                                         int n) {
  int sum = 0;
#pragma unroll 1
  for (int g = threadIdx.x; g < n; g += 32) {
    const uint4 v = codes[g];
    const int4 first = x[2 * g], second = x[2 * g + 1];
    const uint32_t bits = high_bits[g], w[4] = {v.x, v.y, v.z, v.w};
    const int a[4] = {first.x, first.y, first.z, first.w}, b[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t low_fifth = ((bits >> (4 * k)) & 15) * 0x02040810u & 0x10101010u;
      const uint32_t high_fifth = ((bits >> (16 + 4 * k)) & 15) * 0x02040810u & 0x10101010u;
      sum = __dp4a(int((w[k] & 0x0f0f0f0f) | low_fifth), a[k], sum);
      sum = __dp4a(int(((w[k] >> 4) & 0x0f0f0f0f) | high_fifth), b[k], sum);
    }
  }
  out[threadIdx.x] = sum;
}

extern "C" __global__ void dot_4bit_dp4a(const uint4* codes, const int4* x, int* out, int n) {
  int sum = 0;
#pragma unroll 1
  for (int g = threadIdx.x; g < n; g += 32) {
    const uint4 v = codes[g];
    const int4 first = x[2 * g], second = x[2 * g + 1];
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    const int a[4] = {first.x, first.y, first.z, first.w}, b[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      sum = __dp4a(int(w[k] & 0x0f0f0f0f), a[k], sum);
      sum = __dp4a(int((w[k] >> 4) & 0x0f0f0f0f), b[k], sum);
    }
  }
  out[threadIdx.x] = sum;
}

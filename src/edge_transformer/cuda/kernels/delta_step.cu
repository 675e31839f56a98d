// The gated delta rule of decode rows, with the gated norm: block (value head, sequence), the sequence's rows in order.
//
// A thread holds kOwn rows of four columns of S; S is read once and written once, whatever the number of rows. Both
// products with the state before the step come from one reading: o = exp(g) S^T q + (k . q) d.
// Then out = o / sqrt(mean o^2 + eps) * norm * silu(z).
//
// Bytes: 8 * key_dim * value_dim per value head and sequence. Sums over key_dim: a thread its rows in ascending order,
// then the threads' sums in ascending order.
#define ETE_MIN_BLOCKS (ETE_THREADS > 256 ? 2 : 1)
#include "delta.cuh"

constexpr int kColumnGroups = kValueDim / 4;
constexpr int kRowGroups = ETE_THREADS / kColumnGroups < kKeyDim ? ETE_THREADS / kColumnGroups : kKeyDim;
constexpr int kOwn = (kKeyDim + kRowGroups - 1) / kRowGroups;
constexpr bool kHeld = kOwn <= (ETE_THREADS > 256 ? 8 : 16);  // in registers; else S is read again for the update
constexpr int kHeldRows = kHeld ? kOwn : 1;
constexpr int kWarps = ETE_THREADS / kWarp;
constexpr int kValueWarps = (kValueDim + kWarp - 1) / kWarp;
static_assert(kRowGroups >= 1 && kValueWarps <= kWarps, "too few threads");

extern "C" __global__ void ETE_LAUNCH_BOUNDS delta_step(
    const float* __restrict__ qkv, const float* __restrict__ z, const float* __restrict__ a,
    const float* __restrict__ b, const float* __restrict__ decay, const float* __restrict__ dt_bias,
    const float* __restrict__ norm, const int64_t* __restrict__ states, const int* __restrict__ starts,
    const int* __restrict__ next, float* __restrict__ out, int key_heads, int value_heads, int tiled, float eps) {
  ETE_SHARED(float, with_key, kRowGroups* kValueDim);  // partial sums of S^T k
  ETE_SHARED(float, with_query, kRowGroups* kValueDim);
  ETE_SHARED(float, key, kKeyDim);
  ETE_SHARED(float, query, kKeyDim);
  ETE_SHARED(float, change, kValueDim);  // d
  ETE_SHARED(float, squares, kValueWarps);
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const Heads heads{key_heads, value_heads, tiled};
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int* start = starts + 4 * static_cast<int>(blockIdx.y);
  int row = start[0];
  if (row < 0) return;
  const int channels = heads.channels();
  const int four = thread % kColumnGroups * 4, group = thread / kColumnGroups;
  float* state = state_of(states, start[2]) + static_cast<int64_t>(head) * kKeyDim * kValueDim + four;
  bool fresh = start[1] == 0;

  const auto owned = [&](int i) { return group < kRowGroups && group + i * kRowGroups < kKeyDim; };
  const auto read_state = [&](int i) {
    return fresh ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                 : load16_float(state + static_cast<int64_t>(group + i * kRowGroups) * kValueDim);
  };
  float4 held[kHeldRows];
  if (kHeld) {
#pragma unroll
    for (int i = 0; i < kHeldRows; ++i)
      if (owned(i)) held[i] = read_state(i);
  }
  for (; row >= 0; row = next[row]) {
    const float* channel = qkv + static_cast<int64_t>(row) * channels;
    for (int i = thread; i < kKeyDim; i += ETE_THREADS) {
      key[i] = channel[heads.key_channel(head) + i];
      query[i] = channel[heads.query_channel(head) + i];
    }
    const int64_t at = static_cast<int64_t>(row) * value_heads + head;
    const float beta = sigmoid(b[at]);
    const float kept = expf(decay[head] * softplus(a[at] + dt_bias[head]));
    __syncthreads();

    float4 k_sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), q_sum = k_sum;
    const auto take = [&](int i, float4 s) {
      const float k = key[group + i * kRowGroups], q = query[group + i * kRowGroups];
      k_sum = make_float4(fmaf(s.x, k, k_sum.x), fmaf(s.y, k, k_sum.y), fmaf(s.z, k, k_sum.z), fmaf(s.w, k, k_sum.w));
      q_sum = make_float4(fmaf(s.x, q, q_sum.x), fmaf(s.y, q, q_sum.y), fmaf(s.z, q, q_sum.z), fmaf(s.w, q, q_sum.w));
    };
    if (kHeld) {
#pragma unroll
      for (int i = 0; i < kHeldRows; ++i)
        if (owned(i)) take(i, held[i]);
    } else {
#pragma unroll 4
      for (int i = 0; i < kOwn; ++i)
        if (owned(i)) take(i, read_state(i));
    }
    if (group < kRowGroups) {
      store16(with_key + group * kValueDim + four, k_sum);
      store16(with_query + group * kValueDim + four, q_sum);
    }
    __syncthreads();

    float o = 0.0f;
    if (warp_id() < kValueWarps) {
      float products = 0.0f;  // k . q
      for (int i = lane_id(); i < kKeyDim; i += kWarp) products = fmaf(key[i], query[i], products);
      products = warp_sum(products);
      if (thread < kValueDim) {
        float sk = 0.0f, sq = 0.0f;
#pragma unroll 4
        for (int i = 0; i < kRowGroups; ++i) {
          sk += with_key[i * kValueDim + thread];
          sq += with_query[i * kValueDim + thread];
        }
        const float d = beta * fmaf(-kept, sk, channel[heads.value_channel(head) + thread]);
        change[thread] = d;
        o = fmaf(products, d, kept * sq);
      }
      const float sum = warp_sum(o * o);
      if (lane_id() == 0) squares[warp_id()] = sum;
    }
    __syncthreads();

    if (thread < kValueDim) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kValueWarps; ++warp) sum += squares[warp];
      const float rms = sqrtf(sum / static_cast<float>(kValueDim) + eps);
      out[at * kValueDim + thread] = o / rms * norm[thread] * silu(z[at * kValueDim + thread]);
    }
    const auto update = [&](int i, float4 s) {
      const float k = key[group + i * kRowGroups];
      const float4 d = load16_float(change + four);
      return make_float4(fmaf(k, d.x, kept * s.x), fmaf(k, d.y, kept * s.y), fmaf(k, d.z, kept * s.z),
                         fmaf(k, d.w, kept * s.w));
    };
    if (kHeld) {
#pragma unroll
      for (int i = 0; i < kHeldRows; ++i)
        if (owned(i)) held[i] = update(i, held[i]);
    } else {
#pragma unroll 4
      for (int i = 0; i < kOwn; ++i)
        if (owned(i))
          store16(state + static_cast<int64_t>(group + i * kRowGroups) * kValueDim, update(i, read_state(i)));
      fresh = false;
    }
    __syncthreads();  // key, query and change are read before the next row writes them
  }
  if (kHeld) {
#pragma unroll
    for (int i = 0; i < kHeldRows; ++i)
      if (owned(i)) store16(state + static_cast<int64_t>(group + i * kRowGroups) * kValueDim, held[i]);
  }
}

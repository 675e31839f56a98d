// Gates around the mixers: the gated norm after the delta rule of prompt rows, the split of joined queries and gates,
// and the gate on attention's output. All move each number once.
#include "rows.cuh"

ETE_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// x = x / sqrt(mean(x^2) + eps) * norm * silu(z) over the numbers of a head, for prompt rows. Block (heads, row), a
// warp a head; x, z [rows][heads][dim].
extern "C" __global__ void ETE_LAUNCH_BOUNDS gated_norm(float* __restrict__ x, const float* __restrict__ z,
                                                        const float* __restrict__ norm, float eps,
                                                        const int* __restrict__ counts, int heads, int dim) {
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const int row = static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.x) * (ETE_THREADS / kWarp) + warp_id();
  if (row >= live_rows(counts, kPromptRows).count || head >= heads) return;
  const int64_t start = (static_cast<int64_t>(row) * heads + head) * dim;
  float squares = 0.0f;
  for (int i = lane_id(); i < dim; i += kWarp) squares = fmaf(x[start + i], x[start + i], squares);
  const float rms = sqrtf(warp_sum(squares) / static_cast<float>(dim) + eps);
  for (int i = lane_id(); i < dim; i += kWarp) {
    const float gate = z[start + i];
    x[start + i] = x[start + i] / rms * norm[i] * (gate / (1.0f + expf(-gate)));
  }
}

// joined [rows][heads][2 dim]: of each head query, then gate. Block (numbers of a row, row); four numbers a thread.
extern "C" __global__ void ETE_LAUNCH_BOUNDS split_query_gate(const float* __restrict__ joined, float* __restrict__ q,
                                                              float* __restrict__ gate, const int* __restrict__ counts,
                                                              int heads, int dim) {
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const int row = static_cast<int>(blockIdx.y);
  const int at = 4 * (static_cast<int>(blockIdx.x) * ETE_THREADS + static_cast<int>(threadIdx.x));
  if (row >= live_rows(counts, kAllRows).count || at >= 2 * heads * dim) return;
  const int head = at / (2 * dim), place = at % (2 * dim);
  const int64_t to = (static_cast<int64_t>(row) * heads + head) * dim;
  const float4 four = load16_float(joined + static_cast<int64_t>(row) * 2 * heads * dim + at);
  if (place < dim)
    store16(q + to + place, four);
  else
    store16(gate + to + place - dim, four);
}

// x = x * sigmoid(gate), both [rows][cols]. Block (numbers of a row, row); four numbers a thread.
extern "C" __global__ void ETE_LAUNCH_BOUNDS apply_gate(float* __restrict__ x, const float* __restrict__ gate,
                                                        const int* __restrict__ counts, int cols) {
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const int row = static_cast<int>(blockIdx.y);
  const int at = 4 * (static_cast<int>(blockIdx.x) * ETE_THREADS + static_cast<int>(threadIdx.x));
  if (row >= live_rows(counts, kAllRows).count || at >= cols) return;
  const int64_t place = static_cast<int64_t>(row) * cols + at;
  const float4 four = load16_float(x + place), by = load16_float(gate + place);
  store16(x + place,
          make_float4(four.x * sigmoid(by.x), four.y * sigmoid(by.y), four.z * sigmoid(by.z), four.w * sigmoid(by.w)));
}

// The activations of prompt rows as gemm_mma.cu takes them: bf16 terms, split once for all the weights they meet.
//
// terms: [groups of 32 columns][ETE_TERMS][rows of the pass, `pitch`][32] bf16, zero past the last column. With
// `coded`, each 16 columns lie in the order in which a lane takes codes from a word (gemm_operands.cuh). sums:
// [groups][pitch] f32, of the fp32 activations; null: not wanted. Rows past the last are left as they are.
//
// Moves 4 bytes of every activation in, 2 * ETE_TERMS out. Macros: ETE_TERMS (3, 1). ETE_THREADS is 256.
#include "gemm_tiles.cuh"
#include "prelude.cuh"
#include "rows.cuh"

constexpr int kTerms = ETE_TERMS;
constexpr int kRowsOfBlock = 16;  // two lanes to a row, a warp to a group
constexpr int kGroupsOfBlock = ETE_THREADS / kWarp;

// grid: x groups by kGroupsOfBlock, y prompt rows by kRowsOfBlock.
extern "C" __global__ void ETE_LAUNCH_BOUNDS gemm_terms(const float* __restrict__ x, const int* __restrict__ counts,
                                                        uint8_t* __restrict__ terms, float* __restrict__ sums, int cols,
                                                        int pitch, int coded) {
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const LiveRows live = live_rows(counts, kPromptRows);
  const int group = static_cast<int>(blockIdx.x) * kGroupsOfBlock + warp_id();
  const int row = static_cast<int>(blockIdx.y) * kRowsOfBlock + lane_id() / 2, half = lane_id() % 2;
  if (static_cast<int>(blockIdx.y) * kRowsOfBlock >= live.count || group * kGroup >= cols) return;

  float values[16];
  load_x<16>(x + static_cast<int64_t>(row) * cols, group * kGroup + 16 * half, cols, row < live.count, values);
  if (sums != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum = sum + ((values[4 * i] + values[4 * i + 1]) + (values[4 * i + 2] + values[4 * i + 3]));
    sum = sum + warp_shuffle_xor(sum, 1);
    if (half == 0 && row < live.count) sums[static_cast<int64_t>(group) * pitch + row] = sum;
  }
  if (row >= live.count) return;

  uint32_t words[3][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int plain = 2 * i, in_codes = 4 * (i % 4) + i / 4;
    const float first = coded != 0 ? values[in_codes] : values[plain];
    const float second = coded != 0 ? values[in_codes + 2] : values[plain + 1];
    split_bf16_pair(first, second, words[0][i], words[1][i], words[2][i]);
  }
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    uint8_t* to = terms + ((static_cast<int64_t>(group) * kTerms + term) * pitch + row) * (2 * kGroup) + 32 * half;
    store16(to, make_uint4(words[term][0], words[term][1], words[term][2], words[term][3]));
    store16(to + 16, make_uint4(words[term][4], words[term][5], words[term][6], words[term][7]));
  }
}

// Attention of decode rows over keys and values in bf16, on tensor cores: block (unit of a wave, KV head, row) makes
// the state of the row's ETE_HEADS query heads over one unit of positions.
//
// scores[head][position] = q k^T, acc[head][dim] = p v, both in fp32 accuracy: q and p are split in three bf16 terms,
// and the 16 rows of an mma hold (head, high) and (head, middle), those of a second one (head, low). Keys and values go
// from global memory into operand registers: the order of columns (and of dims) within an mma is whatever makes a
// lane's 16 bytes one operand. Fresh accumulators for every 64 columns and every step of a warp, 32 positions. Beyond a
// head_dim of 128 two warps take the same positions, and half of the dims each; the states of the block's warps are
// merged as a tree.
//
// Bytes read: 2 * 2 * head_dim per position and KV head. ETE_HEADS <= 8, ETE_KV_BF16 = 1.
#include "attention_units.cuh"

constexpr int kWarps = ETE_THREADS / kWarp;
constexpr int kStep = 32;  // positions of a warp at a time
constexpr int kTiles = kStep / 8;
constexpr int kKeyChunks = (kHeadDim + 31) / 32;  // a lane's 16 bytes times four lanes
constexpr int kSplit = kHeadDim <= 128 ? 1 : 2;   // warps that take the same positions
constexpr int kSteppers = kWarps / kSplit;        // sets of such warps
constexpr int kValueChunks =
    (kHeadDim + 64 * kSplit - 1) / (64 * kSplit);  // a lane's 16 bytes times eight lanes, of a warp
constexpr int kSums = kValueChunks * 16;           // acc of a lane: 16 consecutive dims of each chunk
constexpr int kSlotFloats = (kSums + 2) * kWarp;   // a warp's state in shared memory

ETE_DEVICE uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

extern "C" __global__ void ETE_ATTENTION_BOUNDS attention_decode(
    const float* __restrict__ q, const int* __restrict__ positions, const int* __restrict__ row_sequence,
    const int* __restrict__ counts, const int64_t* __restrict__ tables, const uint8_t* __restrict__ run,
    float* __restrict__ unit_acc, float* __restrict__ unit_state, int table_tiles, int kv_heads, int first_tile,
    int tile_count, int run_sequence, int first_row, int first_unit, int window, float scale, float softcap) {
  ETE_SHARED(uint4, query, kKeyChunks * 3 * kWarp);  // [chunk][term][lane]
  ETE_SHARED(float, slots, kWarps / 2 * kSlotFloats);
  const int row = decode_row(counts, row_sequence, first_row, run_sequence);
  if (row < 0) return;
  const Units units = units_of(positions[row], window, first_tile, tile_count);
  const int unit = units.first + first_unit + static_cast<int>(blockIdx.x);
  const int begin = max(units.span.begin, unit * units.size);
  const int end = min(units.span.end, (unit + 1) * units.size);
  if (begin >= end) return;

  const int kv_head = static_cast<int>(blockIdx.y) / kHeadChunks;
  const int head = static_cast<int>(blockIdx.y) % kHeadChunks * kHeads;  // the first of the group
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  const int stepper = warp_id() / kSplit, first_chunk = warp_id() % kSplit * kValueChunks;
  const int64_t heads = static_cast<int64_t>(kv_heads) * kGroup;

  const float* q_head = q + (row * heads + kv_head * kGroup + head + g) * kHeadDim;
  for (int chunk = warp_id(); chunk < kKeyChunks; chunk += kWarps) {
    const int column = chunk * 32 + 8 * t;
    uint4 high = make_uint4(0, 0, 0, 0), middle = high, low = high;
    if (g < kHeads && head + g < kGroup && column < kHeadDim) {
      const float4 a = load16_float(q_head + column), b = load16_float(q_head + column + 4);
      split_bf16_pair(a.x, a.y, high.x, middle.x, low.x);
      split_bf16_pair(a.z, a.w, high.y, middle.y, low.y);
      split_bf16_pair(b.x, b.y, high.z, middle.z, low.z);
      split_bf16_pair(b.z, b.w, high.w, middle.w, low.w);
    }
    query[(chunk * 3 + 0) * kWarp + lane] = high;
    query[(chunk * 3 + 1) * kWarp + lane] = middle;
    query[(chunk * 3 + 2) * kWarp + lane] = low;
  }
  __syncthreads();

  const int tile = begin / kTilePositions;
  const Tiles tiles = {run != nullptr ? nullptr : tables + static_cast<int64_t>(row_sequence[row]) * table_tiles, run,
                       first_tile, kv_heads};
  const uint8_t* keys = tile_keys(tiles, tile, kv_head);
  const uint8_t* values = keys + values_offset(tiles);

  float m = -ETE_INFINITY, l = 0;  // of head g; l is summed over the lanes t at the end
  float acc[kValueChunks][8][2];   // [chunk][j][i]: dim 64 * (first_chunk + chunk) + 16 * t + 8 * i + j
#pragma unroll
  for (int c = 0; c < kValueChunks; ++c)
#pragma unroll
    for (int j = 0; j < 8; ++j) acc[c][j][0] = acc[c][j][1] = 0;

  for (int step = unit * units.size + stepper * kStep; step < end; step += kSteppers * kStep) {
    if (step + kStep <= begin) continue;
    const int in_tile = step - tile * kTilePositions;
    float score[kTiles][2];  // positions 8 * n + 2 * t + i
#pragma unroll
    for (int n = 0; n < kTiles; ++n) score[n][0] = score[n][1] = 0;
#pragma unroll(kHeadDim <= 128 ? 2 : 1)
    for (int part = 0; part < kKeyChunks; part += 2) {
      float sum[kTiles][2][4];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[n][i / 4][i % 4] = 0;
#pragma unroll
      for (int chunk = part; chunk < part + 2 && chunk < kKeyChunks; ++chunk) {
        uint4 key[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int position = step + 8 * n + g;
          const bool there = position >= begin && position < end && chunk * 32 + 8 * t < kHeadDim;
          key[n] =
              there ? load16(keys + (in_tile + 8 * n + g) * kRowBytes + chunk * 64 + 16 * t) : make_uint4(0, 0, 0, 0);
        }
        const uint4 high = query[(chunk * 3 + 0) * kWarp + lane];
        const uint4 middle = query[(chunk * 3 + 1) * kWarp + lane];
        const uint4 low = query[(chunk * 3 + 2) * kWarp + lane];
        const uint32_t first[4] = {high.x, middle.x, high.y, middle.y},
                       second[4] = {high.z, middle.z, high.w, middle.w};
        const uint32_t first_low[4] = {low.x, 0, low.y, 0}, second_low[4] = {low.z, 0, low.w, 0};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint32_t front[2] = {key[n].x, key[n].y};
          mma_bf16(sum[n][0], first, front);
          mma_bf16(sum[n][1], first_low, front);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint32_t back[2] = {key[n].z, key[n].w};
          mma_bf16(sum[n][0], second, back);
          mma_bf16(sum[n][1], second_low, back);
        }
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) score[n][i] += sum[n][0][i] + (sum[n][0][2 + i] + sum[n][1][i]);
    }

    float largest = m;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int position = step + 8 * n + 2 * t + i;
        const bool seen = position >= begin && position < end;
        score[n][i] = seen ? scaled_score(score[n][i], scale, softcap) : -ETE_INFINITY;
        largest = fmaxf(largest, score[n][i]);
      }
    largest = fmaxf(largest, warp_shuffle_xor(largest, 1));
    largest = fmaxf(largest, warp_shuffle_xor(largest, 2));
    const float reference = reference_of(largest);
    const float kept = expf(m - reference);
    m = largest;
    float total = 0;
    uint32_t high[kTiles], middle[kTiles], low[kTiles];  // of weights, positions 8 * n + 2 * t and the next
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float a = expf(score[n][0] - reference), b = expf(score[n][1] - reference);
      total += a + b;
      split_bf16_pair(a, b, high[n], middle[n], low[n]);
    }
    l = fmaf(l, kept, total);

#pragma unroll
    for (int c = 0; c < kValueChunks; ++c) {
      uint4 value[2 * kTiles];  // rows 8 * n + 2 * t and the next
#pragma unroll
      for (int r = 0; r < 2 * kTiles; ++r) {
        const int offset = 8 * (r / 2) + 2 * t + r % 2, position = step + offset;
        const bool there = position >= begin && position < end && (first_chunk + c) * 64 + 8 * g < kHeadDim;
        value[r] = there ? load16(values + (in_tile + offset) * kRowBytes + (first_chunk + c) * 128 + 16 * g)
                         : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t select = j % 2 == 0 ? 0x5410 : 0x7632;
        float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
        for (int k = 0; k < kTiles / 2; ++k) {
          const uint32_t b[2] = {byte_permute(word(value[4 * k], j / 2), word(value[4 * k + 1], j / 2), select),
                                 byte_permute(word(value[4 * k + 2], j / 2), word(value[4 * k + 3], j / 2), select)};
          const uint32_t upper[4] = {high[2 * k], middle[2 * k], high[2 * k + 1], middle[2 * k + 1]};
          const uint32_t rest[4] = {low[2 * k], 0, low[2 * k + 1], 0};
          mma_bf16(sum[0], upper, b);
          mma_bf16(sum[1], rest, b);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) acc[c][j][i] = fmaf(acc[c][j][i], kept, sum[0][i] + (sum[0][2 + i] + sum[1][i]));
      }
    }
  }
  l += warp_shuffle_xor(l, 1);
  l += warp_shuffle_xor(l, 2);

  for (int half = kSteppers / 2; half > 0; half /= 2) {
    float* slot = slots + (stepper % half * kSplit + warp_id() % kSplit) * kSlotFloats + lane;
    if (stepper >= half && stepper < 2 * half) {
      slot[0] = m;
      slot[kWarp] = l;
#pragma unroll
      for (int i = 0; i < kSums; ++i) slot[(2 + i) * kWarp] = acc[i / 16][i / 2 % 8][i % 2];
    }
    __syncthreads();
    if (stepper < half) {
      const float larger = fmaxf(m, slot[0]), reference = reference_of(larger);
      const float mine = expf(m - reference), other = expf(slot[0] - reference);
      m = larger;
      l = fmaf(l, mine, slot[kWarp] * other);
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float& sum = acc[i / 16][i / 2 % 8][i % 2];
        sum = fmaf(sum, mine, slot[(2 + i) * kWarp] * other);
      }
    }
    __syncthreads();
  }

  if (stepper != 0 || g >= kHeads || head + g >= kGroup) return;
  const int64_t place = (blockIdx.z * heads + kv_head * kGroup + head + g) * gridDim.x + blockIdx.x;
  if (t == 0 && first_chunk == 0) {
    unit_state[2 * place] = m;
    unit_state[2 * place + 1] = l;
  }
#pragma unroll
  for (int c = 0; c < kValueChunks; ++c)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int dim = 64 * (first_chunk + c) + 16 * t + 8 * i;
      if (dim >= kHeadDim) continue;
      float* to = unit_acc + place * kHeadDim + dim;
      store16(to, make_float4(acc[c][0][i], acc[c][1][i], acc[c][2][i], acc[c][3][i]));
      store16(to + 4, make_float4(acc[c][4][i], acc[c][5][i], acc[c][6][i], acc[c][7][i]));
    }
}

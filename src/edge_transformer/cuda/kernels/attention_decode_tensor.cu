// Attention of decode rows over keys and values in bf16, on tensor cores: block (KV head, row, units of a wave) makes
// the state of the row's ETE_HEADS query heads over one unit of positions.
//
// scores[head][position] = q k^T, acc[head][dim] = p v, both in fp32 accuracy: q and p are split in three bf16 terms.
// Of up to four heads the terms fill the 16 rows of one mma, (head, high), (head, middle), (head, low) and four of
// zeros; of more heads they fill two, (head, high) and (head, middle), then (head, low). Keys and values go from global
// memory into operand registers: the order of columns (and of dims) within an mma is whatever makes a lane's 16 bytes
// one operand. Fresh accumulators for every 64 columns and every step of a warp, 16 positions: the smallest unit
// occupies all warps. Beyond a head_dim of 128 two warps take the same positions, and half of the dims each. The next
// step's keys and values are on their way while one is computed; of the first step both are asked for at once. The
// states of the block's warps meet in shared memory and are added up in order.
//
// Bytes read: 2 * 2 * head_dim per position and KV head. ETE_HEADS <= 8, ETE_KV_BF16 = 1.
#include "attention_units.cuh"

constexpr int kWarps = ETE_THREADS / kWarp;
constexpr int kStep = 16;  // positions of a warp at a time
constexpr int kTiles = kStep / 8;
constexpr int kKeyChunks = (kHeadDim + 31) / 32;  // a lane's 16 bytes times four lanes
constexpr int kSplit = kHeadDim <= 128 ? 1 : 2;   // warps that take the same positions
constexpr int kSteppers = kWarps / kSplit;        // sets of such warps
constexpr int kValueChunks =
    (kHeadDim + 64 * kSplit - 1) / (64 * kSplit);  // a lane's 16 bytes times eight lanes, of a warp
constexpr int kSums = kValueChunks * 16;           // acc of a lane: 16 consecutive dims of each chunk
constexpr int kFours = kSums / 4;                  // of acc, as they lie in shared memory
constexpr bool kOneMma = kHeads <= 4;              // holds all terms
constexpr int kTerms = kOneMma ? 2 : 3;  // of q and p that a lane holds: of rows g and g + 8, and g of a second
// Keys and values are asked for a step ahead, or else at least together, where there are registers for them.
constexpr bool kLoadsAhead = kHeadDim <= (kOneMma ? 128 : 64);
constexpr bool kLoadsTogether = kOneMma || kHeadDim <= 128;
static_assert(kTiles == 2, "the positions of a step are the depth of an mma");

ETE_DEVICE uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Three terms of a lane's two numbers as the rows of the mma that the lane holds.
ETE_DEVICE void place_terms(float first, float second, int g, uint32_t (&rows)[kTerms]) {
  uint32_t high, middle, low;
  split_bf16_pair(first, second, high, middle, low);
  if constexpr (kOneMma) {
    rows[0] = g < 4 ? high : middle;
    rows[1] = g < 4 ? low : 0;
  } else {
    rows[0] = high, rows[1] = middle, rows[2] = low;
  }
}

// d of row g, and of all rows besides: what the terms of a head give is upper + lower, with one mma over lanes g, g
// + 4.
ETE_DEVICE void multiply(const uint32_t (&front)[kTerms], const uint32_t (&back)[kTerms], uint32_t b_front,
                         uint32_t b_back, float (&sum)[2][4]) {
  const uint32_t a[4] = {front[0], front[1], back[0], back[1]}, b[2] = {b_front, b_back};
  mma_bf16(sum[0], a, b);
  if constexpr (!kOneMma) {
    const uint32_t rest[4] = {front[2], 0, back[2], 0};
    mma_bf16(sum[1], rest, b);
  }
}

ETE_DEVICE void load_keys(uint4 (&key)[kKeyChunks][kTiles], const uint8_t* keys, int tile_begin, int step, int begin,
                          int end) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int chunk = 0; chunk < kKeyChunks; ++chunk)
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int position = step + 8 * n + g;
      const bool there = position >= begin && position < end && chunk * 32 + 8 * t < kHeadDim;
      key[chunk][n] =
          there ? load16(keys + (position - tile_begin) * kRowBytes + chunk * 64 + 16 * t) : make_uint4(0, 0, 0, 0);
    }
}

// Of dims 64 * (first_chunk + chunk) + 8 * g..: rows 8 * n + 2 * t and the next.
ETE_DEVICE void load_values(uint4 (&value)[kValueChunks][2 * kTiles], const uint8_t* values, int first_chunk,
                            int tile_begin, int step, int begin, int end) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int c = 0; c < kValueChunks; ++c)
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      const int position = step + 8 * (r / 2) + 2 * t + r % 2;
      const bool there = position >= begin && position < end && (first_chunk + c) * 64 + 8 * g < kHeadDim;
      value[c][r] = there ? load16(values + (position - tile_begin) * kRowBytes + (first_chunk + c) * 128 + 16 * g)
                          : make_uint4(0, 0, 0, 0);
    }
}

extern "C" __global__ void ETE_ATTENTION_BOUNDS
attention_decode(const float* __restrict__ q, const int* __restrict__ positions, const int* __restrict__ row_sequence,
                 const int* __restrict__ counts, const int64_t* __restrict__ tables, const uint8_t* __restrict__ run,
                 float* __restrict__ unit_acc, float* __restrict__ unit_state, int table_tiles, int kv_heads,
                 int first_tile, int tile_count, int run_sequence, int first_row, int first_unit, int wave_units,
                 int window, float scale, float softcap) {
  ETE_SHARED(uint4, query, kKeyChunks * kTerms * kWarp);  // [chunk][term][lane]
  ETE_SHARED(float4, slots, kSteppers * kSplit * kFours * kWarp);
  ETE_SHARED(float2, slot_states, kSteppers * 8);  // (m, l) of [stepper][g]
  let_next_kernel_start();
  const DecodeRow work = row_and_units(counts, row_sequence, positions, first_row, blockIdx.y, run_sequence, window,
                                       first_tile, tile_count);
  int in_wave = static_cast<int>(blockIdx.z);
  if (is_idle(work, first_unit + in_wave)) {
    leave_idle();
    return;
  }
#pragma unroll 1
  for (; in_wave < wave_units; in_wave += static_cast<int>(gridDim.z)) {
    const auto [start, begin, end] = unit_of(work.units, first_unit + in_wave);
    if (begin >= end) break;
    const auto [kv_head, head] = heads_of_block();
    const int lane = lane_id(), warp = warp_id(), g = lane / 4, t = lane % 4;
    const int head_of_lane = kOneMma ? g % 4 : g;
    const bool has_head = head_of_lane < kHeads && head + head_of_lane < kGroup;
    const int stepper = warp / kSplit, first_chunk = warp % kSplit * kValueChunks;
    const int64_t heads = static_cast<int64_t>(kv_heads) * kGroup;
    const int tile = begin / kTilePositions, tile_begin = tile * kTilePositions;
    const uint8_t* keys = unit_keys(tables, run, row_sequence, work.row, table_tiles, first_tile, kv_heads, tile,
                                    kv_head, begin, min(end - begin, kSmallestUnit));
    const uint8_t* values = keys + values_offset({nullptr, run, first_tile, kv_heads});
    int step = start + stepper * kStep;
    while (step + kStep <= begin) step += kSteppers * kStep;
    wait_for_kernels_ahead();

    const float* q_head = q + (work.row * heads + kv_head * kGroup + head + head_of_lane) * kHeadDim;
    uint4 q_bits[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (has_head && warp < kKeyChunks && warp * 32 + 8 * t < kHeadDim) {
      q_bits[0] = load16_ordered(q_head + warp * 32 + 8 * t);
      q_bits[1] = load16_ordered(q_head + warp * 32 + 8 * t + 4);
    }
    uint4 key[kKeyChunks][kTiles], value[kValueChunks][2 * kTiles];
    if constexpr (kLoadsAhead) {
      load_keys(key, keys, tile_begin, step, begin, end);
      load_values(value, values, first_chunk, tile_begin, step, begin, end);
    }
    static_assert(kKeyChunks <= kWarps, "a warp splits one chunk of q");
    if (warp < kKeyChunks) {
      uint32_t rows[4][kTerms];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 bits = q_bits[i / 2];
        place_terms(__uint_as_float(word(bits, i % 2 * 2)), __uint_as_float(word(bits, i % 2 * 2 + 1)), g, rows[i]);
      }
#pragma unroll
      for (int term = 0; term < kTerms; ++term)
        query[(warp * kTerms + term) * kWarp + lane] =
            make_uint4(rows[0][term], rows[1][term], rows[2][term], rows[3][term]);
    }
    __syncthreads();

    float m = -ETE_INFINITY, l = 0;  // of the lane's head; l is summed over the lanes t at the end
    float acc[kValueChunks][8][2];   // [chunk][j][i]: dim 64 * (first_chunk + chunk) + 16 * t + 8 * i + j
#pragma unroll
    for (int c = 0; c < kValueChunks; ++c)
#pragma unroll
      for (int j = 0; j < 8; ++j) acc[c][j][0] = acc[c][j][1] = 0;

#pragma unroll 1
    for (; step < end; step += kSteppers * kStep) {
      if constexpr (!kLoadsAhead) {
        load_keys(key, keys, tile_begin, step, begin, end);
        if constexpr (kLoadsTogether) load_values(value, values, first_chunk, tile_begin, step, begin, end);
      }
      float upper[kTiles][2], lower[kTiles][2];  // positions 8 * n + 2 * t + i
#pragma unroll
      for (int n = 0; n < kTiles; ++n) upper[n][0] = upper[n][1] = lower[n][0] = lower[n][1] = 0;
#pragma unroll
      for (int part = 0; part < kKeyChunks; part += 2) {
        float sum[kTiles][2][4];
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[n][i / 4][i % 4] = 0;
#pragma unroll
        for (int chunk = part; chunk < part + 2 && chunk < kKeyChunks; ++chunk) {
          uint32_t rows[4][kTerms];
#pragma unroll
          for (int term = 0; term < kTerms; ++term) {
            const uint4 four = query[(chunk * kTerms + term) * kWarp + lane];
#pragma unroll
            for (int i = 0; i < 4; ++i) rows[i][term] = word(four, i);
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) multiply(rows[0], rows[1], key[chunk][n].x, key[chunk][n].y, sum[n]);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) multiply(rows[2], rows[3], key[chunk][n].z, key[chunk][n].w, sum[n]);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            upper[n][i] += sum[n][0][i];
            lower[n][i] += sum[n][0][2 + i] + sum[n][1][i];
          }
      }
      const int next = step + kSteppers * kStep;
      if constexpr (kLoadsAhead) {
        load_keys(key, keys, tile_begin, next, begin, end);
      } else if constexpr (!kLoadsTogether) {
        load_values(value, values, first_chunk, tile_begin, step, begin, end);
      }

      float largest = m;
      float score[kTiles][2];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float product = upper[n][i] + lower[n][i];
          if constexpr (kOneMma) {
            // Lanes g hold high and low, lanes g + 4 middle: the same sum in both.
            const float other = warp_shuffle_xor(product, 16);
            product = g < 4 ? product + other : other + product;
          }
          const int position = step + 8 * n + 2 * t + i;
          const bool seen = position >= begin && position < end;
          score[n][i] = seen ? scaled_score(product, scale, softcap) : -ETE_INFINITY;
          largest = fmaxf(largest, score[n][i]);
        }
      largest = fmaxf(largest, warp_shuffle_xor(largest, 1));
      largest = fmaxf(largest, warp_shuffle_xor(largest, 2));
      const float reference = reference_of(largest);
      const float kept = expf(m - reference);
      m = largest;
      float total = 0;
      uint32_t weights[kTiles][kTerms];  // of positions 8 * n + 2 * t and the next
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float a = expf(score[n][0] - reference), b = expf(score[n][1] - reference);
        total += a + b;
        place_terms(a, b, g, weights[n]);
      }
      l = fmaf(l, kept, total);

#pragma unroll
      for (int c = 0; c < kValueChunks; ++c)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t select = j % 2 == 0 ? 0x5410 : 0x7632;
          float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
          multiply(weights[0], weights[1], byte_permute(word(value[c][0], j / 2), word(value[c][1], j / 2), select),
                   byte_permute(word(value[c][2], j / 2), word(value[c][3], j / 2), select), sum);
#pragma unroll
          for (int i = 0; i < 2; ++i) acc[c][j][i] = fmaf(acc[c][j][i], kept, sum[0][i] + (sum[0][2 + i] + sum[1][i]));
        }
      if constexpr (kLoadsAhead) {
        load_values(value, values, first_chunk, tile_begin, next, begin, end);
      }
    }
    l += warp_shuffle_xor(l, 1);
    l += warp_shuffle_xor(l, 2);

    if (t == 0 && first_chunk == 0) slot_states[stepper * 8 + g] = make_float2(m, l);
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const int c = four / 4, i = four / 2 % 2, j = four % 2 * 4;
      slots[(warp * kFours + four) * kWarp + lane] =
          make_float4(acc[c][j][i], acc[c][j + 1][i], acc[c][j + 2][i], acc[c][j + 3][i]);
    }
    __syncthreads();

    float largest = -ETE_INFINITY;
#pragma unroll
    for (int s = 0; s < kSteppers; ++s) largest = fmaxf(largest, slot_states[s * 8 + g].x);
    const float reference = reference_of(largest);
    float factor[kSteppers], sum_l = 0;
#pragma unroll
    for (int s = 0; s < kSteppers; ++s) {
      factor[s] = expf(slot_states[s * 8 + g].x - reference);
      sum_l = fmaf(slot_states[s * 8 + g].y, factor[s], sum_l);
    }
    const int64_t place = (blockIdx.y * heads + kv_head * kGroup + head + head_of_lane) * wave_units + in_wave;
    const bool writes = has_head && (!kOneMma || g < 4);
    if (writes && warp == 0 && t == 0) {
      unit_state[2 * place] = largest;
      unit_state[2 * place + 1] = sum_l;
    }
#pragma unroll 1
    for (int item = warp; item < kSplit * kFours; item += kWarps) {
      const int split = item / kFours, four = item % kFours;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int s = 0; s < kSteppers; ++s) {
        const float4 x = slots[((s * kSplit + split) * kFours + four) * kWarp + lane];
        sum = make_float4(fmaf(x.x, factor[s], sum.x), fmaf(x.y, factor[s], sum.y), fmaf(x.z, factor[s], sum.z),
                          fmaf(x.w, factor[s], sum.w));
      }
      if constexpr (kOneMma) {
        sum.x += warp_shuffle_xor(sum.x, 16);
        sum.y += warp_shuffle_xor(sum.y, 16);
        sum.z += warp_shuffle_xor(sum.z, 16);
        sum.w += warp_shuffle_xor(sum.w, 16);
      }
      const int dim = 64 * (split * kValueChunks + four / 4) + 16 * t + 8 * (four / 2 % 2) + 4 * (four % 2);
      if (writes && dim < kHeadDim) store16(unit_acc + place * kHeadDim + dim, sum);
    }
  }
}

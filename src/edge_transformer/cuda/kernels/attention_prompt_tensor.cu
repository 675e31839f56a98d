// Attention of prompt rows over keys and values in bf16, on tensor cores: block (part of an entry of rows, KV head and
// some of its query heads). A warp takes 16 rows of one query head, or with a head_dim beyond 128 a half of its
// columns, the scores of both halves being added through shared memory; the warps of a block share keys and values.
//
// Per block of kKeys positions: s = q k^T, s capped and masked, (m, l) updated, acc = acc * factor + p v. q and p are
// split in ETE_TERMS bf16 terms (3: fp32 accuracy; 1: fast); fresh accumulators for every 64 columns of q and every
// kKeys positions, added to fp32 sums. Keys and values come by asynchronous copies: values during the scores, the next
// keys during the sums of values. Positions that no row of the block sees are never read.
//
// Shared memory: the operand registers of q, ETE_TERMS * 32 bytes a row and column pair; one block of keys and of
// values. Products: 4 * ETE_TERMS * head_dim per row, head and position. ETE_KV_BF16 = 1.
#include "attention_rows.cuh"

constexpr int kTerms = ETE_TERMS;
constexpr int kThreads = ETE_THREADS;
constexpr int kSplit = kHeadDim <= 128 ? 1 : 2;  // warps that share the rows of a head, each a part of the columns
constexpr int kSteps = (kHeadDim + 16 * kSplit - 1) / (16 * kSplit);  // mma along a part
constexpr int kPart = 16 * kSteps;                                    // columns of a part; zero beyond head_dim
constexpr int kColumns = kSplit * kPart;
constexpr int kKeys = kHeadDim <= 128 ? 64 : 32;  // positions at a time
constexpr int kPitch = 2 * kColumns + 16;         // bytes of a row in shared memory: an odd number of 16
constexpr int kKeyTiles = kKeys / 8;
constexpr int kDimTiles = kPart / 8;
constexpr int kTogether = 8;                          // accumulators in flight
constexpr int kQueryWords = kSteps * kTerms * kWarp;  // uint4 of a warp
constexpr int kExchanged = kKeyTiles * 4 * kWarp;     // floats of a warp

// Terms of two values, the largest first.
ETE_DEVICE void split_pair(float a, float b, uint32_t (&terms)[kTerms]) {
#if ETE_TERMS == 3
  split_bf16_pair(a, b, terms[0], terms[1], terms[2]);
#else
  terms[0] = pack_bf16(a, b);
#endif
}

// Rows [start, start + kKeys) of a KV head's keys or values; zeros for those outside the span, and beyond head_dim.
ETE_DEVICE void copy_rows(uint8_t* to, const uint8_t* from, int start, const Span& span) {
  constexpr int pieces = kColumns / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * pieces; i += kThreads) {
    const int row = i / pieces, piece = i % pieces, position = start + row;
    const bool there = position >= span.begin && position < span.end && piece * 8 < kHeadDim;
    const uint8_t* source = there ? from + (position % kTilePositions) * kRowBytes + piece * 16 : from;
    cp_async16(to + row * kPitch + piece * 16, source, there ? 16 : 0);
  }
  cp_async_commit();
}

extern "C" __global__ void ETE_ATTENTION_BOUNDS attention_prompt(
    const float* __restrict__ q, const int* __restrict__ entries, const int64_t* __restrict__ tables,
    const uint8_t* __restrict__ run, float* __restrict__ state, float* __restrict__ out, int table_tiles, int kv_heads,
    int run_tile, int first_tile, int tile_count, int run_sequence, int window, float scale, float softcap, int flags) {
  ETE_DYNAMIC_SHARED(uint8_t, shared);
  uint8_t *keys = shared, *values = shared + kKeys * kPitch;
  uint4* queries = reinterpret_cast<uint4*>(shared + 2 * kKeys * kPitch);
  uint4* query = queries + warp_id() * kQueryWords;  // [step][term][lane]

  const RowBlock rows = row_block(entries, window, first_tile, tile_count, run_sequence);
  const Span span = rows.span;
  if (rows.count == 0 || (span.begin >= span.end && flags == 0)) return;
  const int kv_head = static_cast<int>(blockIdx.y) / kHeadChunks;
  const int head_of_group = static_cast<int>(blockIdx.y) % kHeadChunks * kHeads + warp_id() / kSplit % kHeads;
  const int first_row = warp_id() / (kSplit * kHeads) * 16;  // of this warp, in the block
  const int first_column = warp_id() % kSplit * kPart;
  const bool active = head_of_group < kGroup && first_row < rows.count;
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  const int heads = kv_heads * kGroup, head = kv_head * kGroup + head_of_group;
  const bool there[2] = {active && first_row + g < rows.count, active && first_row + g + 8 < rows.count};
  int64_t place[2];  // of rows g and g + 8 among rows and heads
  int position[2], first_seen[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    place[i] = static_cast<int64_t>(rows.row + first_row + g + 8 * i) * heads + head;
    position[i] = rows.position + first_row + g + 8 * i;
    first_seen[i] = first_visible(position[i], window);
  }

#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    uint32_t operands[4][kTerms];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = first_column + 16 * step + 8 * (i / 2) + 2 * t;
      float2 x = make_float2(0, 0);
      if (there[i % 2] && column < kHeadDim) x = load8_float(q + place[i % 2] * kHeadDim + column);
      split_pair(x.x, x.y, operands[i]);
    }
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      query[(step * kTerms + term) * kWarp + lane] =
          make_uint4(operands[0][term], operands[1][term], operands[2][term], operands[3][term]);
  }

  float m[2], l[2], acc[kDimTiles][4];
  const bool begin = (flags & kBegin) != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool kept = there[i] && !begin;
    m[i] = kept ? state[place[i] * kStateCopies * 2] : -ETE_INFINITY;
    l[i] = kept ? state[place[i] * kStateCopies * 2 + 1] : 0.0f;
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
      const int dim = first_column + 8 * j + 2 * t;
      float2 x = make_float2(0, 0);
      if (kept && dim < kHeadDim) x = load8_float(out + place[i] * kHeadDim + dim);
      acc[j][2 * i] = x.x;
      acc[j][2 * i + 1] = x.y;
    }
  }

  const Tiles tiles = {run != nullptr ? nullptr : tables + static_cast<int64_t>(rows.sequence) * table_tiles, run,
                       run_tile, kv_heads};
  int start = span.begin / kKeys * kKeys;
  if (start < span.end) copy_rows(keys, tile_keys(tiles, start / kTilePositions, kv_head), start, span);
  for (; start < span.end; start += kKeys) {
    cp_async_wait<0>();
    __syncthreads();  // the keys are there, and the last values have been used
    const uint8_t* tile_values = tile_keys(tiles, start / kTilePositions, kv_head) + values_offset(tiles);
    copy_rows(values, tile_values, start, span);

    uint32_t weights[kKeyTiles][2][kTerms];  // bf16 pairs: rows g and g + 8, positions 8 * tile + 2 * t and the next
    float kept[2] = {1, 1};
    float score[kKeyTiles][4];
    if (active) {
#pragma unroll
      for (int part = 0; part < kSteps; part += 4) {
        float sum[kKeyTiles][4];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0;
#pragma unroll
        for (int step = part; step < part + 4 && step < kSteps; ++step) {
          uint32_t key[kKeyTiles][2];
#pragma unroll
          for (int n = 0; n < kKeyTiles; n += 2) {
            uint32_t pair[4];
            ldmatrix4(pair, keys + (8 * n + lane / 16 * 8 + lane % 8) * kPitch + 2 * first_column + 32 * step +
                                lane / 8 % 2 * 16);
            key[n][0] = pair[0], key[n][1] = pair[1], key[n + 1][0] = pair[2], key[n + 1][1] = pair[3];
          }
#pragma unroll
          for (int term = kTerms - 1; term >= 0; --term) {
            const uint4 words = query[(step * kTerms + term) * kWarp + lane];
            const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) mma_bf16(sum[n], a, key[n]);
          }
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) score[n][i] = part == 0 ? sum[n][i] : score[n][i] + sum[n][i];
      }
    }
#if ETE_HEAD_DIM > 128
    float* exchange = reinterpret_cast<float*>(queries + kThreads / kWarp * kQueryWords);
    float* own = exchange + warp_id() * kExchanged + lane;
    const float* first = exchange + warp_id() / 2 * 2 * kExchanged + lane;
    if (active)
#pragma unroll
      for (int i = 0; i < 4 * kKeyTiles; ++i) own[i * kWarp] = score[i / 4][i % 4];
    __syncthreads();
    if (active)
#pragma unroll
      for (int i = 0; i < 4 * kKeyTiles; ++i) score[i / 4][i % 4] = first[i * kWarp] + first[kExchanged + i * kWarp];
#endif

    if (active) {
      float largest[2] = {m[0], m[1]};
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key_position = start + 8 * n + 2 * t + i % 2;
          const bool seen = key_position <= position[i / 2] && key_position >= first_seen[i / 2];
          score[n][i] = seen ? scaled_score(score[n][i], scale, softcap) : -ETE_INFINITY;
          largest[i / 2] = fmaxf(largest[i / 2], score[n][i]);
        }
      float reference[2], total[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        largest[i] = fmaxf(largest[i], warp_shuffle_xor(largest[i], 1));
        largest[i] = fmaxf(largest[i], warp_shuffle_xor(largest[i], 2));
        reference[i] = reference_of(largest[i]);
        kept[i] = expf(m[i] - reference[i]);
        m[i] = largest[i];
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float a = expf(score[n][2 * i] - reference[i]), b = expf(score[n][2 * i + 1] - reference[i]);
          total[i] += a + b;
          split_pair(a, b, weights[n][i]);
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        total[i] += warp_shuffle_xor(total[i], 1);
        total[i] += warp_shuffle_xor(total[i], 2);
        l[i] = fmaf(l[i], kept[i], total[i]);
      }
    }

    cp_async_wait<0>();
    __syncthreads();  // the values are there, and the keys have been used
    const int next = start + kKeys;
    if (next < span.end) copy_rows(keys, tile_keys(tiles, next / kTilePositions, kv_head), next, span);

    if (active) {
#pragma unroll
      for (int first = 0; first < kDimTiles; first += kTogether) {
        float sum[kTogether][4];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0;
#pragma unroll
        for (int step = 0; step < kKeyTiles / 2; ++step) {
          uint32_t value[kTogether][2];
#pragma unroll
          for (int j = 0; j < kTogether && first + j < kDimTiles; j += 2) {
            uint32_t pair[4];
            ldmatrix4_transposed(pair, values + (16 * step + lane / 8 % 2 * 8 + lane % 8) * kPitch + 2 * first_column +
                                           16 * (first + j + lane / 16));
            value[j][0] = pair[0], value[j][1] = pair[1], value[j + 1][0] = pair[2], value[j + 1][1] = pair[3];
          }
#pragma unroll
          for (int term = kTerms - 1; term >= 0; --term) {
            const uint32_t a[4] = {weights[2 * step][0][term], weights[2 * step][1][term],
                                   weights[2 * step + 1][0][term], weights[2 * step + 1][1][term]};
#pragma unroll
            for (int j = 0; j < kTogether && first + j < kDimTiles; ++j) mma_bf16(sum[j], a, value[j]);
          }
        }
#pragma unroll
        for (int j = 0; j < kTogether && first + j < kDimTiles; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[first + j][i] = fmaf(acc[first + j][i], kept[i / 2], sum[j][i]);
      }
    }
  }

  const bool end = (flags & kEnd) != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!there[i]) continue;
    const float factor = stored_factor(l[i], end);
#pragma unroll
    for (int j = 0; j < kDimTiles; ++j) {
      const int dim = first_column + 8 * j + 2 * t;
      if (dim < kHeadDim)
        store8(out + place[i] * kHeadDim + dim,
               make_float2(stored(acc[j][2 * i], factor), stored(acc[j][2 * i + 1], factor)));
    }
    if (t == 0 && first_column == 0 && !end) {
      state[place[i] * kStateCopies * 2] = m[i];
      state[place[i] * kStateCopies * 2 + 1] = l[i];
    }
  }
}

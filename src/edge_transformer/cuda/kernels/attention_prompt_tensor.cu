// Attention of prompt rows over keys and values in bf16, on tensor cores: block (part of an entry of rows, KV head and
// some of its query heads). A warp takes kRowTiles times 16 rows of one query head; the warps of a block share keys and
// values.
//
// Per block of kKeys positions: s = q k^T, s capped and masked, (m, l) updated, acc = acc * factor + p v. With
// ETE_TERMS 3, q and p are split in three bf16 terms, and fresh accumulators for every 64 columns of q and every kKeys
// positions are added to fp32 sums: fp32 accuracy. With ETE_TERMS 1 they are rounded to bf16, the tensor cores keep the
// sums, and scores and m are in units of log2 e. Keys and values come by asynchronous copies: values during the scores,
// the next keys during the sums of values. Positions that no row of the block sees are never read.
//
// Shared memory: one block of keys and of values; q as operand registers, ETE_TERMS * 2 bytes an element, or as f32
// where three terms of it would leave no room. Products: 4 * ETE_TERMS * head_dim per row, head and position.
// ETE_KV_BF16 = 1.
#include "attention_rows.cuh"

constexpr int kTerms = ETE_TERMS;
constexpr bool kFast = kTerms == 1;
constexpr int kThreads = ETE_THREADS;
constexpr int kRowTiles = kFast && kHeadDim <= 128 ? 2 : 1;  // of 16 rows, of a warp: a key in registers serves each
constexpr int kSteps = (kHeadDim + 15) / 16;                 // mma along the columns
constexpr int kColumns = 16 * kSteps;                        // zero beyond head_dim
constexpr int kKeys = kFast || kHeadDim <= 128 ? 64 : 32;    // positions at a time
constexpr int kPitch = 2 * kColumns + 16;                    // bytes of a row in shared memory: an odd number of 16
constexpr int kKeyTiles = kKeys / 8;
constexpr int kDimTiles = kColumns / 8;
constexpr int kFreshSteps = kFast ? kSteps : 4;                  // mma steps of a score in one accumulator
constexpr bool kWholeQuery = !kFast && kHeadDim > 128;           // q lies in shared memory as f32
constexpr int kQueryWords = (kWholeQuery ? 2 : kTerms) * kWarp;  // uint4 of 16 rows and 16 columns
constexpr int kTogether = kHeadDim <= 192 ? 8 : 4;               // accumulators of values in flight

// Terms of two values, the largest first.
ETE_DEVICE void split_pair(float a, float b, uint32_t (&terms)[kTerms]) {
#if ETE_TERMS == 3
  split_bf16_pair(a, b, terms[0], terms[1], terms[2]);
#else
  terms[0] = pack_bf16(a, b);
#endif
}

// Operands of 16 rows and 16 columns of q: pairs (row g, columns 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t
// + 8..).
ETE_DEVICE void store_query(uint4* to, const float2 (&pairs)[4]) {
#if ETE_TERMS == 3 && ETE_HEAD_DIM > 128
  store16(to, make_float4(pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y));
  store16(to + kWarp, make_float4(pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y));
#else
  uint32_t words[4][kTerms];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_pair(pairs[i].x, pairs[i].y, words[i]);
#pragma unroll
  for (int term = 0; term < kTerms; ++term)
    to[term * kWarp] = make_uint4(words[0][term], words[1][term], words[2][term], words[3][term]);
#endif
}
ETE_DEVICE void load_query(const uint4* from, uint32_t (&operands)[kTerms][4]) {
#if ETE_TERMS == 3 && ETE_HEAD_DIM > 128
  const float4 a = load16_float(from), b = load16_float(from + kWarp);
  const float2 pairs[4] = {make_float2(a.x, a.y), make_float2(a.z, a.w), make_float2(b.x, b.y), make_float2(b.z, b.w)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t words[kTerms];
    split_pair(pairs[i].x, pairs[i].y, words);
#pragma unroll
    for (int term = 0; term < kTerms; ++term) operands[term][i] = words[term];
  }
#else
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    const uint4 words = load16(from + term * kWarp);
    operands[term][0] = words.x, operands[term][1] = words.y, operands[term][2] = words.z, operands[term][3] = words.w;
  }
#endif
}

// Lanes that copy a row, 16 bytes each: a power of two, so that a thread copies the same columns of every row it takes.
constexpr int kRowLanes = kColumns <= 16 ? 2 : kColumns <= 32 ? 4 : kColumns <= 64 ? 8 : kColumns <= 128 ? 16 : 32;
constexpr int kRowsAtOnce = kThreads / kRowLanes;
// Rows [start, start + kKeys) of a KV head's keys or values; zeros for those outside the span, and beyond head_dim.
// `from` is the row of position `start`.
ETE_DEVICE void copy_rows(uint8_t* to, const uint8_t* from, int start, const Span& span) {
  const int row = static_cast<int>(threadIdx.x) / kRowLanes, piece = static_cast<int>(threadIdx.x) % kRowLanes;
  to += row * kPitch + piece * 16;
  from += row * kRowBytes + piece * 16;
  if (kColumns == 8 * kRowLanes || piece * 8 < kColumns) {
    const bool in_head = kColumns == kHeadDim || piece * 8 < kHeadDim;
    if (start >= span.begin && start + kKeys <= span.end && in_head) {
#pragma unroll
      for (int i = 0; i < kKeys; i += kRowsAtOnce)
        if (kKeys % kRowsAtOnce == 0 || row + i < kKeys) cp_async16(to + i * kPitch, from + i * kRowBytes);
    } else {
#pragma unroll 1
      for (int i = 0; row + i < kKeys; i += kRowsAtOnce) {
        const bool there = in_head && start + row + i >= span.begin && start + row + i < span.end;
        cp_async16(to + i * kPitch, there ? from + i * kRowBytes : from, there ? 16 : 0);
      }
    }
  }
  cp_async_commit();
}

// Rows of a warp: `count` from row `first` of the block on, of query head `head` of all. count 0: none.
struct WarpRows {
  int first;
  int count;
  int head;
};
ETE_DEVICE WarpRows warp_rows(const Part& block, const RowBlock& rows) {
  const int first = warp_id() / kHeads * (16 * kRowTiles);
  const int head_of_group = block.heads % kHeadChunks * kHeads + warp_id() % kHeads;
  const int count = head_of_group < kGroup ? max(0, min(16 * kRowTiles, rows.count - first)) : 0;
  return {first, count, block.heads / kHeadChunks * kGroup + head_of_group};
}

// Rows g + 16 * tile + 8 * i of a warp: whether they are, and where among rows and heads.
struct LanePlaces {
  int left;
  int first;
  int heads;
};
ETE_DEVICE bool row_there(const LanePlaces& at, int tile, int i) { return 16 * tile + 8 * i < at.left; }
ETE_DEVICE int64_t row_place(const LanePlaces& at, int tile, int i) {
  return at.first + (16 * tile + 8 * i) * at.heads;
}
ETE_DEVICE LanePlaces lane_places(const WarpRows& warp, const RowBlock& rows, int heads) {
  const int g = lane_id() / 4;
  return {warp.count - g, (rows.row + warp.first + g) * heads + warp.head, heads};
}

// e^x of a difference of scores, in the scores' units.
ETE_DEVICE float weight_of(float difference) {
  if constexpr (kFast)
    return exp2_approximate(difference);
  else
    return expf(difference);
}

extern "C" __global__ void ETE_ATTENTION_BOUNDS attention_prompt(
    const float* __restrict__ q, const int* __restrict__ entries, const int64_t* __restrict__ tables,
    const uint8_t* __restrict__ run, float* __restrict__ state, float* __restrict__ out, int table_tiles, int kv_heads,
    int run_tile, int first_tile, int tile_count, int run_sequence, int window, float scale, float softcap, int flags) {
  ETE_SHARED(int, sequence, 1);  // the block's, read once a tile
  ETE_DYNAMIC_SHARED(uint8_t, shared);
  uint8_t *keys = shared, *values = shared + kKeys * kPitch;
  uint4* query = reinterpret_cast<uint4*>(shared + 2 * kKeys * kPitch) +
                 warp_id() * (kRowTiles * kSteps * kQueryWords) + lane_id();  // [tile][step][word of a lane][lane]

  const Part block = part_of_block();
  const RowBlock rows = row_block(entries, block.rows, window, first_tile, tile_count, run_sequence);
  const Span span = rows.span;
  if (rows.count == 0 || (span.begin >= span.end && flags == 0)) return;
  const int kv_head = block.heads / kHeadChunks;
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  const WarpRows mine = warp_rows(block, rows);
  const int first_position = rows.position + mine.first;
  const int last_position = first_position + mine.count - 1;
  const LanePlaces at = lane_places(mine, rows, kv_heads * kGroup);

  const float factor_of_query = !kFast ? 1.0f : ETE_SOFTCAP ? scale : scale * kLog2E;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float2 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 16 * step + 8 * (i / 2) + 2 * t;
        pairs[i] = make_float2(0, 0);
        if (row_there(at, r, i % 2) && column < kHeadDim)
          pairs[i] = load8_float(q + row_place(at, r, i % 2) * kHeadDim + column);
        pairs[i].x *= factor_of_query;
        pairs[i].y *= factor_of_query;
      }
      store_query(query + (r * kSteps + step) * kQueryWords, pairs);
    }

  float m[kRowTiles][2], l[kRowTiles][2], acc[kRowTiles][kDimTiles][4];
  const bool begin = (flags & kBegin) != 0;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool kept = row_there(at, r, i) && !begin;
      m[r][i] = kept ? state[row_place(at, r, i) * kStateCopies * 2] : -ETE_INFINITY;
      l[r][i] = kept ? state[row_place(at, r, i) * kStateCopies * 2 + 1] : 0.0f;
#pragma unroll
      for (int j = 0; j < kDimTiles; ++j) {
        const int dim = 8 * j + 2 * t;
        float2 x = make_float2(0, 0);
        if (kept && dim < kHeadDim) x = load8_float(out + row_place(at, r, i) * kHeadDim + dim);
        acc[r][j][2 * i] = x.x;
        acc[r][j][2 * i + 1] = x.y;
      }
    }

  if (threadIdx.x == 0) sequence[0] = rows.sequence;
  const auto keys_at = [&](int row_of_tables, int position) {
    const int64_t* table = tables + static_cast<int64_t>(row_of_tables) * table_tiles;
    return tile_keys({run != nullptr ? nullptr : table, run, run_tile, kv_heads}, position / kTilePositions, kv_head) +
           position % kTilePositions * kRowBytes;
  };
  int start = span.begin / kKeys * kKeys;
  const uint8_t* source = nullptr;  // of the keys at `start`
  if (start < span.end) {
    source = keys_at(rows.sequence, start);
    copy_rows(keys, source, start, span);
  }
  for (; start < span.end; start += kKeys) {
    cp_async_wait<0>();
    __syncthreads();  // the keys are there, and the last values have been used
    copy_rows(values, source + values_offset({nullptr, nullptr, 0, made_again(kv_heads)}), start, span);
    const int next = start + kKeys;
    source += kKeys * kRowBytes;
    if (next < span.end && next % kTilePositions == 0) source = keys_at(sequence[0], next);

    // What no row of a warp sees would change nothing.
    const int earliest = first_visible(made_again(first_position), window);
    const bool seen_by_warp = mine.count > 0 && start <= last_position && next > earliest;
    uint32_t weights[kRowTiles][kKeyTiles][2]
                    [kTerms];  // bf16 pairs: rows g and g + 8, positions 8 * n + 2 * t and next
    float kept[kRowTiles][2];
    if (seen_by_warp) {
      float score[kRowTiles][kKeyTiles][4];
#pragma unroll
      for (int from = 0; from < kSteps; from += kFreshSteps) {
        float sum[kRowTiles][kKeyTiles][4];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) sum[r][n][0] = sum[r][n][1] = sum[r][n][2] = sum[r][n][3] = 0;
#pragma unroll(kWholeQuery ? 1 : kFreshSteps)
        for (int step = from; step < min(from + kFreshSteps, kSteps); ++step) {
          uint32_t operands[kRowTiles][kTerms][4];
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) load_query(query + (r * kSteps + step) * kQueryWords, operands[r]);
          uint32_t key[kKeyTiles][2];
#pragma unroll
          for (int n = 0; n < kKeyTiles; n += 2) {
            uint32_t pair[4];
            ldmatrix4(pair,
                      keys + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16 + 8 * n * kPitch + 32 * step);
            key[n][0] = pair[0], key[n][1] = pair[1], key[n + 1][0] = pair[2], key[n + 1][1] = pair[3];
          }
#pragma unroll
          for (int term = kTerms - 1; term >= 0; --term)
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
              for (int r = 0; r < kRowTiles; ++r) mma_bf16(sum[r][n], operands[r][term], key[n]);
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[r][n][i] = from == 0 ? sum[r][n][i] : score[r][n][i] + sum[r][n][i];
      }

      if constexpr (!kFast || ETE_SOFTCAP) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              score[r][n][i] = kFast ? kLog2E * scaled_score(score[r][n][i], 1.0f, softcap)
                                     : scaled_score(score[r][n][i], scale, softcap);
      }
      if (next - 1 > first_position || start < first_visible(made_again(last_position), window)) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int position = first_position + 16 * r + 8 * (i / 2) + g;
            const int from = first_visible(position, window);
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n) {
              const int key_position = start + 8 * n + 2 * t + i % 2;
              if (key_position > position || key_position < from) score[r][n][i] = -ETE_INFINITY;
            }
          }
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float largest = m[r][i];
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n)
            largest = fmaxf(largest, fmaxf(score[r][n][2 * i], score[r][n][2 * i + 1]));
          largest = fmaxf(largest, warp_shuffle_xor(largest, 1));
          largest = fmaxf(largest, warp_shuffle_xor(largest, 2));
          const float reference = reference_of(largest);
          kept[r][i] = weight_of(m[r][i] - reference);
          m[r][i] = largest;
          float total = 0;
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            const float a = weight_of(score[r][n][2 * i] - reference),
                        b = weight_of(score[r][n][2 * i + 1] - reference);
            total += a + b;
            split_pair(a, b, weights[r][n][i]);
          }
          total += warp_shuffle_xor(total, 1);
          total += warp_shuffle_xor(total, 2);
          l[r][i] = fmaf(l[r][i], kept[r][i], total);
        }
    } else {  // so that the registers need not keep what was there
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          kept[r][i] = 1;
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
            for (int term = 0; term < kTerms; ++term) weights[r][n][i][term] = 0;
        }
    }

    cp_async_wait<0>();
    __syncthreads();  // the values are there, and the keys have been used
    if (next < span.end) copy_rows(keys, source, next, span);

    if (seen_by_warp) {
#if ETE_TERMS == 1
      bool same = true;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) same = same && kept[r][0] == 1.0f && kept[r][1] == 1.0f;
      if (!warp_all(same)) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int j = 0; j < kDimTiles; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[r][j][i] *= kept[r][i / 2];
      }
#endif
#pragma unroll
      for (int first = 0; first < kDimTiles; first += kFast ? kDimTiles : kTogether) {
        if (kWholeQuery) warp_sync();  // keeps the assembler from taking several groups at once, for want of registers
        const int together = kFast ? kDimTiles : min(kTogether, kDimTiles - first);
        float sum[kTogether][4];
        if constexpr (!kFast) {
#pragma unroll
          for (int j = 0; j < kTogether; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0;
        }
#pragma unroll
        for (int step = 0; step < kKeyTiles / 2; ++step) {
          const uint8_t* from = values + (lane / 8 % 2 * 8 + lane % 8) * kPitch + lane / 16 * 16 + 16 * step * kPitch;
          if constexpr (kFast) {
#pragma unroll
            for (int j = 0; j < together; j += 2) {
              uint32_t pair[4];
              ldmatrix4_transposed(pair, from + 16 * j);
              const uint32_t left[2] = {pair[0], pair[1]}, right[2] = {pair[2], pair[3]};
#pragma unroll
              for (int r = 0; r < kRowTiles; ++r) {
                const uint32_t a[4] = {weights[r][2 * step][0][0], weights[r][2 * step][1][0],
                                       weights[r][2 * step + 1][0][0], weights[r][2 * step + 1][1][0]};
                mma_bf16(acc[r][j], a, left);
                mma_bf16(acc[r][j + 1], a, right);
              }
            }
          } else {
            uint32_t value[kTogether][2];
#pragma unroll
            for (int j = 0; j < together; j += 2) {
              uint32_t pair[4];
              ldmatrix4_transposed(pair, from + 16 * (first + j));
              value[j][0] = pair[0], value[j][1] = pair[1], value[j + 1][0] = pair[2], value[j + 1][1] = pair[3];
            }
#pragma unroll
            for (int term = kTerms - 1; term >= 0; --term) {
              const uint32_t a[4] = {weights[0][2 * step][0][term], weights[0][2 * step][1][term],
                                     weights[0][2 * step + 1][0][term], weights[0][2 * step + 1][1][term]};
#pragma unroll
              for (int j = 0; j < together; ++j) mma_bf16(sum[j], a, value[j]);
            }
          }
        }
        if constexpr (!kFast) {
#pragma unroll
          for (int j = 0; j < together; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[0][first + j][i] = fmaf(acc[0][first + j][i], kept[0][i / 2], sum[j][i]);
        }
      }
    }
  }

  // Found once more, rather than kept over the loop.
  const Part block_again = part_of_block(made_again(0));
  const RowBlock rows_again = row_block(entries, block_again.rows, window, first_tile, tile_count, run_sequence);
  const LanePlaces places = lane_places(warp_rows(block_again, rows_again), rows_again, kv_heads * kGroup);
  const bool end = (flags & kEnd) != 0;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!row_there(places, r, i)) continue;
      const float factor = stored_factor(l[r][i], end);
      float* to = out + row_place(places, r, i) * kHeadDim;
#pragma unroll
      for (int j = 0; j < kDimTiles; ++j) {
        const int dim = 8 * j + 2 * t;
        if (dim < kHeadDim)
          store8(to + dim, make_float2(stored(acc[r][j][2 * i], factor), stored(acc[r][j][2 * i + 1], factor)));
      }
      if (t == 0 && !end) {
        state[row_place(places, r, i) * kStateCopies * 2] = m[r][i];
        state[row_place(places, r, i) * kStateCopies * 2 + 1] = l[r][i];
      }
    }
}

// Attention of prompt rows with plain multiply-adds: block (part of an entry of rows, KV head and some of its query
// heads). A lane is one (row, head) pair, the same 32 pairs in every warp, so that nothing is summed across lanes.
//
// Per block of kKeys positions, keys and then values as floats in shared memory: a warp makes the scores of a quarter
// of the positions (keys broadcast, eight sums a lane), all lanes weigh them, and a warp sums values over a quarter of
// the dims (values broadcast). Positions that no row of the block sees are never read.
//
// Shared memory: 4 * (32 head_dim + kKeys head_dim + 32 kKeys) bytes. Multiply-adds: 2 * head_dim per row, head and
// position. ETE_ROWS * ETE_HEADS <= 32, ETE_THREADS = 128.
#include "attention_rows.cuh"

constexpr int kThreads = ETE_THREADS;
constexpr int kWarps = kThreads / kWarp;
constexpr int kKeys = kHeadDim <= 128 ? 32 : 16;  // positions at a time
constexpr int kWarpKeys = kKeys / kWarps;
constexpr int kFours = (kHeadDim / 4 + kWarps - 1) / kWarps;  // fours of dims of a warp: 4 * (warp + kWarps * f)
constexpr int kSumColumns = 64;                               // of a key summed before they are added to the score

// Rows [start, start + kKeys) of a KV head's keys or values as floats; zeros for those outside the span.
ETE_DEVICE void stage_rows(float* to, const uint8_t* from, int start, const Span& span) {
  constexpr int pieces = kHeadDim / 4;
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * pieces; i += kThreads) {
    const int row = i / pieces, piece = i % pieces, position = start + row;
    float4 x = make_float4(0, 0, 0, 0);
    if (position >= span.begin && position < span.end) {
      const uint8_t* source = from + (position % kTilePositions) * kRowBytes + piece * (4 * kElementBytes);
#if ETE_KV_BF16
      const uint2 v = load8(source);
      x = make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
#else
      x = load16_float(source);
#endif
    }
    store16(to + row * kHeadDim + piece * 4, x);
  }
}

extern "C" __global__ void ETE_ATTENTION_BOUNDS attention_prompt(
    const float* __restrict__ q, const int* __restrict__ entries, const int64_t* __restrict__ tables,
    const uint8_t* __restrict__ run, float* __restrict__ state, float* __restrict__ out, int table_tiles, int kv_heads,
    int run_tile, int first_tile, int tile_count, int run_sequence, int window, float scale, float softcap, int flags) {
  ETE_DYNAMIC_SHARED(float, query);              // [column][lane]
  float* elements = query + kHeadDim * kWarp;    // [position][column]
  float* weights = elements + kKeys * kHeadDim;  // [position][lane]: scores, then weights

  const Part block = part_of_block();
  const RowBlock rows = row_block(entries, block.rows, window, first_tile, tile_count, run_sequence);
  const Span span = rows.span;
  if (rows.count == 0 || (span.begin >= span.end && flags == 0)) return;
  const int lane = lane_id(), warp = warp_id();
  const int kv_head = block.heads / kHeadChunks;
  const int head_of_group = block.heads % kHeadChunks * kHeads + lane % kHeads;
  const bool there = lane / kHeads < rows.count && head_of_group < kGroup;
  const int heads = kv_heads * kGroup;
  const int64_t place = static_cast<int64_t>(rows.row + lane / kHeads) * heads + kv_head * kGroup + head_of_group;
  const int position = rows.position + lane / kHeads, first_seen = first_visible(position, window);

  for (int four = warp; four < kHeadDim / 4; four += kWarps) {
    float4 x = make_float4(0, 0, 0, 0);
    if (there) x = load16_float(q + place * kHeadDim + 4 * four);
    query[(4 * four + 0) * kWarp + lane] = x.x;
    query[(4 * four + 1) * kWarp + lane] = x.y;
    query[(4 * four + 2) * kWarp + lane] = x.z;
    query[(4 * four + 3) * kWarp + lane] = x.w;
  }
  const bool kept_state = there && (flags & kBegin) == 0;
  float m = kept_state ? state[place * kStateCopies * 2] : -ETE_INFINITY;
  float l = kept_state ? state[place * kStateCopies * 2 + 1] : 0.0f;
  float4 acc[kFours];
#pragma unroll
  for (int f = 0; f < kFours; ++f) {
    const int dim = 4 * (warp + kWarps * f);
    acc[f] = make_float4(0, 0, 0, 0);
    if (kept_state && dim < kHeadDim) acc[f] = load16_float(out + place * kHeadDim + dim);
  }

  const Tiles tiles = {run != nullptr ? nullptr : tables + static_cast<int64_t>(rows.sequence) * table_tiles, run,
                       run_tile, kv_heads};
  for (int start = span.begin / kKeys * kKeys; start < span.end; start += kKeys) {
    const uint8_t* tile = tile_keys(tiles, start / kTilePositions, kv_head);
    stage_rows(elements, tile, start, span);
    __syncthreads();
    float score[kWarpKeys];
#pragma unroll
    for (int k = 0; k < kWarpKeys; ++k) score[k] = 0;
    for (int part = 0; part < kHeadDim; part += kSumColumns) {
      float sum[kWarpKeys];
#pragma unroll
      for (int k = 0; k < kWarpKeys; ++k) sum[k] = 0;
#pragma unroll 2
      for (int d = part; d < min(part + kSumColumns, kHeadDim); d += 4) {
        const float* column = query + d * kWarp + lane;
        const float x[4] = {column[0], column[kWarp], column[2 * kWarp], column[3 * kWarp]};
#pragma unroll
        for (int k = 0; k < kWarpKeys; ++k) {
          const float4 key = load16_float(elements + (warp * kWarpKeys + k) * kHeadDim + d);
          sum[k] = fmaf(key.w, x[3], fmaf(key.z, x[2], fmaf(key.y, x[1], fmaf(key.x, x[0], sum[k]))));
        }
      }
#pragma unroll
      for (int k = 0; k < kWarpKeys; ++k) score[k] += sum[k];
    }
#pragma unroll
    for (int k = 0; k < kWarpKeys; ++k) {
      const int key_position = start + warp * kWarpKeys + k;
      const bool seen = key_position <= position && key_position >= first_seen;
      score[k] = seen ? scaled_score(score[k], scale, softcap) : -ETE_INFINITY;
      weights[(warp * kWarpKeys + k) * kWarp + lane] = score[k];
    }
    __syncthreads();

    stage_rows(elements, tile + values_offset(tiles), start, span);
    float largest = m;
#pragma unroll
    for (int k = 0; k < kKeys; ++k) largest = fmaxf(largest, weights[k * kWarp + lane]);
    const float reference = reference_of(largest), kept = expf(m - reference);
    m = largest;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kWarpKeys; ++k) weights[(warp * kWarpKeys + k) * kWarp + lane] = expf(score[k] - reference);
    __syncthreads();

    float total = 0;
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      acc[f].x *= kept;
      acc[f].y *= kept;
      acc[f].z *= kept;
      acc[f].w *= kept;
    }
#pragma unroll 4
    for (int k = 0; k < kKeys; ++k) {
      const float weight = weights[k * kWarp + lane];
      total += weight;
#pragma unroll
      for (int f = 0; f < kFours; ++f) {
        const int dim = 4 * (warp + kWarps * f);
        if (dim >= kHeadDim) continue;
        const float4 value = load16_float(elements + k * kHeadDim + dim);
        acc[f].x = fmaf(weight, value.x, acc[f].x);
        acc[f].y = fmaf(weight, value.y, acc[f].y);
        acc[f].z = fmaf(weight, value.z, acc[f].z);
        acc[f].w = fmaf(weight, value.w, acc[f].w);
      }
    }
    l = fmaf(l, kept, total);
    __syncthreads();
  }

  if (!there) return;
  const bool end = (flags & kEnd) != 0;
  const float factor = stored_factor(l, end);
#pragma unroll
  for (int f = 0; f < kFours; ++f) {
    const int dim = 4 * (warp + kWarps * f);
    if (dim >= kHeadDim) continue;
    store16(out + place * kHeadDim + dim, make_float4(stored(acc[f].x, factor), stored(acc[f].y, factor),
                                                      stored(acc[f].z, factor), stored(acc[f].w, factor)));
  }
  if (warp == 0 && !end) {
    state[place * kStateCopies * 2] = m;
    state[place * kStateCopies * 2 + 1] = l;
  }
}

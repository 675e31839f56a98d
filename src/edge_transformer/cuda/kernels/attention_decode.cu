// Attention of decode rows with plain multiply-adds: block (KV head, row, units of a wave) makes the state of the row's
// ETE_HEADS query heads over one unit of positions.
//
// A warp takes 32 positions at a time. Scores: lane = position, the query broadcast from shared memory; a lane reads
// its key's row 16 bytes at a time through the first-level cache. Sums of values: lane = pairs of dims, weights
// broadcast from shared memory. The states of the block's warps are merged as a tree.
//
// Bytes read: 2 * element * head_dim per position and KV head. Multiply-adds: 2 * head_dim per position and query head.
#include "attention_units.cuh"

constexpr int kWarps = ETE_THREADS / kWarp;
constexpr int kStep = 32;                     // positions of a warp at a time
constexpr int kPairs = (kHeadDim + 63) / 64;  // pairs of dims of a lane: 64 * p + 2 * lane and the next
constexpr int kSums = kHeads * kPairs * 2;
constexpr int kSlotFloats = (kSums + 2 * kHeads) * kWarp;
constexpr int kColumns = 64;  // of a key summed before they are added to the score

// Eight consecutive elements.
ETE_DEVICE void load_elements(const uint8_t* at, float (&x)[8]) {
#if ETE_KV_BF16
  const uint4 v = load16(at);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = bf16_low(words[i]);
    x[2 * i + 1] = bf16_high(words[i]);
  }
#else
  const float4 a = load16_float(at), b = load16_float(at + 16);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
  x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
#endif
}

ETE_DEVICE float2 load_pair(const uint8_t* at) {
#if ETE_KV_BF16
  const uint32_t pair = load4(at);
  return make_float2(bf16_low(pair), bf16_high(pair));
#else
  return load8_float(at);
#endif
}

extern "C" __global__ void ETE_ATTENTION_BOUNDS
attention_decode(const float* __restrict__ q, const int* __restrict__ positions, const int* __restrict__ row_sequence,
                 const int* __restrict__ counts, const int64_t* __restrict__ tables, const uint8_t* __restrict__ run,
                 float* __restrict__ unit_acc, float* __restrict__ unit_state, int table_tiles, int kv_heads,
                 int first_tile, int tile_count, int run_sequence, int first_row, int first_unit, int wave_units,
                 int window, float scale, float softcap) {
  ETE_SHARED(float, query, kHeads* kHeadDim);
  ETE_SHARED(float, all_weights, kWarps * kHeads * kStep);
  ETE_SHARED(float, slots, kWarps / 2 * kSlotFloats);
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
    const int heads_here = min(kHeads, kGroup - head);
    const int lane = lane_id(), warp = warp_id();
    const int64_t heads = static_cast<int64_t>(kv_heads) * kGroup;
    const int tile = begin / kTilePositions;
    const uint8_t* keys = unit_keys(tables, run, row_sequence, work.row, table_tiles, first_tile, kv_heads, tile,
                                    kv_head, begin, min(end - begin, kSmallestUnit));
    const uint8_t* values = keys + values_offset({nullptr, run, first_tile, kv_heads});
    wait_for_kernels_ahead();
    const float* q_heads = q + (work.row * heads + kv_head * kGroup + head) * kHeadDim;
    for (int i = static_cast<int>(threadIdx.x); i < kHeads * kHeadDim; i += ETE_THREADS)
      query[i] = i < heads_here * kHeadDim ? __uint_as_float(load4_ordered(q_heads + i)) : 0.0f;
    __syncthreads();

    float* weights = all_weights + warp * kHeads * kStep;  // [head][position]

    float m[kHeads], l[kHeads], acc[kHeads][kPairs][2];  // l is summed over the lanes at the end
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      m[h] = -ETE_INFINITY;
      l[h] = 0;
#pragma unroll
      for (int p = 0; p < kPairs; ++p) acc[h][p][0] = acc[h][p][1] = 0;
    }

    for (int step = start + warp * kStep; step < end; step += kWarps * kStep) {
      if (step + kStep <= begin) continue;
      const int in_tile = step - tile * kTilePositions;
      const bool seen = step + lane >= begin && step + lane < end;
      float score[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) score[h] = 0;
      if (seen) {
        const uint8_t* key = keys + (in_tile + lane) * kRowBytes;
        for (int part = 0; part < kHeadDim; part += kColumns) {
          float sum[kHeads];
#pragma unroll
          for (int h = 0; h < kHeads; ++h) sum[h] = 0;
#pragma unroll 2
          for (int d = part; d < min(part + kColumns, kHeadDim); d += 8) {
            float k[8];
            load_elements(key + d * kElementBytes, k);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
              const float4 a = load16_float(query + h * kHeadDim + d), b = load16_float(query + h * kHeadDim + d + 4);
              sum[h] = fmaf(k[3], a.w, fmaf(k[2], a.z, fmaf(k[1], a.y, fmaf(k[0], a.x, sum[h]))));
              sum[h] = fmaf(k[7], b.w, fmaf(k[6], b.z, fmaf(k[5], b.y, fmaf(k[4], b.x, sum[h]))));
            }
          }
#pragma unroll
          for (int h = 0; h < kHeads; ++h) score[h] += sum[h];
        }
      }
      warp_sync();  // the weights of the step before have been read
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float s = seen ? scaled_score(score[h], scale, softcap) : -ETE_INFINITY;
        const float larger = fmaxf(m[h], warp_max(s)), reference = reference_of(larger);
        const float kept = expf(m[h] - reference), weight = expf(s - reference);
        m[h] = larger;
        l[h] = fmaf(l[h], kept, weight);
        weights[h * kStep + lane] = weight;
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          acc[h][p][0] *= kept;
          acc[h][p][1] *= kept;
        }
      }
      warp_sync();
      for (int four = 0; four < kStep; four += 4) {
        if (step + four + 4 <= begin || step + four >= end) continue;
        float2 value[4][kPairs];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int p = 0; p < kPairs; ++p) {
            const int position = step + four + i, dim = 64 * p + 2 * lane;
            const bool there = position >= begin && position < end && dim < kHeadDim;
            value[i][p] =
                there ? load_pair(values + (in_tile + four + i) * kRowBytes + dim * kElementBytes) : make_float2(0, 0);
          }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float4 w = load16_float(weights + h * kStep + four);
#pragma unroll
          for (int p = 0; p < kPairs; ++p) {
            acc[h][p][0] =
                fmaf(w.w, value[3][p].x,
                     fmaf(w.z, value[2][p].x, fmaf(w.y, value[1][p].x, fmaf(w.x, value[0][p].x, acc[h][p][0]))));
            acc[h][p][1] =
                fmaf(w.w, value[3][p].y,
                     fmaf(w.z, value[2][p].y, fmaf(w.y, value[1][p].y, fmaf(w.x, value[0][p].y, acc[h][p][1]))));
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) l[h] = warp_sum(l[h]);

    for (int half = kWarps / 2; half > 0; half /= 2) {
      float* slot = slots + warp % half * kSlotFloats + lane;
      if (warp >= half && warp < 2 * half) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          slot[2 * h * kWarp] = m[h];
          slot[(2 * h + 1) * kWarp] = l[h];
#pragma unroll
          for (int p = 0; p < 2 * kPairs; ++p) slot[(2 * kHeads + h * 2 * kPairs + p) * kWarp] = acc[h][p / 2][p % 2];
        }
      }
      __syncthreads();
      if (warp < half) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float other_m = slot[2 * h * kWarp];
          const float larger = fmaxf(m[h], other_m), reference = reference_of(larger);
          const float mine = expf(m[h] - reference), other = expf(other_m - reference);
          m[h] = larger;
          l[h] = fmaf(l[h], mine, slot[(2 * h + 1) * kWarp] * other);
#pragma unroll
          for (int p = 0; p < 2 * kPairs; ++p) {
            float& sum = acc[h][p / 2][p % 2];
            sum = fmaf(sum, mine, slot[(2 * kHeads + h * 2 * kPairs + p) * kWarp] * other);
          }
        }
      }
      __syncthreads();
    }

    if (warp != 0) continue;
    const int64_t place = (blockIdx.y * heads + kv_head * kGroup + head) * wave_units + in_wave;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads_here) break;
      const int64_t at = place + static_cast<int64_t>(h) * wave_units;
      if (lane == 0) {
        unit_state[2 * at] = m[h];
        unit_state[2 * at + 1] = l[h];
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int dim = 64 * p + 2 * lane;
        if (dim < kHeadDim) store8(unit_acc + at * kHeadDim + dim, make_float2(acc[h][p][0], acc[h][p][1]));
      }
    }
  }
}

// Prompt rows of the gated delta rule, what needs no state: block (value head, piece of up to 64 rows). With G the sum
// of g from the piece's first row on, and A[i][j] = beta_i exp(G_i - G_j) k_i . k_j for j < i, it solves
//   (I + A) U = beta v    and    (I + A) W = beta exp(G) k
// by forward substitution, a thread a column of U or W. Then d = U - W S for the state S before the piece.
//
// Writes U over v in qkv, and per piece and value head [64 key_dim] W, [64][64] exp(G_i - G_j) q_i . k_j for j <= i,
// [64] exp(G), [64] exp(G_last - G). Only differences of G <= 0 are raised to a power, and G is kept in two floats, so
// that a difference is as accurate after a strong decay as before.
//
// Multiply-adds: 5120 key_dim + 2016 (key_dim + value_dim). Sums run along key_dim and the rows in ascending order.
#define ETE_MIN_BLOCKS (ETE_ARCH == 90 ? 2 : 1)  // elsewhere a second block would cost spilled registers
#include "delta.cuh"

constexpr int kSlice = 32;  // columns of q and k staged at a time
constexpr int kSlices = (kKeyDim + kSlice - 1) / kSlice;
constexpr int kPitch = kSlice + 4;
constexpr int kBuffer = 2 * kPieceRows * kPitch;  // rows of k, then rows of q
constexpr int kRulePitch = kPieceRows + 4;
constexpr int kBlock = 16;  // rows solved together
static_assert(ETE_THREADS == 256, "16 x 16 threads");
static_assert(2 * kBuffer >= kPieceRows * kRulePitch, "the rule takes the slices' place");

// A sum in two floats: hi is its rounding, lo the rest.
struct Precise {
  float hi, lo;
};

ETE_DEVICE Precise add(Precise x, Precise y) {
  const float sum = x.hi + y.hi, part = sum - x.hi;
  const float rest = (x.hi - (sum - part)) + (y.hi - part) + (x.lo + y.lo);
  const float hi = sum + rest;
  return Precise{hi, rest - (hi - sum)};
}

// Queue the copies of a slice of k and q, 16 bytes four times a thread.
ETE_DEVICE void stage(float* to, const float* keys, const float* queries, int rows, int channels, int slice) {
  const int first = static_cast<int>(threadIdx.x) / (kSlice / 4);
  const int column = static_cast<int>(threadIdx.x) % (kSlice / 4) * 4;
  constexpr int step = ETE_THREADS / (kSlice / 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + i % 2 * step;
    const bool there = row < rows && slice * kSlice + column < kKeyDim;
    const float* from = (i < 2 ? keys : queries) + slice * kSlice;
    cp_async16(to + (first + i * step) * kPitch + column, from + (there ? row * channels + column : 0), there ? 16 : 0);
  }
}

ETE_DEVICE float dot(float4 x, float4 y, float sum) {
  return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}

// x[i..i + 3] += entry x[j], where rows come after j.
ETE_DEVICE void take(float (&x)[kPieceRows], int i, int j, float4 entry) {
  if (i > j) x[i] = fmaf(entry.x, x[j], x[i]);
  if (i + 1 > j) x[i + 1] = fmaf(entry.y, x[j], x[i + 1]);
  if (i + 2 > j) x[i + 2] = fmaf(entry.z, x[j], x[i + 2]);
  if (i + 3 > j) x[i + 3] = fmaf(entry.w, x[j], x[i + 3]);
}

extern "C" __global__ void ETE_LAUNCH_BOUNDS delta_prepare(float* __restrict__ qkv, const float* __restrict__ a,
                                                           const float* __restrict__ b, const float* __restrict__ decay,
                                                           const float* __restrict__ dt_bias,
                                                           const int* __restrict__ pieces,
                                                           float* __restrict__ workspace, int first_piece,
                                                           int key_heads, int value_heads, int tiled) {
  ETE_SHARED(float, slices, 2 * kBuffer);
  ETE_SHARED(float, high, kPieceRows);  // G
  ETE_SHARED(float, low, kPieceRows);
  ETE_SHARED(float, betas, kPieceRows);
  ETE_SHARED(float, decayed_betas, kPieceRows);  // beta exp(G)
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const Heads heads{key_heads, value_heads, tiled};
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const Piece piece = piece_at(pieces, first_piece + static_cast<int>(blockIdx.y));
  if (piece.rows == 0) return;
  const int channels = heads.channels(), rows = piece.rows;
  float* first_row = qkv + static_cast<int64_t>(piece.row) * channels;
  const float* keys = first_row + heads.key_channel(head);
  const float* queries = first_row + heads.query_channel(head);
  float* values = first_row + heads.value_channel(head);
  float* solved_keys = workspace + (static_cast<int64_t>(blockIdx.y) * value_heads + head) *
                                       (kPieceRows * (kKeyDim + kPieceRows) + 2 * kPieceRows);
  float* scores = solved_keys + kPieceRows * kKeyDim;
  float* factors = scores + kPieceRows * kPieceRows;

  stage(slices, keys, queries, rows, channels, 0);
  cp_async_commit();
  if (warp_id() == 0) {
    float g[2], beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane_id() + i;
      g[i] = beta[i] = 0.0f;
      if (row >= rows) continue;
      const int64_t at = static_cast<int64_t>(piece.row + row) * value_heads + head;
      g[i] = decay[head] * softplus(a[at] + dt_bias[head]);
      beta[i] = sigmoid(b[at]);
    }
    Precise sum = add(Precise{g[0], 0.0f}, Precise{g[1], 0.0f});
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const Precise before{warp_shuffle_up(sum.hi, step), warp_shuffle_up(sum.lo, step)};
      if (lane_id() >= step) sum = add(before, sum);
    }
    Precise first{warp_shuffle_up(sum.hi, 1), warp_shuffle_up(sum.lo, 1)};
    if (lane_id() == 0) first = Precise{0.0f, 0.0f};
    first = add(first, Precise{g[0], 0.0f});
    const Precise last{warp_shuffle(sum.hi, kWarp - 1), warp_shuffle(sum.lo, kWarp - 1)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane_id() + i;
      const Precise total = i == 0 ? first : sum;
      const float factor = expf(total.hi);
      high[row] = total.hi;
      low[row] = total.lo;
      betas[row] = beta[i];
      decayed_betas[row] = beta[i] * factor;
      factors[row] = factor;
      factors[kPieceRows + row] = expf(fminf((last.hi - total.hi) + (last.lo - total.lo), 0.0f));
    }
  }

  // Products of rows ty + 16 i with rows tx + 16 j, those blocks that reach below the diagonal.
  const int tx = thread % 16, ty = thread / 16;
  float kk[4][4], qk[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j <= i; ++j) kk[i][j] = qk[i][j] = 0.0f;
  for (int slice = 0; slice < kSlices; ++slice) {
    cp_async_wait<0>();
    __syncthreads();
    if (slice + 1 < kSlices) stage(slices + (slice + 1) % 2 * kBuffer, keys, queries, rows, channels, slice + 1);
    cp_async_commit();
    const float* k_rows = slices + slice % 2 * kBuffer;
    const float* q_rows = k_rows + kPieceRows * kPitch;
#pragma unroll 2
    for (int column = 0; column < kSlice; column += 4) {
      float4 right[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) right[j] = load16_float(k_rows + (tx + 16 * j) * kPitch + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 k = load16_float(k_rows + (ty + 16 * i) * kPitch + column);
        const float4 q = load16_float(q_rows + (ty + 16 * i) * kPitch + column);
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          kk[i][j] = dot(k, right[j], kk[i][j]);
          qk[i][j] = dot(q, right[j], qk[i][j]);
        }
      }
    }
  }
  __syncthreads();

  float* rule = slices;  // -A, [column][row]
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = ty + 16 * i, column = tx + 16 * j;
      float score = 0.0f, entry = 0.0f;
      if (j <= i && column <= row) {
        const float kept = expf(fminf((high[row] - high[column]) + (low[row] - low[column]), 0.0f));
        score = kept * qk[i][j <= i ? j : i];
        if (column < row) entry = -betas[row] * (kept * kk[i][j <= i ? j : i]);
      }
      scores[row * kPieceRows + column] = score;
      rule[column * kRulePitch + row] = entry;
    }
  __syncthreads();

  for (int first = warp_id() * kWarp; first < kValueDim + kKeyDim; first += ETE_THREADS) {
    warp_sync();  // else the compiler reads the whole rule ahead of the loop
    const int column = first + lane_id();
    const bool of_values = column < kValueDim, there = column < kValueDim + kKeyDim;
    const float* from = of_values ? values + column : keys + (column - kValueDim);
    const float* factor = of_values ? betas : decayed_betas;
    float x[kPieceRows];
#pragma unroll
    for (int i = 0; i < kPieceRows; ++i)
      x[i] = there && i < rows ? from[static_cast<int64_t>(i) * channels] * factor[i] : 0.0f;
    // Blocks of 16 rows, the rows of the next one moving up: a loop, since all of it unrolled compiles for ten seconds.
#pragma unroll 1
    for (int block = 0; block < kPieceRows; block += kBlock) {
      const float* entries = rule + block * kRulePitch + block;
#pragma unroll
      for (int j = 0; j < kBlock - 1; ++j)
#pragma unroll
        for (int i = (j + 1) / 4 * 4; i < kBlock; i += 4) take(x, i, j, load16_float(entries + j * kRulePitch + i));
#pragma unroll
      for (int below = kBlock; below < kPieceRows; below += kBlock) {
        if (block + below < kPieceRows) {
#pragma unroll
          for (int j = 0; j < kBlock; ++j)
#pragma unroll
            for (int i = below; i < below + kBlock; i += 4) take(x, i, j, load16_float(entries + j * kRulePitch + i));
        }
      }
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        if (of_values && block + i < rows) values[static_cast<int64_t>(block + i) * channels + column] = x[i];
        if (!of_values && there) solved_keys[(block + i) * kKeyDim + column - kValueDim] = x[i];
      }
#pragma unroll
      for (int i = 0; i < kPieceRows - kBlock; ++i) x[i] = x[i + kBlock];
    }
  }
}

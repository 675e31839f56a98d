// The first part of the gated delta rule: causal convolution along the rows of each channel, SiLU, and for heads of q
// and k x / sqrt(sum x^2 + 1e-6), q times key_dim^-0.5 besides. In place in qkv; the history in the state block becomes
// that of the last row.
//
// Prompt rows: `delta_borders` copies the values before each piece, then `delta_conv_prompt` takes pieces side by side.
// Decode rows: `delta_conv_decode`, a warp for a head of a sequence, its rows in order.
// Moves qkv twice. Macros besides those of delta.cuh: ETE_CONV, the width of the convolution, 2 to 4.
#include "delta.cuh"

constexpr int kConv = ETE_CONV;
constexpr int kHistory = kConv - 1;  // values of a channel kept between passes
constexpr int kWarps = ETE_THREADS / kWarp;
constexpr int kVectors = ((kKeyDim > kValueDim ? kKeyDim : kValueDim) + 127) / 128;  // fours of channels of a lane
constexpr int kWarpRows = 8;
constexpr float kTiny = 1e-6f;

// Four channels side by side; of the taps [4][count], oldest first, column `column`.
ETE_DEVICE float4 column_of(const float* taps, int count, int column) {
  return make_float4(taps[column], taps[count + column], taps[2 * count + column], taps[3 * count + column]);
}

ETE_DEVICE float4 add_product(float4 sum, float4 x, float4 y) {
  return make_float4(fmaf(x.x, y.x, sum.x), fmaf(x.y, y.y, sum.y), fmaf(x.z, y.z, sum.z), fmaf(x.w, y.w, sum.w));
}

// `count` columns of four channels from global memory, [4][count] floats, 16-aligned.
template <int count>
ETE_DEVICE void load_columns(float (&to)[4 * count], const float* from) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const float4 four = load16_float(from + 4 * i);
    to[4 * i] = four.x;
    to[4 * i + 1] = four.y;
    to[4 * i + 2] = four.z;
    to[4 * i + 3] = four.w;
  }
}

ETE_DEVICE void store_columns(float* to, const float4 (&columns)[kHistory]) {
  float flat[4 * kHistory];
#pragma unroll
  for (int age = 0; age < kHistory; ++age) {
    flat[age] = columns[age].x;
    flat[kHistory + age] = columns[age].y;
    flat[2 * kHistory + age] = columns[age].z;
    flat[3 * kHistory + age] = columns[age].w;
  }
#pragma unroll
  for (int i = 0; i < kHistory; ++i)
    store16(to + 4 * i, make_float4(flat[4 * i], flat[4 * i + 1], flat[4 * i + 2], flat[4 * i + 3]));
}

// The convolution's result for the newest of kConv values, oldest first, through SiLU.
ETE_DEVICE float4 convolved(const float4 (&window)[kConv], const float4 (&taps)[kConv]) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int t = 0; t < kConv; ++t) sum = add_product(sum, window[t], taps[t]);
  return make_float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
}

ETE_DEVICE void load_taps(float4 (&taps)[kConv], const float* conv, int channel) {
  float flat[4 * kConv];
  load_columns<kConv>(flat, conv + static_cast<int64_t>(channel) * kConv);
#pragma unroll
  for (int t = 0; t < kConv; ++t) taps[t] = column_of(flat, kConv, t);
}

// A row's head, finished and written: `x` are the lane's fours of channels, `live` those that exist.
ETE_DEVICE void finish_row(float4 (&x)[kVectors], const bool (&live)[kVectors], float* row, int head,
                           const Heads& heads, float query_scale) {
  float norm = 1.0f, scale = 1.0f;
  if (head < 2 * heads.keys) {
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (live[v])
        squares = fmaf(x[v].w, x[v].w, fmaf(x[v].z, x[v].z, fmaf(x[v].y, x[v].y, fmaf(x[v].x, x[v].x, squares))));
    norm = sqrtf(warp_sum(squares) + kTiny);
    if (head < heads.keys) scale = query_scale;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!live[v]) continue;
    float* to = row + 4 * lane_id() + 128 * v;
    if (head < 2 * heads.keys)
      x[v] = make_float4(x[v].x / norm * scale, x[v].y / norm * scale, x[v].z / norm * scale, x[v].w / norm * scale);
    store16(to, x[v]);
  }
}

// borders [pieces][channels][kHistory]: the values before each piece. Block (channels, piece), a thread four channels.
extern "C" __global__ void ETE_LAUNCH_BOUNDS delta_borders(const float* __restrict__ qkv,
                                                           const int64_t* __restrict__ states,
                                                           const int* __restrict__ pieces, float* __restrict__ borders,
                                                           int key_heads, int value_heads) {
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const Heads heads{key_heads, value_heads, 0};
  const Piece piece = piece_at(pieces, static_cast<int>(blockIdx.y));
  const int channels = heads.channels();
  const int channel = 4 * (static_cast<int>(blockIdx.x) * ETE_THREADS + static_cast<int>(threadIdx.x));
  if (piece.rows == 0 || channel >= channels) return;
  float old[4 * kHistory];
  const bool kept = piece.position > piece.before && piece.before < kHistory;
  if (kept)
    load_columns<kHistory>(
        old, state_of(states, piece.sequence) + heads.history_offset() + static_cast<int64_t>(channel) * kHistory);
  float4 columns[kHistory];
#pragma unroll
  for (int age = 1; age <= kHistory; ++age) {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (age <= piece.before) {
      x = load16_float(qkv + static_cast<int64_t>(piece.row - age) * channels + channel);
    } else if (kept) {
#pragma unroll
      for (int column = 0; column < kHistory; ++column)
        if (column == kHistory - (age - piece.before)) x = column_of(old, kHistory, column);
    }
    columns[kHistory - age] = x;
  }
  store_columns(borders + (static_cast<int64_t>(blockIdx.y) * channels + channel) * kHistory, columns);
}

// Block (head of q, k or v; piece): a warp takes eight rows. All values are read before the first is written.
extern "C" __global__ void ETE_LAUNCH_BOUNDS delta_conv_prompt(float* __restrict__ qkv, const float* __restrict__ conv,
                                                               const float* __restrict__ borders,
                                                               const int64_t* __restrict__ states,
                                                               const int* __restrict__ pieces, int key_heads,
                                                               int value_heads, float query_scale) {
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const Heads heads{key_heads, value_heads, 0};
  const Piece piece = piece_at(pieces, static_cast<int>(blockIdx.y));
  if (piece.rows == 0) return;
  const int head = static_cast<int>(blockIdx.x), channels = heads.channels();
  const int first_channel = heads.first_channel(head), dim = heads.dim(head);
  float* rows = qkv + static_cast<int64_t>(piece.row) * channels + first_channel;
  const float* before = borders + (static_cast<int64_t>(blockIdx.y) * channels + first_channel) * kHistory;

  // The value of a channel `index` rows after the piece's first, or before it.
  const auto value_at = [&](int index, int column) {
    if (index >= 0) return load16_float(rows + static_cast<int64_t>(index) * channels + column);
    return column_of(before + column * kHistory, kHistory, kHistory + index);
  };
  if (piece.last && warp_id() == 0) {
    float* history = state_of(states, piece.sequence) + heads.history_offset();
    for (int column = 4 * lane_id(); column < dim; column += 128) {
      float4 columns[kHistory];
#pragma unroll
      for (int i = 0; i < kHistory; ++i) columns[i] = value_at(piece.rows - kHistory + i, column);
      store_columns(history + static_cast<int64_t>(first_channel + column) * kHistory, columns);
    }
  }
  const int first = warp_id() * kWarpRows;
  float4 raw[kVectors][kHistory + kWarpRows], taps[kVectors][kConv];
  bool live[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = 4 * lane_id() + 128 * v;
    live[v] = column < dim;
    if (!live[v]) continue;
    load_taps(taps[v], conv, first_channel + column);
#pragma unroll
    for (int i = 0; i < kHistory + kWarpRows; ++i)
      raw[v][i] = first + i - kHistory < piece.rows ? value_at(first + i - kHistory, column)
                                                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    if (first + i >= piece.rows) break;
    float4 x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!live[v]) continue;
      float4 window[kConv];
#pragma unroll
      for (int t = 0; t < kConv; ++t) window[t] = raw[v][i + t];
      x[v] = convolved(window, taps[v]);
    }
    finish_row(x, live, rows + static_cast<int64_t>(first + i) * channels, head, heads, query_scale);
  }
}

// Block (heads, sequence): starts int32 [.][4] {first row, its position, sequence, .}, row -1 behind the last;
// next int32 [rows]: the sequence's next decode row, or -1.
extern "C" __global__ void ETE_LAUNCH_BOUNDS delta_conv_decode(float* __restrict__ qkv, const float* __restrict__ conv,
                                                               const int64_t* __restrict__ states,
                                                               const int* __restrict__ starts,
                                                               const int* __restrict__ next, int key_heads,
                                                               int value_heads, float query_scale) {
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const Heads heads{key_heads, value_heads, 0};
  const int* start = starts + 4 * static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.x) * kWarps + warp_id(), channels = heads.channels();
  int row = start[0];
  if (row < 0 || head >= heads.all()) return;
  const int first_channel = heads.first_channel(head), dim = heads.dim(head);
  float* history = state_of(states, start[2]) + heads.history_offset();

  float4 window[kVectors][kConv], taps[kVectors][kConv];
  bool live[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = 4 * lane_id() + 128 * v;
    live[v] = column < dim;
    if (!live[v]) continue;
    load_taps(taps[v], conv, first_channel + column);
    float old[4 * kHistory];
#pragma unroll
    for (int i = 0; i < 4 * kHistory; ++i) old[i] = 0.0f;
    if (start[1] > 0) load_columns<kHistory>(old, history + static_cast<int64_t>(first_channel + column) * kHistory);
#pragma unroll
    for (int t = 0; t < kHistory; ++t) window[v][t + 1] = column_of(old, kHistory, t);
  }
  for (; row >= 0; row = next[row]) {
    float* at = qkv + static_cast<int64_t>(row) * channels + first_channel;
    float4 x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!live[v]) continue;
#pragma unroll
      for (int t = 0; t < kHistory; ++t) window[v][t] = window[v][t + 1];
      window[v][kHistory] = load16_float(at + 4 * lane_id() + 128 * v);
      x[v] = convolved(window[v], taps[v]);
    }
    finish_row(x, live, at, head, heads, query_scale);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!live[v]) continue;
    float4 columns[kHistory];
#pragma unroll
    for (int t = 0; t < kHistory; ++t) columns[t] = window[v][t + 1];
    store_columns(history + static_cast<int64_t>(first_channel + 4 * lane_id() + 128 * v) * kHistory, columns);
  }
}

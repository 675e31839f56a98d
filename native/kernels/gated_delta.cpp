// One value head of the gated delta rule, and the convolution before it.
//
// Steps (decode rows): S is read once for S^T k, then read, written and multiplied by q in one pass.
//
// Pieces (prompt rows i = 1..n of a piece, state S at its start, G_i the sum of log decays up to i), by the UT
// transform (Yang et al. 2024, arXiv:2406.06484 and 2412.06464): the corrections d solve the unit lower triangular
// system
//   d_i = beta_i (v_i - e^G_i S^T k_i) - sum over j < i of beta_i e^(G_i - G_j) (k_i . k_j) d_j,
// and then
//   o_i = e^G_i S^T q_i + sum over j <= i of e^(G_i - G_j) (q_i . k_j) d_j,
//   S   = e^G_n S + sum over j of e^(G_n - G_j) k_j d_j^T.
// All of them are products of small matrices that stay in the second-level cache. G is kept in double: its differences
// are small where G itself is large.
#include "gated_delta.hpp"

#include <cmath>

#include "kernels/math.hpp"
#include "kernels/norm.hpp"

namespace ete::ETE_ISA {

namespace {

#if defined(ETE_ISA_avx512)
constexpr int kTileRows = 12;
#elif defined(ETE_ISA_avx2)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVectors = 2;
constexpr int kSolveVectors = 4;

int64_t padded(int64_t columns) { return (columns + 15) / 16 * 16; }

void zero_fill(float* p, int64_t count) { std::memset(p, 0, size_t(count) * sizeof(float)); }

// ---- Products of small matrices -------------------------------------------------------------------------------------

// out [Rows][Vectors * W] = base * out + a [Rows][depth] b [depth][Vectors * W]; sums in ascending order over the
// depth.
template <int Rows, int Vectors>
void tile(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int64_t depth, float base, float* out,
          int64_t out_pitch) {
  Vec acc[Rows][Vectors];
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) acc[r][v] = zero();
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec lanes[Vectors];
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) lanes[v] = load(b + k * b_pitch + v * W);
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Vec factor = set1(a[r * a_pitch + k]);
      ETE_UNROLL
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(factor, lanes[v], acc[r][v]);
    }
  }
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      float* p = out + r * out_pitch + v * W;
      store(p, base == 0 ? acc[r][v] : fma(set1(base), load(p), acc[r][v]));
    }
  }
}

template <int Rows>
void tile_row(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int64_t depth, float base, float* out,
              int64_t out_pitch, int64_t cols) {
  int64_t c = 0;
  for (; c + kTileVectors * W <= cols; c += kTileVectors * W) {
    tile<Rows, kTileVectors>(a, a_pitch, b + c, b_pitch, depth, base, out + c, out_pitch);
  }
  for (; c < cols; c += W) tile<Rows, 1>(a, a_pitch, b + c, b_pitch, depth, base, out + c, out_pitch);
}

// out [rows][cols] = base * out + a [rows][depth] b [depth][cols]; cols a multiple of W. A row's sums do not depend on
// how many rows there are. depth_of(end): depth that rows before `end` need (a is 0 beyond).
template <typename Depth>
void product(const float* a, int64_t a_pitch, int64_t rows, const float* b, int64_t b_pitch, const Depth& depth_of,
             float base, float* out, int64_t out_pitch, int64_t cols) {
  int64_t r = 0;
  const auto next = [&](auto height) {
    tile_row<height>(a + r * a_pitch, a_pitch, b, b_pitch, depth_of(r + height), base, out + r * out_pitch, out_pitch,
                     cols);
    r += height;
  };
  while (r + kTileRows <= rows) next(std::integral_constant<int, kTileRows>{});
  while (r + 4 <= rows) next(std::integral_constant<int, 4>{});
  while (r < rows) next(std::integral_constant<int, 1>{});
}

// d [rows][cols]: the right side becomes the solution of (1 - lower) d = right side; lower [rows][kDeltaPiece] is
// strictly lower triangular.
template <int Vectors>
void solve_columns(const float* lower, int64_t rows, float* d, int64_t pitch) {
  for (int64_t i = 1; i < rows; ++i) {
    Vec acc[Vectors];
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) acc[v] = load(d + i * pitch + v * W);
    for (int64_t j = 0; j < i; ++j) {
      const Vec factor = set1(lower[i * kDeltaPiece + j]);
      ETE_UNROLL
      for (int v = 0; v < Vectors; ++v) acc[v] = fma(factor, load(d + j * pitch + v * W), acc[v]);
    }
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) store(d + i * pitch + v * W, acc[v]);
  }
}

void solve(const float* lower, int64_t rows, float* d, int64_t pitch, int64_t cols) {
  int64_t c = 0;
  for (; c + kSolveVectors * W <= cols; c += kSolveVectors * W) {
    solve_columns<kSolveVectors>(lower, rows, d + c, pitch);
  }
  for (; c < cols; c += W) solve_columns<1>(lower, rows, d + c, pitch);
}

// ---- Parts of a row -------------------------------------------------------------------------------------------------

// out [pitch] = head / sqrt(sum of squares + 1e-6) * scale, zeros behind.
void unit(const float* head, int64_t dim, float scale, float* out, int64_t pitch) {
  const Vec factor = set1(scale / __builtin_sqrtf(sum_of_squares(head, dim) + 1e-6f));
  for_vectors(dim,
              [&](int64_t i, int64_t lanes) { store_lanes(out + i, load_lanes(head + i, lanes) * factor, lanes); });
  zero_fill(out + dim, pitch - dim);
}

double log_decay(const DeltaArgs& args, const DeltaLayer& layer, int64_t row, int head) {
  const double x = double(args.a[row * layer.value_heads + head]) + args.dt_bias[head];
  const double softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
  return args.decay[head] * softplus;
}

float write_strength(const DeltaArgs& args, const DeltaLayer& layer, int64_t row, int head) {
  return float(1.0 / (1.0 + std::exp(-double(args.b[row * layer.value_heads + head]))));
}

// out of a row and head = o / rms(o) * norm * silu(z).
void finish(const DeltaLayer& layer, const DeltaArgs& args, int64_t row, int head, const float* o) {
  const int64_t offset = row * layer.inner() + int64_t(head) * layer.value_dim;
  const Vec factor = set1(norm_factor(o, layer.value_dim, layer.norm_eps));
  for_vectors(layer.value_dim, [&](int64_t i, int64_t lanes) {
    const Vec normed = load_lanes(o + i, lanes) * factor * load_lanes(args.norm + i, lanes);
    store_lanes(args.out + offset + i, normed * silu(load_lanes(args.z + offset + i, lanes)), lanes);
  });
}

// A head's q, k and v in a row after the convolution.
struct Row {
  const float* q;
  const float* k;
  const float* v;
};
Row row_of(const DeltaLayer& layer, const DeltaArgs& args, int64_t row, int head) {
  const float* channels = args.qkv + row * layer.channels();
  const int64_t keys = int64_t(layer.key_heads) * layer.key_dim;
  const int64_t key = int64_t(layer.key_head(head)) * layer.key_dim;
  return {channels + key, channels + keys + key, channels + 2 * keys + int64_t(head) * layer.value_dim};
}

// ---- The state of a head --------------------------------------------------------------------------------------------

// S with rows padded to vectors: the block's own memory where its rows are whole vectors, else a copy in `room`.
float* take_state(const DeltaLayer& layer, const DeltaRun& run, int head, float* room) {
  float* state = run.block + head * layer.head_state();
  const int64_t pitch = padded(layer.value_dim);
  if (layer.value_dim == pitch) {
    if (run.fresh) zero_fill(state, layer.head_state());
    return state;
  }
  zero_fill(room, layer.key_dim * pitch);
  for (int i = 0; i < layer.key_dim && !run.fresh; ++i) {
    std::memcpy(room + i * pitch, state + int64_t(i) * layer.value_dim, size_t(layer.value_dim) * sizeof(float));
  }
  return room;
}

void put_state(const DeltaLayer& layer, const DeltaRun& run, int head, const float* taken) {
  float* state = run.block + head * layer.head_state();
  if (taken == state) return;
  for (int i = 0; i < layer.key_dim; ++i) {
    std::memcpy(state + int64_t(i) * layer.value_dim, taken + i * padded(layer.value_dim),
                size_t(layer.value_dim) * sizeof(float));
  }
}

// ---- Steps ----------------------------------------------------------------------------------------------------------

// Columns [0, Vectors * W) of one step. S and d from these columns; o = S^T q.
template <int Vectors>
void step_columns(float* state, int64_t pitch, int64_t depth, const float* q, const float* k, const float* v,
                  float decay, float strength, float* o) {
  Vec predicted[Vectors];
  ETE_UNROLL
  for (int j = 0; j < Vectors; ++j) predicted[j] = zero();
  for (int64_t i = 0; i < depth; ++i) {
    const Vec key = set1(k[i]);
    ETE_UNROLL
    for (int j = 0; j < Vectors; ++j) predicted[j] = fma(key, load(state + i * pitch + j * W), predicted[j]);
  }
  Vec correction[Vectors];
  Vec read[Vectors];
  ETE_UNROLL
  for (int j = 0; j < Vectors; ++j) {
    correction[j] = set1(strength) * (load(v + j * W) - set1(decay) * predicted[j]);
    read[j] = zero();
  }
  for (int64_t i = 0; i < depth; ++i) {
    const Vec key = set1(k[i]);
    const Vec query = set1(q[i]);
    ETE_UNROLL
    for (int j = 0; j < Vectors; ++j) {
      float* p = state + i * pitch + j * W;
      const Vec value = fma(key, correction[j], set1(decay) * load(p));
      store(p, value);
      read[j] = fma(query, value, read[j]);
    }
  }
  ETE_UNROLL
  for (int j = 0; j < Vectors; ++j) store(o + j * W, read[j]);
}

void decode(const DeltaLayer& layer, const DeltaArgs& args, const DeltaRun& run, int head, float* scratch) {
  const int64_t keys = padded(layer.key_dim);
  const int64_t values = padded(layer.value_dim);
  float* room = scratch;
  float* q = room + layer.key_dim * values;
  float* k = q + keys;
  float* v = k + keys;
  float* o = v + values;
  float* state = take_state(layer, run, head, room);
  zero_fill(v, values);
  const float scale = 1.0f / __builtin_sqrtf(float(layer.key_dim));
  for (int64_t row = run.row; row < run.row + run.count; ++row) {
    const Row in = row_of(layer, args, row, head);
    unit(in.q, layer.key_dim, scale, q, keys);
    unit(in.k, layer.key_dim, 1.0f, k, keys);
    std::memcpy(v, in.v, size_t(layer.value_dim) * sizeof(float));
    const auto decay = float(std::exp(log_decay(args, layer, row, head)));
    const float strength = write_strength(args, layer, row, head);
    int64_t c = 0;
    for (; c + 4 * W <= values; c += 4 * W) {
      step_columns<4>(state + c, values, layer.key_dim, q, k, v + c, decay, strength, o + c);
    }
    for (; c < values; c += W) {
      step_columns<1>(state + c, values, layer.key_dim, q, k, v + c, decay, strength, o + c);
    }
    finish(layer, args, row, head, o);
  }
  put_state(layer, run, head, state);
}

// ---- Pieces ---------------------------------------------------------------------------------------------------------

// Scratch of a piece, all rows padded to vectors.
struct Piece {
  float* queries_keys;  // [2 kDeltaPiece][keys]: queries, then keys
  float* across;        // [key_dim][kDeltaPiece]: keys, transposed
  float* values;        // [kDeltaPiece][values]; becomes the corrections
  float* seen;          // [2 kDeltaPiece][values]: S^T q, then S^T k
  float* products;      // [2 kDeltaPiece][kDeltaPiece]: q . k, then k . k
};

void read_piece(const DeltaLayer& layer, const DeltaArgs& args, int64_t row, int64_t count, int head,
                const Piece& piece) {
  const int64_t keys = padded(layer.key_dim);
  const int64_t values = padded(layer.value_dim);
  const float scale = 1.0f / __builtin_sqrtf(float(layer.key_dim));
  for (int64_t i = 0; i < count; ++i) {
    const Row in = row_of(layer, args, row + i, head);
    float* k = piece.queries_keys + (kDeltaPiece + i) * keys;
    unit(in.q, layer.key_dim, scale, piece.queries_keys + i * keys, keys);
    unit(in.k, layer.key_dim, 1.0f, k, keys);
    for (int d = 0; d < layer.key_dim; ++d) piece.across[d * kDeltaPiece + i] = k[d];
    std::memcpy(piece.values + i * values, in.v, size_t(layer.value_dim) * sizeof(float));
    zero_fill(piece.values + i * values + layer.value_dim, values - layer.value_dim);
  }
  for (int d = 0; d < layer.key_dim; ++d) zero_fill(piece.across + d * kDeltaPiece + count, kDeltaPiece - count);
}

void run_piece(const DeltaLayer& layer, const DeltaArgs& args, int64_t row, int64_t count, int head, float* state,
               const Piece& piece) {
  const int64_t keys = padded(layer.key_dim);
  const int64_t values = padded(layer.value_dim);
  read_piece(layer, args, row, count, head, piece);
  double total[kDeltaPiece];
  float grown[kDeltaPiece];  // e^G
  float strength[kDeltaPiece];
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += log_decay(args, layer, row + i, head);
    total[i] = sum;
    grown[i] = float(std::exp(sum));
    strength[i] = write_strength(args, layer, row + i, head);
  }
  const auto whole = [&](int64_t) { return int64_t(layer.key_dim); };
  float* queries = piece.queries_keys;
  float* key_rows = queries + kDeltaPiece * keys;
  float* seen_by_keys = piece.seen + kDeltaPiece * values;
  float* key_products = piece.products + kDeltaPiece * kDeltaPiece;
  product(queries, keys, count, state, values, whole, 0, piece.seen, values, values);
  product(key_rows, keys, count, state, values, whole, 0, seen_by_keys, values, values);
  product(queries, keys, count, piece.across, kDeltaPiece, whole, 0, piece.products, kDeltaPiece, kDeltaPiece);
  product(key_rows, keys, count, piece.across, kDeltaPiece, whole, 0, key_products, kDeltaPiece, kDeltaPiece);
  // Rows of the triangular system and of the reading, decayed; zeros where j is not before i.
  for (int64_t i = 0; i < count; ++i) {
    alignas(64) float faded[kDeltaPiece];
    for (int64_t j = 0; j < kDeltaPiece; ++j) faded[j] = j <= i ? float(total[i] - total[j]) : -INFINITY;
    const Vec write = set1(-strength[i]);
    for (int64_t j = 0; j < kDeltaPiece; j += W) {
      const Vec factor = exp(load(faded + j));
      float* reading = piece.products + i * kDeltaPiece + j;
      float* system = key_products + i * kDeltaPiece + j;
      store(reading, load(reading) * factor);
      store(system, load(system) * factor * write);
    }
    for (int64_t j = i; j < kDeltaPiece; ++j) {
      key_products[i * kDeltaPiece + j] = 0;
      if (j > i) piece.products[i * kDeltaPiece + j] = 0;
    }
    for (int64_t c = 0; c < values; c += W) {
      float* right = piece.values + i * values + c;
      const Vec predicted = set1(grown[i]) * load(seen_by_keys + i * values + c);
      store(right, set1(strength[i]) * (load(right) - predicted));
      float* reading = piece.seen + i * values + c;
      store(reading, set1(grown[i]) * load(reading));
    }
  }
  solve(key_products, count, piece.values, values, values);
  const auto until = [&](int64_t end) { return std::min(end, count); };
  product(piece.products, kDeltaPiece, count, piece.values, values, until, 1, piece.seen, values, values);
  for (int64_t i = 0; i < count; ++i) finish(layer, args, row + i, head, piece.seen + i * values);
  // Keys as they are left at the piece's end.
  alignas(64) float left[kDeltaPiece] = {};
  for (int64_t j = 0; j < count; ++j) left[j] = float(std::exp(total[count - 1] - total[j]));
  for (int d = 0; d < layer.key_dim; ++d) {
    for (int64_t j = 0; j < kDeltaPiece; j += W) {
      float* p = piece.across + d * kDeltaPiece + j;
      store(p, load(p) * load(left + j));
    }
  }
  const auto rows = [&](int64_t) { return count; };
  product(piece.across, kDeltaPiece, layer.key_dim, piece.values, values, rows, grown[count - 1], state, values,
          values);
}

void prompt(const DeltaLayer& layer, const DeltaArgs& args, const DeltaRun& run, int head, float* scratch) {
  const int64_t keys = padded(layer.key_dim);
  const int64_t values = padded(layer.value_dim);
  float* room = scratch;
  Piece piece;
  piece.queries_keys = room + layer.key_dim * values;
  piece.across = piece.queries_keys + 2 * kDeltaPiece * keys;
  piece.values = piece.across + layer.key_dim * kDeltaPiece;
  piece.seen = piece.values + kDeltaPiece * values;
  piece.products = piece.seen + 2 * kDeltaPiece * values;
  float* state = take_state(layer, run, head, room);
  for (int64_t done = 0; done < run.count;) {
    const int64_t border = ((run.position + done) / kDeltaPiece + 1) * kDeltaPiece;
    const int64_t count = std::min(run.count - done, border - run.position - done);
    run_piece(layer, args, run.row + done, count, head, state, piece);
    done += count;
  }
  put_state(layer, run, head, state);
}

// ---- Convolution ----------------------------------------------------------------------------------------------------

void convolve(const DeltaLayer& layer, const DeltaArgs& args, const DeltaRun& run, int64_t first, int64_t count) {
  const int width = layer.conv_width;
  const int64_t channels = layer.channels();
  float* kept = layer.kept(run.block);
  // Weights and last values across: one vector of channels for each place in the window.
  alignas(64) float weights[kMaxConvWidth][kConvChannels] = {};
  alignas(64) float window[kMaxConvWidth][kConvChannels] = {};
  for (int64_t c = 0; c < count; ++c) {
    for (int t = 0; t < width; ++t) weights[t][c] = args.conv[(first + c) * width + t];
    for (int t = 0; t + 1 < width && !run.fresh; ++t) window[t][c] = kept[(first + c) * (width - 1) + t];
  }
  for (int64_t c = 0; c < count; c += W) {
    const int64_t lanes = std::min<int64_t>(W, count - c);
    Vec before[kMaxConvWidth];
    for (int t = 0; t + 1 < width; ++t) before[t] = load(window[t] + c);
    for (int64_t row = run.row; row < run.row + run.count; ++row) {
      float* p = args.qkv + row * channels + first + c;
      const Vec newest = load_lanes(p, lanes);
      Vec sum = newest * load(weights[width - 1] + c);
      for (int t = 0; t + 1 < width; ++t) sum = fma(before[t], load(weights[t] + c), sum);
      for (int t = 0; t + 2 < width; ++t) before[t] = before[t + 1];
      before[width - 2] = newest;
      store_lanes(p, silu(sum), lanes);
    }
    for (int t = 0; t + 1 < width; ++t) store(window[t] + c, before[t]);
  }
  for (int64_t c = 0; c < count; ++c) {
    for (int t = 0; t + 1 < width; ++t) kept[(first + c) * (width - 1) + t] = window[t][c];
  }
}

}  // namespace

extern const DeltaKernels delta_kernels;
const DeltaKernels delta_kernels{convolve, prompt, decode};

}  // namespace ete::ETE_ISA

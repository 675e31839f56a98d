// Prompt rows: lanes are tokens. A block of weight rows and 256 columns is dequantized into scratch, then every weight
// of it is broadcast against the token vectors.
//
// Per (weight row, token), whatever else is computed beside it: acc = fma(w, x, acc) over the columns of a block of 256
// in ascending order from zero, blocks added in ascending order. Bytes moved: the planes once per 512 tokens; tokens
// and scratch stay in the second-level cache.
#include <type_traits>

#include "kernels/lanes.hpp"
#include "kernels/linear_parts.hpp"

namespace ete::ETE_ISA {

namespace {

// Rows x Vectors accumulators, Vectors vectors of x and a broadcast weight have to fit in the registers.
#if defined(ETE_ISA_avx512)
constexpr int kPanel = 12;
#elif defined(ETE_ISA_avx2)
constexpr int kPanel = 6;
#else
constexpr int kPanel = 4;
#endif
static_assert(kPanel <= kGemmPanel && kGemmRows % kPanel == 0);

// The first half of a vector, for the last few tokens: half the work on a processor with two 256-bit multipliers.
#if defined(ETE_ISA_avx512)
struct Half {
  __m256 v;
};
inline Half operator+(Half a, Half b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Half fma(Half a, Half b, Half c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline void store(float* p, Half a) { _mm256_storeu_ps(p, a.v); }
inline Half load_as(const float* p, Half) { return {_mm256_loadu_ps(p)}; }
inline Half set1_as(float s, Half) { return {_mm256_set1_ps(s)}; }
constexpr int kHalf = W / 2;
#else
using Half = Vec;
constexpr int kHalf = 0;
#endif
inline Vec load_as(const float* p, Vec) { return load(p); }
inline Vec set1_as(float s, Vec) { return set1(s); }

// weights [Rows][kGemmRowPitch]; x: Vectors vectors `x_pitch` floats apart, each [columns][W]; tile [Rows][kTilePitch].
template <typename V, int Rows, int Vectors>
void micro(const float* weights, const float* x, int64_t x_pitch, int64_t columns, bool first, float* tile) {
  V acc[Rows][Vectors];
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) acc[r][v] = set1_as(0.0f, V{});
  }
  for (int64_t k = 0; k < columns; ++k) {
    V lanes[Vectors];
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) lanes[v] = load_as(x + v * x_pitch + k * W, V{});
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const V weight = set1_as(weights[r * kGemmRowPitch + k], V{});
      ETE_UNROLL
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(weight, lanes[v], acc[r][v]);
    }
  }
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      float* p = tile + r * kTilePitch + v * W;
      store(p, first ? acc[r][v] : load_as(p, V{}) + acc[r][v]);
    }
  }
}

// All tokens against one panel of dequantized rows, which stays in the first-level cache.
template <int Rows>
void panel(const float* weights, const float* x, int64_t x_pitch, int64_t tokens, int64_t columns, bool first,
           float* tile) {
  int64_t t = 0;
  const auto next = [&](auto vector, auto vectors) __attribute__((always_inline)) {
    micro<decltype(vector), Rows, vectors>(weights, x + t / W * x_pitch, x_pitch, columns, first, tile + t);
    t += vectors * W;
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  while (tokens - t > W + kHalf) next(Vec{}, Two{});
  if (tokens - t > kHalf) next(Vec{}, One{});
  if (tokens - t > 0) next(Half{}, One{});
}

// Asks for the step-th of `steps` shares of the rows that come next: a row's columns in a block are too few lines for
// the hardware to follow, and with few tokens there is little arithmetic to wait behind.
__attribute__((always_inline)) inline void prefetch_share(const UpcomingRows& upcoming, int step, int steps) {
  const int64_t begin = int64_t(upcoming.rows) * step / steps;
  const int64_t end = int64_t(upcoming.rows) * (step + 1) / steps;
  for (int plane = 0; begin < end && plane < kMaxPlanes && upcoming.weight->plane[plane]; ++plane) {
    const int64_t pitch = upcoming.weight->row_pitch[plane];
    const uint8_t* p = upcoming.weight->plane[plane] + upcoming.row * pitch;
    for (int64_t i = begin * pitch; i < end * pitch; i += 64) __builtin_prefetch(p + i, 0, 2);
  }
}

}  // namespace

void pack_tokens(const float* x, int64_t tokens, int64_t cols, int64_t begin, int64_t end, float* xt) {
  for (int64_t v = begin; v < end; ++v) {
    float* out = xt + v * cols * W;
    const int64_t count = std::clamp<int64_t>(tokens - v * W, 0, W);
    const float* in = x + v * W * cols;
    for (int64_t k = 0; k < cols; k += W) {
      const int64_t width = std::min<int64_t>(W, cols - k);
      Vec square[W];
      for (int64_t t = 0; t < W; ++t) {
        if (t >= count) {
          square[t] = zero();
        } else {
          square[t] = width == W ? load(in + t * cols + k) : load_first(in + t * cols + k, width);
        }
      }
      transpose(square);
      for (int64_t i = 0; i < width; ++i) store(out + (k + i) * W, square[i]);
    }
  }
}

void gemm(const WeightView& weight, int64_t row, int rows, const float* xt, int64_t tokens, float* block, float* tile,
          const UpcomingRows& upcoming) {
  const int64_t x_pitch = weight.cols * W;
  const int steps = int((weight.cols + kGemmCols - 1) / kGemmCols) * ((rows + kPanel - 1) / kPanel);
  int step = 0;
  for (int64_t k = 0; k < weight.cols; k += kGemmCols) {
    const int64_t columns = std::min<int64_t>(kGemmCols, weight.cols - k);
    const float* x = xt + k * W;
    for (int r = 0; r < rows;) {
      const int height = rows - r >= kPanel ? kPanel : rows - r >= 4 ? 4 : 1;
      for (int i = 0; i < height; ++i) dequantize(weight, row + r + i, k, columns, block + i * kGemmRowPitch);
      prefetch_share(upcoming, step++, steps);
      float* out = tile + r * kTilePitch;
      if (height == kPanel) {
        panel<kPanel>(block, x, x_pitch, tokens, columns, k == 0, out);
      } else if (height == 4) {
        panel<4>(block, x, x_pitch, tokens, columns, k == 0, out);
      } else {
        panel<1>(block, x, x_pitch, tokens, columns, k == 0, out);
      }
      r += height;
    }
  }
}

}  // namespace ete::ETE_ISA

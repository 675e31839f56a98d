// Prompt rows: lanes are tokens. A block of weight rows and 256 columns is dequantized into scratch, then every weight
// of it is broadcast against the token vectors.
//
// Per (weight row, token), whatever else is computed beside it: acc = fma(w, x, acc) over the columns of a block of 256
// in ascending order from zero, blocks added in ascending order. Bytes moved: the planes once per 512 tokens; tokens
// and scratch stay in the second-level cache.
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

// weights [Rows][kGemmRowPitch]; x: Vectors vectors `x_pitch` floats apart, each [columns][W]; tile [Rows][kTilePitch].
template <int Rows, int Vectors>
void micro(const float* weights, const float* x, int64_t x_pitch, int64_t columns, bool first, float* tile) {
  Vec acc[Rows][Vectors];
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) acc[r][v] = zero();
  }
  for (int64_t k = 0; k < columns; ++k) {
    Vec lanes[Vectors];
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) lanes[v] = load(x + v * x_pitch + k * W);
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = set1(weights[r * kGemmRowPitch + k]);
      ETE_UNROLL
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(weight, lanes[v], acc[r][v]);
    }
  }
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      float* p = tile + r * kTilePitch + v * W;
      store(p, first ? acc[r][v] : load(p) + acc[r][v]);
    }
  }
}

template <int Vectors>
void panels(const float* weights, int rows, const float* x, int64_t x_pitch, int64_t columns, bool first, float* tile) {
  int r = 0;
  for (; r + kPanel <= rows; r += kPanel) {
    micro<kPanel, Vectors>(weights + r * kGemmRowPitch, x, x_pitch, columns, first, tile + r * kTilePitch);
  }
  for (; r + 4 <= rows; r += 4) {
    micro<4, Vectors>(weights + r * kGemmRowPitch, x, x_pitch, columns, first, tile + r * kTilePitch);
  }
  for (; r < rows; ++r) {
    micro<1, Vectors>(weights + r * kGemmRowPitch, x, x_pitch, columns, first, tile + r * kTilePitch);
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

void gemm(const WeightView& weight, int64_t row, int rows, const float* xt, int64_t vectors, float* block,
          float* tile) {
  const int64_t x_pitch = weight.cols * W;
  for (int64_t k = 0; k < weight.cols; k += kGemmCols) {
    const int64_t columns = std::min<int64_t>(kGemmCols, weight.cols - k);
    for (int r = 0; r < rows; ++r) dequantize(weight, row + r, k, columns, block + r * kGemmRowPitch);
    int64_t v = 0;
    for (; v + 2 <= vectors; v += 2) {
      panels<2>(block, rows, xt + v * x_pitch + k * W, x_pitch, columns, k == 0, tile + v * W);
    }
    if (v < vectors) panels<1>(block, rows, xt + v * x_pitch + k * W, x_pitch, columns, k == 0, tile + v * W);
  }
}

}  // namespace ete::ETE_ISA

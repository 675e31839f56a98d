// The table of linear kernels of one instruction set, and the small ones: sums, finishing, embedding rows.
#include <algorithm>

#include "kernels/gemv.hpp"
#include "kernels/lanes.hpp"
#include "kernels/linear_parts.hpp"
#include "kernels/math.hpp"

namespace ete::ETE_ISA {

namespace {

void interleave(const float* x, int64_t cols, int t, int width, float* out) {
  const int64_t padded = (cols + kGroup - 1) / kGroup * kGroup;
  for (int64_t c = 0; c < padded; c += W) {
    const int64_t lanes = cols - c;
    store(out + c * width + t * W, lanes >= W ? load(x + c) : lanes > 0 ? load_first(x + c, lanes) : zero());
  }
}

// Where half a vector of groups or less is left over, both halves have it where the GEMV works so.
void group_sums(const float* x, int64_t groups, int t, int width, float* sums) {
  const int64_t padded = (groups + kSumsPadding - 1) / kSumsPadding * kSumsPadding;
  const bool twice = kHalfVectors && groups % W != 0 && groups % W <= W / 2;
  for (int64_t g = 0; g < padded; ++g) {
    float* out = sums + (g / W * width + t) * W + g % W;
    if (g >= groups) {
      *out = twice && g % W >= W / 2 ? out[-W / 2] : 0;
      continue;
    }
    Vec sum = load(x + g * kGroup);
    for (int i = W; i < kGroup; i += W) sum = sum + load(x + g * kGroup + i);
    *out = reduce_add(sum);
  }
}

void gemv(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out) {
  switch (weight.format) {
    case Format::F32:
    case Format::F16:
    case Format::BF16:
      return gemv_floats(weight, row, rows, input, tokens, out);
    case Format::Q4_K:
    case Format::Q5_K:
    case Format::Q6_K:
      return gemv_superblocks(weight, row, rows, input, tokens, out);
    default:
      return gemv_groups(weight, row, rows, input, tokens, out);
  }
}

// The finished value of a product, less the addition of Finish::Add.
inline Vec finished(const FinishArgs& args, Vec first, Vec second) {
  switch (args.kind) {
    case Finish::GatedSilu:
      return silu(first) * second;
    case Finish::GatedGeluTanh:
      return gelu_tanh(first) * second;
    case Finish::Softcap:
      return softcap(first, set1(args.softcap));
    default:
      return first;
  }
}

inline bool gated(const FinishArgs& args) {
  return args.kind == Finish::GatedSilu || args.kind == Finish::GatedGeluTanh;
}

inline void put(const FinishArgs& args, float* out, Vec value, int64_t lanes) {
  if (lanes == W) {
    store(out, args.kind == Finish::Add ? load(out) + value : value);
  } else {
    store_first(out, args.kind == Finish::Add ? load_first(out, lanes) + value : value, lanes);
  }
}

void gather_row(const WeightView& weight, int64_t row, float scale, float* out) {
  alignas(64) float values[kGemmCols];
  for (int64_t col = 0; col < weight.cols; col += kGemmCols) {
    const int64_t cols = std::min<int64_t>(kGemmCols, weight.cols - col);
    dequantize(weight, row, col, cols, values);
    for (int64_t i = 0; i < cols; ++i) out[col + i] = scale * values[i];
  }
}

}  // namespace

void finish_rows(const FinishArgs& args, int64_t row, int rows, int tokens, const float* first, const float* second) {
  const auto bias_at = [&](const float* bias, int r, int64_t lanes) {
    if (!bias) return zero();
    return lanes == W ? load(bias + row + r) : load_first(bias + row + r, lanes);
  };
  for (int r = 0; r < rows; r += W) {
    const int64_t lanes = std::min(W, rows - r);
    const Vec bias = bias_at(args.bias, r, lanes);
    const Vec second_bias = bias_at(args.second_bias, r, lanes);
    for (int t = 0; t < tokens; ++t) {
      Vec value = load(first + t * kGemvRows + r);
      if (args.bias) value = value + bias;
      Vec other = zero();
      if (gated(args)) {
        other = load(second + t * kGemvRows + r);
        if (args.second_bias) other = other + second_bias;
      }
      put(args, args.out + t * args.out_stride + row + r, finished(args, value, other), lanes);
    }
  }
}

void finish_tile(const FinishArgs& args, int64_t row, int rows, int64_t tokens, float* first, const float* second) {
  for (int r = 0; r < rows; r += W) {
    const int width = std::min(W, rows - r);
    for (int64_t t = 0; t < tokens; t += W) {
      Vec square[W];
      for (int i = 0; i < W; ++i) {
        square[i] = zero();
        if (i >= width) continue;
        Vec value = load(first + (r + i) * kTilePitch + t);
        if (args.bias) value = value + set1(args.bias[row + r + i]);
        Vec other = zero();
        if (gated(args)) {
          other = load(second + (r + i) * kTilePitch + t);
          if (args.second_bias) other = other + set1(args.second_bias[row + r + i]);
        }
        square[i] = finished(args, value, other);
      }
      transpose(square);
      const int64_t count = std::min<int64_t>(W, tokens - t);
      for (int64_t i = 0; i < count; ++i) put(args, args.out + (t + i) * args.out_stride + row + r, square[i], width);
    }
  }
}

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {
    .gemv_width = width_of,
    .takes_columns = takes_columns,
    .interleave = interleave,
    .order_codes = order_codes,
    .group_sums = group_sums,
    .gemv = gemv,
    .finish_rows = finish_rows,
    .pack_tokens = pack_tokens,
    .lanes = W,
    .gemm = gemm,
    .finish_tile = finish_tile,
    .gather_row = gather_row,
};

}  // namespace ete::ETE_ISA

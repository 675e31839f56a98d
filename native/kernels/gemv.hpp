// Decode rows: weight rows times up to eight activation rows, straight from the planes.
//
// Per (weight row, token), whatever else is computed beside it, so that a row's bits do not depend on its batch mates:
//   formats with minimums start with sum over groups of (minimum + centre * scale) * (sum of the group's x), lane =
//   group; then per group of 32 columns (16 where scales are per 16) the lanes sum code * x, and total += scale * that;
//   the lanes are added at the end. Floats: total += code * x.
// Bytes moved: the planes of the rows once; x and its sums stay in the first-level cache.
#pragma once
#include "kernels/dequant.hpp"
#include "linear.hpp"

namespace ete::ETE_ISA {

constexpr int kSegment = 64;  // groups whose scales are converted at once

// Weight rows worked on together, so that they share the loads of x while all totals fit in the registers.
constexpr int rows_at_once(int tokens) {
#if defined(ETE_ISA_avx512)
  return tokens <= 4 ? 4 : 2;
#elif defined(ETE_ISA_avx2)
  return tokens <= 1 ? 4 : tokens <= 4 ? 2 : 1;
#else
  return tokens <= 1 ? 2 : 1;
#endif
}

template <Format F, int Tokens, int Rows>
void gemv_rows(const WeightView& weight, int64_t row, const float* const* x, const float* const* sums, float* out) {
  using D = Decoder<F>;
  RowPlanes planes[Rows];
  for (int r = 0; r < Rows; ++r) planes[r] = weight.row(row + r);
  Vec total[Rows][Tokens];
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    ETE_UNROLL
    for (int t = 0; t < Tokens; ++t) total[r][t] = zero();
  }
  const int64_t groups = weight.cols / kGroup;

  if constexpr (!D::kScaled) {
    const auto add_group = [&](int64_t g, auto&& decode) __attribute__((always_inline)) {
      ETE_UNROLL
      for (int r = 0; r < Rows; ++r) {
        Vec c[kParts];
        decode(planes[r], c);
        ETE_UNROLL
        for (int t = 0; t < Tokens; ++t) {
          ETE_UNROLL
          for (int i = 0; i < kParts; ++i) total[r][t] = fma(c[i], load(x[t] + g * kGroup + i * W), total[r][t]);
        }
      }
    };
    for (int64_t g = 0; g < groups; ++g) {
      add_group(g, [&](const RowPlanes& p, Vec(&c)[kParts]) { D::template codes<true>(p, g, c); });
    }
    if (const int64_t rest = weight.cols % kGroup) {
      add_group(groups, [&](const RowPlanes& p, Vec(&c)[kParts]) { D::first_codes(p, groups, rest, c); });
    }
  } else {
    constexpr int kPartsPerScale = kParts / D::kSub;
    for (int64_t g0 = 0; g0 < groups; g0 += kSegment) {
      const int64_t n = std::min<int64_t>(kSegment, groups - g0);
      alignas(64) float scales[Rows][kSegment * D::kSub];
      for (int r = 0; r < Rows; ++r) {
        alignas(64) float minimums[D::kMinimum ? kSegment : 1];
        D::scales(planes[r], g0, n, scales[r], minimums);
        if constexpr (D::kMinimum) {
          for (int64_t g = 0; g < n; g += W) {
            const Vec minimum = fma(load(scales[r] + g), set1(float(D::kCentre)), load(minimums + g));
            ETE_UNROLL
            for (int t = 0; t < Tokens; ++t) total[r][t] = fma(minimum, load(sums[t] + g0 + g), total[r][t]);
          }
        }
      }
      for (int64_t g = 0; g < n; ++g) {
        ETE_UNROLL
        for (int r = 0; r < Rows; ++r) {
          Vec c[kParts];
          D::template codes<true>(planes[r], g0 + g, c);
          ETE_UNROLL
          for (int s = 0; s < D::kSub; ++s) {
            const Vec scale = set1(scales[r][g * D::kSub + s]);
            ETE_UNROLL
            for (int t = 0; t < Tokens; ++t) {
              const float* p = x[t] + (g0 + g) * kGroup + s * kPartsPerScale * W;
              Vec sum = c[s * kPartsPerScale] * load(p);
              ETE_UNROLL
              for (int i = 1; i < kPartsPerScale; ++i) sum = fma(c[s * kPartsPerScale + i], load(p + i * W), sum);
              total[r][t] = fma(sum, scale, total[r][t]);
            }
          }
        }
      }
    }
  }

  ETE_UNROLL
  for (int t = 0; t < Tokens; ++t) {
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) out[t * kGemvRows + r] = reduce_add(total[r][t]);
  }
}

template <Format F, int Tokens>
void gemv_tokens(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out) {
  constexpr int kRows = rows_at_once(Tokens);
  const float* x[Tokens];
  const float* sums[Tokens];
  for (int t = 0; t < Tokens; ++t) {
    // Tokens that are not there repeat the last one; their results are not looked at.
    x[t] = input.x + std::min(t, tokens - 1) * input.x_stride;
    sums[t] = input.sums + std::min(t, tokens - 1) * input.sums_stride;
  }
  int r = 0;
  for (; r + kRows <= rows; r += kRows) gemv_rows<F, Tokens, kRows>(weight, row + r, x, sums, out + r);
  for (; r < rows; ++r) gemv_rows<F, Tokens, 1>(weight, row + r, x, sums, out + r);
}

template <Format F>
void gemv_format(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out) {
  if (tokens == 1) {
    gemv_tokens<F, 1>(weight, row, rows, input, tokens, out);
  } else if (tokens == 2) {
    gemv_tokens<F, 2>(weight, row, rows, input, tokens, out);
  } else if (tokens <= 4) {
    gemv_tokens<F, 4>(weight, row, rows, input, tokens, out);
  } else {
    gemv_tokens<F, 8>(weight, row, rows, input, tokens, out);
  }
}

}  // namespace ete::ETE_ISA

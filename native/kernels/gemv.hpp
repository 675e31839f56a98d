// Decode rows: weight rows times up to eight activation rows, straight from the planes.
//
// Per (weight row, token), whatever else is computed beside it, so that a row's bits do not depend on its batch mates:
//   formats with minimums start with sum over groups of (minimum + centre * scale) * (sum of the group's x), lane =
//   group; then per group of 32 columns (16 where scales are per 16) the lanes sum code * x, and total += scale * that;
//   the lanes are added at the end. 4-bit formats: lane l sums code * x over its word's eight codes
//   (kernels/nibbles.hpp), then total += scale of the lane's group * that. Floats: total += code * x. Scales per row:
//   as floats, and the sum of all lanes is multiplied by the scale.
// Bytes moved: the planes of the rows once; x and its sums stay in the first-level cache.
#pragma once
#include "kernels/nibbles.hpp"
#include "linear.hpp"

namespace ete::ETE_ISA {

constexpr int kSegment = 64;  // groups whose scales are converted at once

// Blocks of rows between a prefetch and the use, for a group's bytes of codes: about 4 KB.
constexpr int blocks_ahead(int bytes) { return bytes >= 64 ? 1 : 2; }

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

// Asks for the lines of the rows that come after the next block of rows. The hardware follows one row well, but not
// several rows that are read side by side.
template <int Rows>
__attribute__((always_inline)) inline void prefetch_plane(const WeightView& weight, int plane, int64_t row) {
  const uint8_t* p = weight.plane[plane] + (row + blocks_ahead(0) * Rows) * weight.row_pitch[plane];
  for (int64_t i = 0; i < Rows * weight.row_pitch[plane]; i += 64) __builtin_prefetch(p + i);
}

// Converts the scales of a row's groups [first, first + n) and adds the terms with minimums to the totals.
template <typename D, int Tokens>
inline void add_minimums(const RowPlanes& row, int64_t first, int64_t n, const float* const* sums,
                         float (&scales)[kSegment * D::kSub], Vec (&total)[Tokens]) {
  alignas(64) float minimums[D::kMinimum ? kSegment : 1];
  D::scales(row, first, n, scales, minimums);
  if constexpr (D::kMinimum) {
    for (int64_t g = 0; g < n; g += W) {
      const Vec minimum = fma(load(scales + g), set1(float(D::kCentre)), load(minimums + g));
      ETE_UNROLL
      for (int t = 0; t < Tokens; ++t) total[t] = fma(minimum, load(sums[t] + first + g), total[t]);
    }
  }
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
  for (int plane = 1; plane < D::kPlanes; ++plane) prefetch_plane<Rows>(weight, plane, row);
  const uint8_t* ahead = planes[0].plane[0] + blocks_ahead(D::kBytes) * Rows * weight.row_pitch[0];
  const auto prefetch_codes = [&](int64_t g) __attribute__((always_inline)) {
    ETE_UNROLL
    for (int i = 0; i < Rows * D::kBytes; i += 64) __builtin_prefetch(ahead + g * (Rows * D::kBytes) + i);
  };

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
      prefetch_codes(g);
      add_group(g, [&](const RowPlanes& p, Vec(&c)[kParts]) { D::template codes<true>(p, g, c); });
    }
    if constexpr (!D::kRowScaled) {
      const int64_t rest = weight.cols % kGroup;
      if (rest) add_group(groups, [&](const RowPlanes& p, Vec(&c)[kParts]) { D::first_codes(p, groups, rest, c); });
    }
  } else {
    constexpr int kPartsPerScale = kParts / D::kSub;
    for (int64_t g0 = 0; g0 < groups; g0 += kSegment) {
      const int64_t n = std::min<int64_t>(kSegment, groups - g0);
      alignas(64) float scales[Rows][kSegment * D::kSub];
      ETE_UNROLL
      for (int r = 0; r < Rows; ++r) add_minimums<D, Tokens>(planes[r], g0, n, sums, scales[r], total[r]);
      for (int64_t g = 0; g < n; ++g) {
        prefetch_codes(g0 + g);
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
  for (int r = 0; r < Rows; ++r) {
    float scale = 1;
    if constexpr (D::kRowScaled) scale = D::row_scale(planes[r]);
    ETE_UNROLL
    for (int t = 0; t < Tokens; ++t) {
      const float sum = reduce_add(total[r][t]);
      out[t * kGemvRows + r] = D::kRowScaled ? sum * scale : sum;
    }
  }
}

// As many rows as leave registers for the totals and eight vectors of codes.
constexpr int nibble_rows_at_once(int tokens) {
#if defined(ETE_ISA_avx512)
  return tokens <= 1 ? 4 : tokens <= 4 ? 2 : 1;
#else
  return tokens <= 1 ? 4 : 1;
#endif
}

template <Format F, int Tokens, int Rows>
void nibble_rows(const WeightView& weight, int64_t row, const float* const* x, const float* const* sums, float* out) {
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
  for (int plane = 1; plane < D::kPlanes; ++plane) prefetch_plane<Rows>(weight, plane, row);
  const uint8_t* ahead = planes[0].plane[0] + blocks_ahead(D::kBytes) * Rows * weight.row_pitch[0];

  for (int64_t g0 = 0; g0 < groups; g0 += kSegment) {
    const int64_t n = std::min<int64_t>(kSegment, groups - g0);
    alignas(64) float scales[Rows][kSegment];
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) add_minimums<D, Tokens>(planes[r], g0, n, sums, scales[r], total[r]);

    const auto add_words = [&](int64_t g, auto&& load_from) __attribute__((always_inline)) {
      ETE_UNROLL
      for (int r = 0; r < Rows; ++r) {
        Vec c[8];
        codes_of_words<D::kZero + D::kCentre>(load_from(planes[r].plane[0] + (g0 + g) * 16), c);
        const Vec scale = spread_scales(scales[r] + g);
        ETE_UNROLL
        for (int t = 0; t < Tokens; ++t) {
          const float* p = x[t] + (g0 + g) * kGroup;
          Vec low = c[0] * load(p);
          Vec high = c[4] * load(p + 4 * W);
          ETE_UNROLL
          for (int i = 1; i < 4; ++i) {
            low = fma(c[i], load(p + i * W), low);
            high = fma(c[4 + i], load(p + (4 + i) * W), high);
          }
          total[r][t] = fma(low + high, scale, total[r][t]);
        }
      }
    };
    int64_t g = 0;
    for (; g + kWordGroups <= n; g += kWordGroups) {
      ETE_UNROLL
      for (int i = 0; i < Rows * 4 * W; i += 64) __builtin_prefetch(ahead + (g0 + g) * (Rows * 16) + i);
      add_words(g, [](const uint8_t* p) { return load_words(p); });
    }
    if (g < n) add_words(g, [&](const uint8_t* p) { return load_first_words(p, int(n - g) * 4); });
  }

  ETE_UNROLL
  for (int t = 0; t < Tokens; ++t) {
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) out[t * kGemvRows + r] = reduce_add(total[r][t]);
  }
}

template <Format F, int Tokens>
void gemv_tokens(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out) {
  constexpr bool kNibbles = is_nibble_format(F);
  const float* x[Tokens];
  const float* sums[Tokens];
  for (int t = 0; t < Tokens; ++t) {
    // Tokens that are not there repeat the last one; their results are not looked at.
    const int from = std::min(t, tokens - 1);
    x[t] = kNibbles ? input.ordered + from * input.ordered_stride : input.x + from * input.x_stride;
    sums[t] = input.sums + from * input.sums_stride;
  }
  int r = 0;
  if constexpr (kNibbles) {
    constexpr int kRows = nibble_rows_at_once(Tokens);
    for (; r + kRows <= rows; r += kRows) nibble_rows<F, Tokens, kRows>(weight, row + r, x, sums, out + r);
    for (; r < rows; ++r) nibble_rows<F, Tokens, 1>(weight, row + r, x, sums, out + r);
  } else {
    constexpr int kRows = rows_at_once(Tokens);
    for (; r + kRows <= rows; r += kRows) gemv_rows<F, Tokens, kRows>(weight, row + r, x, sums, out + r);
    for (; r < rows; ++r) gemv_rows<F, Tokens, 1>(weight, row + r, x, sums, out + r);
  }
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

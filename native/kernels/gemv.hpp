// Decode rows: weight rows times up to eight activation rows, straight from the planes. A vector of codes is made once
// and meets all activation rows; a vector of activations is loaded once for all weight rows worked on together.
//
// Per (weight row, token), whatever else is computed beside it, so that a row's bits do not depend on its batch mates:
//   formats with minimums start with sum over groups of (minimum + centre * scale) * (sum of the group's x), lane =
//   group; then per W / 4 groups of 32 columns lane l sums code * x over its eight codes in the order of words.hpp
//   (four and four where scales are per 16 columns), and total += scale of the lane's group * that; the lanes are added
//   at the end. Floats: total += code * x. Scales per row: as floats, and the sum of all lanes is multiplied by the
//   scale.
// Bytes moved: the planes of the rows once; x and its sums stay in the first-level cache.
#pragma once
#include <utility>

#include "kernels/words.hpp"
#include "linear.hpp"

namespace ete::ETE_ISA {

constexpr int kSegment = 64;  // groups whose scales are converted at once

// Blocks of rows between a prefetch and the use, for a group's bytes of codes: about 4 KB.
constexpr int blocks_ahead(int bytes) { return bytes >= 64 ? 1 : 2; }

// Weight rows worked on together: as many as leave registers for a sum for each token.
constexpr int rows_at_once(int tokens) {
#if defined(ETE_ISA_avx512)
  return tokens <= 4 ? 4 : 2;
#else
  return tokens <= 2 ? 4 : tokens <= 4 ? 2 : 1;
#endif
}

// Whether `width` activation rows are taken in two halves. Where only one weight row at a time can meet them all, they
// have to come from the first-level cache; when they do not fit, making the codes twice for half of them each costs
// less.
constexpr bool in_halves(int width, int64_t cols) {
  constexpr int64_t kFirstLevel = 28 << 10;
  return rows_at_once(width) == 1 && width * cols * int64_t(sizeof(float)) > kFirstLevel;
}

// Asks for the lines of the rows that come after the next block of rows. The hardware follows one row well, but not
// several rows that are read side by side.
template <int Rows>
__attribute__((always_inline)) inline void prefetch_plane(const WeightView& weight, int plane, int64_t row) {
  const uint8_t* p = weight.plane[plane] + (row + blocks_ahead(0) * Rows) * weight.row_pitch[plane];
  for (int64_t i = 0; i < Rows * weight.row_pitch[plane]; i += 64) __builtin_prefetch(p + i);
}

template <int... I, typename Function>
__attribute__((always_inline)) inline void for_each_index(std::integer_sequence<int, I...>, const Function& function) {
  (function(std::integral_constant<int, I>{}), ...);
}

#if defined(ETE_ISA_avx512)
constexpr bool kHalfVectors = true;  // what fills half a vector or less shares one with another row's
#else
constexpr bool kHalfVectors = false;
#endif

template <typename D>
constexpr bool has_minimums() {
  if constexpr (D::kScaled) return D::kMinimum;
  return false;
}

template <typename D>
constexpr int scales_per_group() {
  if constexpr (D::kScaled) return D::kSub;
  return 1;
}

// Numbers of the rows' groups from `first` on, as floats: scales, and minimums where the format has them.
template <typename D, int Rows, bool OneGroup>
struct GroupNumbers {
  static constexpr int kSub = scales_per_group<D>();
  int64_t first = 0;
  alignas(64) float scales[D::kScaled ? Rows : 1][kSegment * kSub];
  alignas(64) float minimums[has_minimums<D>() ? Rows : 1][has_minimums<D>() ? kSegment : 1];

  __attribute__((always_inline)) void convert(const RowPlanes (&planes)[Rows], int64_t begin, int64_t n) {
    first = begin;
    if constexpr (!D::kScaled) {
      return;
    } else if constexpr (D::kHalfScales != 0) {
      // All rows and both planes in one loop: few groups are left for it, and every loop has its price.
      for (int64_t i = 0; i < n; i += W) {
        const auto numbers = [&](int r, int plane) __attribute__((always_inline)) {
          return load_up_to_f16(reinterpret_cast<const uint16_t*>(planes[r].plane[plane]) + begin + i, n - i);
        };
        ETE_UNROLL
        for (int r = 0; r < Rows; ++r) {
          store(scales[r] + i, numbers(r, D::kHalfScales));
          if constexpr (has_minimums<D>()) store(minimums[r] + i, numbers(r, D::kHalfMinimums));
        }
      }
    } else {
      ETE_UNROLL
      for (int r = 0; r < Rows; ++r) D::scales(planes[r], begin, n, scales[r], minimums[has_minimums<D>() ? r : 0]);
    }
  }
  __attribute__((always_inline)) Vec scale(int r, int64_t group, int sub) const {
    if constexpr (!D::kScaled) return set1(1.0f);
    const float* p = scales[D::kScaled ? r : 0] + (group - first) * kSub + sub;
    return OneGroup ? set1(*p) : spread_scales<kSub>(p);
  }
  // What the sums of x of W groups are multiplied by.
  __attribute__((always_inline)) Vec minimum(int r, int64_t group) const {
    return fma(load(scales[r] + (group - first)), set1(float(D::kCentre)), load(minimums[r] + (group - first)));
  }
#if defined(ETE_ISA_avx512)
  // The same of two rows, for half as many groups of each.
  __attribute__((always_inline)) Vec pair_scale(int r, int64_t group) const {
    if constexpr (!D::kScaled) return set1(1.0f);
    return spread_scales(scales[D::kScaled ? r : 0] + (group - first),
                         scales[D::kScaled ? r + 1 : 0] + (group - first));
  }
  __attribute__((always_inline)) Vec pair_minimum(int r, int64_t group) const {
    const auto pair = [&](const float* a, const float* b) __attribute__((always_inline)) {
      return Vec{_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1)};
    };
    return fma(pair(scales[r] + (group - first), scales[r + 1] + (group - first)), set1(float(D::kCentre)),
               pair(minimums[r] + (group - first), minimums[r + 1] + (group - first)));
  }
#endif
};

// Adds the terms with minimums of groups [begin, end) to the totals; those of group 0 begin them.
template <int Width, typename D, int Tokens, int Rows, bool OneGroup>
__attribute__((always_inline)) inline void add_minimums(const GroupNumbers<D, Rows, OneGroup>& numbers, int64_t begin,
                                                        int64_t end, const float* sums, Vec (&total)[Rows][Tokens]) {
  const auto add = [&](int64_t group, auto is_first) __attribute__((always_inline)) {
    Vec minimum[Rows];
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) minimum[r] = numbers.minimum(r, group);
    ETE_UNROLL
    for (int t = 0; t < Tokens; ++t) {
      const Vec sum = kept(load(sums + group * Width + t * W));
      ETE_UNROLL
      for (int r = 0; r < Rows; ++r) total[r][t] = is_first ? minimum[r] * sum : fma(minimum[r], sum, total[r][t]);
    }
  };
  if (begin == 0) {
    add(0, std::true_type{});
    begin = W;
  }
  for (int64_t group = begin; group < end; group += W) add(group, std::false_type{});
}

// total[r][t] += scale(r) * (code * x), code by code; x: [code][Width tokens][lane]; scale(r, s): of the s-th of `Sub`
// columns.
template <int Sub, int Width, typename Codes, int Tokens, int Rows, typename Scale>
__attribute__((always_inline)) inline void add_codes(const Codes (&codes)[Rows], const float* x, const Scale& scale,
                                                     Vec (&total)[Rows][Tokens]) {
  constexpr int kPerScale = Codes::kCount / Sub;
  Vec sum[Rows][Tokens];
  for_each_index(std::make_integer_sequence<int, Codes::kCount>{}, [&](auto index) __attribute__((always_inline)) {
    constexpr int i = index;
    Vec code[Rows];
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) code[r] = codes[r].template code<i, (Tokens > 4)>();
    ETE_UNROLL
    for (int t = 0; t < Tokens; ++t) {
      Vec column = load(x + (Codes::column(i) * Width + t) * W);
      if constexpr (Rows > 1) column = kept(column);
      ETE_UNROLL
      for (int r = 0; r < Rows; ++r) {
        sum[r][t] = i % kPerScale == 0 ? code[r] * column : fma(code[r], column, sum[r][t]);
      }
    }
    if constexpr (i % kPerScale == kPerScale - 1) {
      ETE_UNROLL
      for (int r = 0; r < Rows; ++r) {
        const Vec factor = scale(r, i / kPerScale);
        ETE_UNROLL
        for (int t = 0; t < Tokens; ++t) total[r][t] = fma(sum[r][t], factor, total[r][t]);
      }
    }
  });
}

// out[t][r] = the lanes of total[r][t] together, times factor[r]; more as in reduce_adds.
template <int Tokens, int Rows, typename More>
inline void put_sums(const Vec (&total)[Rows][Tokens], const More& more, const float (&factor)[Rows], int rows,
                     float* out) {
  Vec all[Tokens * Rows];
  ETE_UNROLL
  for (int i = 0; i < Tokens * Rows; ++i) all[i] = total[i % Rows][i / Rows];
  alignas(64) float sums[16];
  reduce_adds(all, more, sums);
  if (rows == Rows) {
    ETE_UNROLL
    for (int t = 0; t < Tokens; ++t) {
      ETE_UNROLL
      for (int r = 0; r < Rows; ++r) out[t * kGemvRows + r] = sums[t * Rows + r] * factor[r];
    }
  } else {
    for (int t = 0; t < Tokens; ++t) {
      for (int r = 0; r < rows; ++r) out[t * kGemvRows + r] = sums[t * Rows + r] * factor[r];
    }
  }
}

template <Format F, int Tokens, int Width, int Rows>
void quantized_rows(const WeightView& weight, int64_t row, int rows, const GemvInput& input, float* out) {
  using D = Decoder<F>;
  constexpr int kSub = scales_per_group<D>();
  constexpr int kStepGroups = Codes<F>::kGroups;
  const float* x = takes_columns(F) ? input.x : input.ordered;
  RowPlanes planes[Rows];
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) planes[r] = weight.row(row + std::min(r, rows - 1));
  const int64_t groups = weight.cols / kGroup;
  // Groups whose codes, and whose minimums, fill vectors of their own.
  const int64_t whole = groups / kStepGroups * kStepGroups;
  const int64_t whole_minimums = kHalfVectors && groups % W <= W / 2 ? groups / W * W : groups;

  Vec total[Rows][Tokens];
  if (!has_minimums<D>() || whole_minimums == 0) {
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      ETE_UNROLL
      for (int t = 0; t < Tokens; ++t) total[r][t] = zero();
    }
  }
  for (int plane = 1; plane < D::kPlanes; ++plane) prefetch_plane<Rows>(weight, plane, row);
  const uint8_t* ahead = planes[0].plane[0] + blocks_ahead(D::kBytes) * Rows * weight.row_pitch[0];
  GroupNumbers<D, Rows, kStepGroups == 1> numbers;
  const auto add = [&](int64_t group, int count) __attribute__((always_inline)) {
    Codes<F> codes[Rows];
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) codes[r] = codes_of<F>(planes[r], group, count);
    const auto scale = [&](int r, int sub) __attribute__((always_inline)) { return numbers.scale(r, group, sub); };
    add_codes<kSub, Width>(codes, x + group * kGroup * Width, scale, total);
  };
  for (int64_t begin = 0; begin < groups; begin += kSegment) {
    const int64_t end = std::min(begin + kSegment, groups);
    numbers.convert(planes, begin, end - begin);
    if constexpr (has_minimums<D>()) {
      if (begin < whole_minimums) add_minimums<Width>(numbers, begin, std::min(end, whole_minimums), input.sums, total);
    }
    for (int64_t group = begin; group + kStepGroups <= end; group += kStepGroups) {
      constexpr int kStep = Rows * D::kBytes * kStepGroups;
      ETE_UNROLL
      for (int i = 0; i < kStep; i += 64) __builtin_prefetch(ahead + group * (Rows * D::kBytes) + i);
      add(group, kStepGroups);
    }
  }

  for (int64_t i = whole * (Rows * D::kBytes); i < groups * (Rows * D::kBytes); i += 64) __builtin_prefetch(ahead + i);

  float factor[Rows];
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    factor[r] = 1.0f;
    if constexpr (D::kRowScaled) factor[r] = D::row_scale(planes[r]);
  }
#if defined(ETE_ISA_avx512)
  const bool codes_left = groups - whole > 0 && groups - whole <= kStepGroups / 2;
  if (groups - whole > kStepGroups / 2) add(whole, int(groups - whole));
  if constexpr (kSub == 1) {
    if (codes_left || (has_minimums<D>() && whole_minimums < groups)) {
      Vec rest[Rows / 2][Tokens];
      ETE_UNROLL
      for (int p = 0; p < Rows / 2; ++p) {
        ETE_UNROLL
        for (int t = 0; t < Tokens; ++t) rest[p][t] = zero();
      }
      if constexpr (has_minimums<D>()) {
        if (whole_minimums < groups) {
          ETE_UNROLL
          for (int p = 0; p < Rows / 2; ++p) {
            const Vec minimum = numbers.pair_minimum(2 * p, whole_minimums);
            ETE_UNROLL
            for (int t = 0; t < Tokens; ++t) rest[p][t] = minimum * load(input.sums + whole_minimums * Width + t * W);
          }
        }
      }
      if (codes_left) {
        Codes<F> codes[Rows / 2];
        ETE_UNROLL
        for (int p = 0; p < Rows / 2; ++p) {
          codes[p] = codes_of<F>(planes[2 * p], planes[2 * p + 1], whole, int(groups - whole));
        }
        const auto scale = [&](int p, int) __attribute__((always_inline)) { return numbers.pair_scale(2 * p, whole); };
        add_codes<kSub, Width>(codes, x + whole * kGroup * Width, scale, rest);
      }
      const auto add_rest = [&](int i, Vec folded) __attribute__((always_inline)) {
        return folded + rest[i % (Rows / 2)][i / (Rows / 2)];
      };
      return put_sums(total, add_rest, factor, rows, out);
    }
  }
#else
  if (whole < groups) add(whole, int(groups - whole));
#endif
  put_sums(total, [](int, Vec folded) { return folded; }, factor, rows, out);
}

template <Format F, int Tokens, int Width, int Rows>
void float_rows(const WeightView& weight, int64_t row, int rows, const GemvInput& input, float* out) {
  using D = Decoder<F>;
  RowPlanes planes[Rows];
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) planes[r] = weight.row(row + std::min(r, rows - 1));
  Vec total[Rows][Tokens];
  ETE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    ETE_UNROLL
    for (int t = 0; t < Tokens; ++t) total[r][t] = zero();
  }
  const int64_t groups = weight.cols / kGroup;
  const uint8_t* ahead = planes[0].plane[0] + blocks_ahead(D::kBytes) * Rows * weight.row_pitch[0];
  const auto add_group = [&](int64_t g, auto&& decode) __attribute__((always_inline)) {
    Vec c[Rows][kParts];
    ETE_UNROLL
    for (int r = 0; r < Rows; ++r) decode(planes[r], c[r]);
    ETE_UNROLL
    for (int i = 0; i < kParts; ++i) {
      ETE_UNROLL
      for (int t = 0; t < Tokens; ++t) {
        Vec x = load(input.x + ((g * kParts + i) * Width + t) * W);
        if constexpr (Rows > 1) x = kept(x);
        ETE_UNROLL
        for (int r = 0; r < Rows; ++r) total[r][t] = fma(c[r][i], x, total[r][t]);
      }
    }
  };
  for (int64_t g = 0; g < groups; ++g) {
    ETE_UNROLL
    for (int i = 0; i < Rows * D::kBytes; i += 64) __builtin_prefetch(ahead + g * (Rows * D::kBytes) + i);
    add_group(g, [&](const RowPlanes& p, Vec(&c)[kParts])
                     __attribute__((always_inline)) { D::template codes<true>(p, g, c); });
  }
  const int64_t rest = weight.cols % kGroup;
  if (rest) add_group(groups, [&](const RowPlanes& p, Vec(&c)[kParts]) { D::first_codes(p, groups, rest, c); });

  float factor[Rows];
  std::fill_n(factor, Rows, 1.0f);
  put_sums(total, [](int, Vec folded) { return folded; }, factor, rows, out);
}

// Tokens of the `Width` activation rows that `input` begins with.
template <Format F, int Tokens, int Width>
void gemv_tokens(const WeightView& weight, int64_t row, int rows, const GemvInput& input, float* out) {
  constexpr int kRows = rows_at_once(Tokens);
  for (int r = 0; r < rows; r += kRows) {
    // The last block begins early rather than being smaller: some results are computed twice.
    const int first = std::max(0, std::min(r, rows - kRows));
    const int count = std::min(kRows, rows - first);
    if constexpr (is_float_format(F)) {
      float_rows<F, Tokens, Width, kRows>(weight, row + first, count, input, out + first);
    } else {
      quantized_rows<F, Tokens, Width, kRows>(weight, row + first, count, input, out + first);
    }
  }
}

template <Format F, int Width>
void gemv_width(const WeightView& weight, int64_t row, int rows, const GemvInput& input, float* out) {
  if constexpr (rows_at_once(Width) == 1) {
    if (in_halves(Width, weight.cols)) {
      for (int t = 0; t < Width; t += Width / 2) {
        const auto from = [&](const float* p) { return p ? p + t * W : p; };
        const GemvInput half{from(input.x), from(input.ordered), from(input.sums)};
        gemv_tokens<F, Width / 2, Width>(weight, row, rows, half, out + t * kGemvRows);
      }
      return;
    }
  }
  gemv_tokens<F, Width, Width>(weight, row, rows, input, out);
}

// For how many activation rows there is a kernel: the least that does for `tokens` of them.
constexpr int width_of(int tokens) { return tokens <= 4 ? tokens : tokens <= 6 ? 6 : 8; }

template <Format F>
void gemv_format(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out) {
  switch (width_of(tokens)) {
    case 1:
      return gemv_width<F, 1>(weight, row, rows, input, out);
    case 2:
      return gemv_width<F, 2>(weight, row, rows, input, out);
    case 3:
      return gemv_width<F, 3>(weight, row, rows, input, out);
    case 4:
      return gemv_width<F, 4>(weight, row, rows, input, out);
    case 6:
      return gemv_width<F, 6>(weight, row, rows, input, out);
    default:
      return gemv_width<F, 8>(weight, row, rows, input, out);
  }
}

}  // namespace ete::ETE_ISA

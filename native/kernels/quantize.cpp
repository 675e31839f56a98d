// Scales that make the squared error of a group small, and the codes they give.
//
// Groups of 32 to 128 columns are searched a vector of groups at a time, lane = group. Each of a fixed list of scales,
// a few percent apart around the one that just takes in the group's largest value, is tried: codes are rounded to it
// and the squared errors added. The best is then fitted to its codes by least squares as long as that helps. The scale
// kept is rounded to f16 first, and codes are made for what it then is.
// With a scale per row, lanes are columns and scales are f32.
#include "quantize.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/lanes.hpp"
#include "kernels/linear_parts.hpp"

namespace ete::ETE_ISA {

namespace {

constexpr int kGroup = 32;
constexpr int64_t kBufferFloats = 1 << 16;  // rows converted at once: they stay in the second-level cache
constexpr int kFits = 3;                    // least-squares fits at most
constexpr float kLargestHalf = 65504.0f;

// x rounded to the nearest f16, ties to even. |x| < 65520, no NaN.
uint16_t to_half(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const uint16_t sign = uint16_t(word >> 16 & 0x8000);
  float magnitude = std::fabs(x);
  if (magnitude < 6.103515625e-05f) {  // below the normal numbers: a multiple of 2^-24
    return uint16_t(sign | int(std::nearbyint(magnitude * 16777216.0f)));
  }
  word = (word & 0x7fffffff) + 0xfff + (word >> 13 & 1) - (112u << 23);
  return uint16_t(sign | word >> 13);
}

float from_half(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const float fraction = float(half & 1023);
  const float magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024.0f + fraction, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

inline Vec largest_of(Vec a, Vec b) { return max(a, b); }

float reduce_max(Vec a) {
  float lanes[W];
  store(lanes, a);
  return *std::max_element(lanes, lanes + W);
}

// Codes lowest..highest; value = scale * code (and + minimum, when the lowest is 0).
struct Levels {
  float lowest, highest;
};

inline Vec code_of(Vec scaled, Levels levels) {
  return min(max(round_nearest(scaled), set1(levels.lowest)), set1(levels.highest));
}

// 1 / a, and 0 where a is 0 (or so small that there is no such number).
inline Vec inverse(Vec a) {
  const Vec tiny = set1(1.0e-37f);
  return select_less(abs(a), tiny, zero(), set1(1.0f) / select_less(abs(a), tiny, set1(1.0f), a));
}

// W groups of G columns: columns[c] has column c of every group, zero in lanes without a group.
template <int G>
void load_groups(const float* x, int64_t groups, Vec (&columns)[G]) {
  for (int c = 0; c < G; c += W) {
    Vec square[W];
    for (int g = 0; g < W; ++g) square[g] = g < groups ? load(x + g * G + c) : zero();
    transpose(square);
    for (int i = 0; i < W; ++i) columns[c + i] = square[i];
  }
}

// ---- Scales without minimums ----------------------------------------------------------------------------------------

template <int G>
Vec error_of(const Vec (&columns)[G], Vec scale, Levels levels) {
  const Vec over = inverse(scale);
  Vec error = zero();
  ETE_UNROLL
  for (int c = 0; c < G; ++c) {
    const Vec rest = columns[c] - scale * code_of(columns[c] * over, levels);
    error = fma(rest, rest, error);
  }
  return error;
}

// The scale that is best for the codes that `scale` gives.
template <int G>
Vec fitted(const Vec (&columns)[G], Vec scale, Levels levels) {
  const Vec over = inverse(scale);
  Vec dot = zero(), squares = zero();
  for (int c = 0; c < G; ++c) {
    const Vec code = code_of(columns[c] * over, levels);
    dot = fma(code, columns[c], dot);
    squares = fma(code, code, squares);
  }
  return dot * inverse(squares);
}

// Scales are tried that put the value of largest magnitude at first, first + step, ... first + (count - 1) * step.
struct Tried {
  float first, step;
  int count;
};

// Scales of up to W groups into scales[lane].
template <int G>
void search_scales(const float* x, int64_t groups, Levels levels, const Tried& tried, bool both_signs, float* scales) {
  Vec columns[G];
  load_groups<G>(x, groups, columns);
  Vec extreme = zero();
  for (int c = 0; c < G; ++c) extreme = select_less(abs(extreme), abs(columns[c]), columns[c], extreme);
  Vec best = zero();
  Vec least = error_of<G>(columns, best, levels);
  const auto consider = [&](Vec scale) {
    const Vec error = error_of<G>(columns, scale, levels);
    best = select_less(error, least, scale, best);
    least = min(error, least);
  };
  for (int i = 0; i < tried.count; ++i) {
    const Vec scale = extreme * set1(1.0f / (tried.first + float(i) * tried.step));
    consider(scale);
    if (both_signs) consider(zero() - scale);
  }
  for (int i = 0; i < kFits; ++i) consider(fitted<G>(columns, best, levels));
  store(scales, best);
}

// ---- Scales with minimums -------------------------------------------------------------------------------------------

struct Line {
  Vec scale, minimum;
};

template <int G>
Vec error_of(const Vec (&columns)[G], Line line, Levels levels) {
  const Vec over = inverse(line.scale);
  Vec error = zero();
  for (int c = 0; c < G; ++c) {
    const Vec above = columns[c] - line.minimum;
    const Vec rest = above - line.scale * code_of(above * over, levels);
    error = fma(rest, rest, error);
  }
  return error;
}

template <int G>
Line fitted(const Vec (&columns)[G], Line line, Levels levels) {
  const Vec over = inverse(line.scale);
  Vec codes = zero(), squares = zero(), values = zero(), dot = zero();
  for (int c = 0; c < G; ++c) {
    const Vec code = code_of((columns[c] - line.minimum) * over, levels);
    codes = codes + code;
    squares = fma(code, code, squares);
    values = values + columns[c];
    dot = fma(code, columns[c], dot);
  }
  const Vec count = set1(float(G));
  const Vec scale = (count * dot - codes * values) * inverse(count * squares - codes * codes);
  return {scale, (values - scale * codes) * set1(1.0f / G)};
}

// Lines are tried that take in the middle 60 % to 108 % of the range of the values.
template <int G>
void search_lines(const float* x, int64_t groups, Levels levels, float* scales, float* minimums) {
  Vec columns[G];
  load_groups<G>(x, groups, columns);
  Vec low = columns[0], high = columns[0];
  for (int c = 1; c < G; ++c) {
    low = min(low, columns[c]);
    high = max(high, columns[c]);
  }
  const Vec middle = (low + high) * set1(0.5f), half = (high - low) * set1(0.5f);
  Line best = {zero(), low};
  Vec least = error_of<G>(columns, best, levels);
  const auto consider = [&](Line line) {
    const Vec error = error_of<G>(columns, line, levels);
    best.scale = select_less(error, least, line.scale, best.scale);
    best.minimum = select_less(error, least, line.minimum, best.minimum);
    least = min(error, least);
  };
  for (int i = 0; i <= 12; ++i) {
    const Vec reach = half * set1(0.6f + 0.04f * float(i));
    const Line line = {reach * set1(2.0f / levels.highest), middle - reach};
    consider(line);
    consider(fitted<G>(columns, line, levels));
  }
  for (int i = 0; i < kFits; ++i) consider(fitted<G>(columns, best, levels));
  store(scales, best.scale);
  store(minimums, best.minimum);
}

// ---- Codes ----------------------------------------------------------------------------------------------------------

struct Sums {
  QuantizationError total;

  void add(Vec error, Vec square, Vec largest) {
    total.squared_error += reduce_add(error);
    total.squared_sum += reduce_add(square);
    total.largest_error = std::max<double>(total.largest_error, reduce_max(largest));
  }
};

// Codes of `columns` (a multiple of 32) values.
void make_codes(const float* x, int64_t columns, float scale, float minimum, Levels levels, float* codes, Sums& sums) {
  const Vec d = set1(scale), m = set1(minimum), over = set1(std::fabs(scale) < 1.0e-37f ? 0.0f : 1.0f / scale);
  Vec error = zero(), square = zero(), largest = zero();
  for (int64_t c = 0; c < columns; c += W) {
    const Vec value = load(x + c);
    const Vec code = code_of((value - m) * over, levels);
    store(codes + c, code);
    const Vec rest = value - fma(d, code, m);
    error = fma(rest, rest, error);
    square = fma(value, value, square);
    largest = largest_of(abs(rest), largest);
  }
  sums.add(error, square, largest);
}

// codes [groups of 32] as bytes with column j low and column j + 16 high.
void pack_nibbles(const float* codes, int64_t columns, int offset, uint8_t* out) {
  for (int64_t g = 0; g < columns; g += kGroup, out += 16) {
    for (int j = 0; j < 16; ++j) {
      const int low = int(codes[g + j]) + offset, high = int(codes[g + j + 16]) + offset;
      out[j] = uint8_t(low | high << 4);
    }
  }
}

void pack_bytes(const float* codes, int64_t columns, uint8_t* out) {
  for (int64_t c = 0; c < columns; ++c) out[c] = uint8_t(int8_t(codes[c]));
}

// Whether every value is a number that an f16 scale of a hundredth of it can follow.
bool all_fit(const float* x, int64_t count) {
  float largest = 0;
  bool ordered = true;
  for (int64_t i = 0; i < count; ++i) {
    ordered &= x[i] == x[i];
    largest = std::max(largest, std::fabs(x[i]));
  }
  return ordered && largest <= kLargestHalf;
}

constexpr Levels kSignedByte = {-127, 127}, kSignedNibble = {-8, 7}, kNibble = {0, 15};
constexpr Tried kTriedBytes = {119, 1, 13}, kTriedNibbles = {6.4f, 0.3f, 16};

// `rows` rows of `cols` values each, one behind the other.
template <int G, bool Minimum, bool Bytes>
void quantize_groups(const float* x, int64_t rows, int64_t cols, const QuantizedRows& to, int64_t row, Sums& sums) {
  constexpr Levels levels = Bytes ? kSignedByte : Minimum ? kNibble : kSignedNibble;
  const int64_t in_row = cols / G, groups = rows * in_row;
  for (int64_t first = 0; first < groups; first += W) {
    const int64_t count = std::min<int64_t>(W, groups - first);
    float scales[W], minimums[W] = {};
    if constexpr (Minimum) {
      search_lines<G>(x + first * G, count, levels, scales, minimums);
    } else {
      search_scales<G>(x + first * G, count, levels, Bytes ? kTriedBytes : kTriedNibbles, !Bytes, scales);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t of_row = row + (first + i) / in_row, g = (first + i) % in_row;
      const uint16_t scale = to_half(scales[i]), minimum = to_half(minimums[i]);
      alignas(64) float codes[G];
      make_codes(x + (first + i) * G, G, from_half(scale), from_half(minimum), levels, codes, sums);
      uint8_t* out = to.plane[0] + of_row * to.row_pitch[0];
      if constexpr (Bytes) {
        pack_bytes(codes, G, out + g * G);
      } else {
        pack_nibbles(codes, G, Minimum ? 0 : 8, out + g * (G / 2));
      }
      std::memcpy(to.plane[1] + of_row * to.row_pitch[1] + g * 2, &scale, 2);
      if constexpr (Minimum) std::memcpy(to.plane[2] + of_row * to.row_pitch[2] + g * 2, &minimum, 2);
    }
  }
}

// A row's largest values stay whole unless cutting them off lowers the squared error by this factor: they often meet
// the largest activations, and the luck of a few roundings is not worth an error there.
constexpr float kWorthCutting = 0.9f;

// One row with one scale, which may leave the largest values cut off.
void quantize_row(const float* x, int64_t cols, const QuantizedRows& to, int64_t row, float* codes, Sums& sums) {
  Vec extreme = zero();
  for (int64_t c = 0; c < cols; c += W) extreme = max(abs(load(x + c)), extreme);
  const float largest = reduce_max(extreme);
  float best = 0, least = INFINITY;
  const auto consider = [&](float scale) {
    const Vec d = set1(scale), over = set1(std::fabs(scale) < 1.0e-37f ? 0.0f : 1.0f / scale);
    Vec error = zero(), dot = zero(), squares = zero();
    for (int64_t c = 0; c < cols; c += W) {
      const Vec value = load(x + c);
      const Vec code = code_of(value * over, kSignedByte);
      const Vec rest = value - d * code;
      error = fma(rest, rest, error);
      dot = fma(code, value, dot);
      squares = fma(code, code, squares);
    }
    if (const float of_row = reduce_add(error); of_row < least) {
      least = of_row;
      best = scale;
    }
    const float all = reduce_add(squares);
    return all > 0 ? reduce_add(dot) / all : 0.0f;
  };
  const float whole = largest / 127;
  consider(whole);
  const float whole_error = least;
  for (int i = 4; i < 20; ++i) consider(whole * (float(i) / 20));
  const float coarse = best;
  for (int i = -5; i <= 5; ++i) consider(coarse + whole * (float(i) / 100));
  for (int i = 0; i < kFits; ++i) consider(consider(best));
  if (least > kWorthCutting * whole_error) best = whole;
  make_codes(x, cols, best, 0, kSignedByte, codes, sums);
  pack_bytes(codes, cols, to.plane[0] + row * to.row_pitch[0]);
  std::memcpy(to.plane[1] + row * to.row_pitch[1], &best, 4);
}

void quantize_rows(const float* x, int64_t rows, int64_t cols, const QuantizedRows& to, int64_t row, float* codes,
                   Sums& sums) {
  switch (to.format) {
    case Format::Q8_0:
      return quantize_groups<32, false, true>(x, rows, cols, to, row, sums);
    case Format::Q4_0:
      return quantize_groups<32, false, false>(x, rows, cols, to, row, sums);
    case Format::Q4_1:
      return quantize_groups<32, true, false>(x, rows, cols, to, row, sums);
    case Format::I4_G64:
      return quantize_groups<64, false, false>(x, rows, cols, to, row, sums);
    case Format::I4_G128:
      return quantize_groups<128, false, false>(x, rows, cols, to, row, sums);
    default:  // I8_ROW
      for (int64_t r = 0; r < rows; ++r) quantize_row(x + r * cols, cols, to, row + r, codes, sums);
  }
}

QuantizationError quantize(const WeightView& source, int64_t row, int64_t rows, const QuantizedRows& to) {
  const int64_t cols = source.cols, at_once = std::max<int64_t>(1, kBufferFloats / cols);
  std::vector<float> values(size_t(at_once * cols)), codes(size_t(to.format == Format::I8_ROW ? cols : 0));
  Sums sums;
  for (int64_t r = 0; r < rows && sums.total.fits; r += at_once) {
    const int64_t count = std::min(at_once, rows - r);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t col = 0; col < cols; col += kGemmCols) {
        const int64_t width = std::min<int64_t>(kGemmCols, cols - col);
        dequantize(source, row + r + i, col, width, values.data() + i * cols + col);
      }
    }
    sums.total.fits = all_fit(values.data(), count * cols);
    if (sums.total.fits) quantize_rows(values.data(), count, cols, to, r, codes.data(), sums);
  }
  return sums.total;
}

}  // namespace

extern const QuantizeKernels quantize_kernels;
const QuantizeKernels quantize_kernels = {.quantize = quantize};

}  // namespace ete::ETE_ISA

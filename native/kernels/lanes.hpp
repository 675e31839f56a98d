// What the linear kernels do across lanes: sums, transposes of W x W squares, loads that stop at a row's end.
#pragma once
#include <algorithm>

#include "simd.hpp"

#define ETE_UNROLL _Pragma("GCC unroll 32")

namespace ete::ETE_ISA {

#if defined(ETE_ISA_avx512) || defined(ETE_ISA_avx2)

inline float reduce_add(__m256 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// Rows of r become columns.
inline void transpose8(__m256 (&r)[8]) {
  __m256 t[8];
  ETE_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  ETE_UNROLL
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  ETE_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  ETE_UNROLL
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

#endif

#if defined(ETE_ISA_avx512)

inline float reduce_add(Vec a) {
  return reduce_add(_mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)));
}

inline void transpose(Vec (&rows)[W]) {
  __m512 t[16];
  __m512 r[16];
  ETE_UNROLL
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
    t[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
  }
  ETE_UNROLL
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  // r[4 i + j] holds, in 128-bit lane l, column 4 l + j of rows 4 i .. 4 i + 3.
  ETE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const __m512 low02 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
    const __m512 low13 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
    const __m512 high02 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    const __m512 high13 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
    rows[j].v = _mm512_shuffle_f32x4(low02, high02, 0x88);
    rows[4 + j].v = _mm512_shuffle_f32x4(low13, high13, 0x88);
    rows[8 + j].v = _mm512_shuffle_f32x4(low02, high02, 0xdd);
    rows[12 + j].v = _mm512_shuffle_f32x4(low13, high13, 0xdd);
  }
}

#elif defined(ETE_ISA_avx2)

inline float reduce_add(Vec a) { return reduce_add(a.v); }

inline void transpose(Vec (&rows)[W]) {
  __m256 r[8];
  ETE_UNROLL
  for (int i = 0; i < 8; ++i) r[i] = rows[i].v;
  transpose8(r);
  ETE_UNROLL
  for (int i = 0; i < 8; ++i) rows[i].v = r[i];
}

#else

inline float reduce_add(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }

inline void transpose(Vec (&rows)[W]) {
  const Vec r[W] = {rows[0], rows[1], rows[2], rows[3]};
  for (int i = 0; i < W; ++i) rows[i].v = Lanes{r[0].v[i], r[1].v[i], r[2].v[i], r[3].v[i]};
}

#endif

// reduce_add of N vectors at once (N even, at most 16), with the very same additions. Two vectors are folded into one
// at every level, vectors 2 i and 2 i + 1 first, and every lane of the last one is a sum.
#if defined(ETE_ISA_avx512) || defined(ETE_ISA_avx2)
#if defined(ETE_ISA_avx512)
constexpr int kFolds = 4;
template <int Level>
inline Vec fold(Vec x, Vec y) {
  if constexpr (Level == 0) {  // [x's halves added, y's halves added]
    return {_mm512_add_ps(_mm512_shuffle_f32x4(x.v, y.v, 0x44), _mm512_shuffle_f32x4(x.v, y.v, 0xee))};
  } else if constexpr (Level == 1) {  // quarters likewise
    return {_mm512_add_ps(_mm512_shuffle_f32x4(x.v, y.v, 0x88), _mm512_shuffle_f32x4(x.v, y.v, 0xdd))};
  } else if constexpr (Level == 2) {
    return {_mm512_add_ps(_mm512_shuffle_ps(x.v, y.v, 0x44), _mm512_shuffle_ps(x.v, y.v, 0xee))};
  } else {
    return {_mm512_add_ps(_mm512_shuffle_ps(x.v, y.v, 0x88), _mm512_shuffle_ps(x.v, y.v, 0xdd))};
  }
}
#else
constexpr int kFolds = 3;
template <int Level>
inline Vec fold(Vec x, Vec y) {
  if constexpr (Level == 0) {
    return {_mm256_add_ps(_mm256_permute2f128_ps(x.v, y.v, 0x20), _mm256_permute2f128_ps(x.v, y.v, 0x31))};
  } else if constexpr (Level == 1) {
    return {_mm256_add_ps(_mm256_shuffle_ps(x.v, y.v, 0x44), _mm256_shuffle_ps(x.v, y.v, 0xee))};
  } else {
    return {_mm256_add_ps(_mm256_shuffle_ps(x.v, y.v, 0x88), _mm256_shuffle_ps(x.v, y.v, 0xdd))};
  }
}
#endif

// In which lane of the last vector the sum of vector i of `count` (a power of two) is.
constexpr int sum_lane(int i, int count) {
  constexpr int kStep[4] = {W / 4, W / 2, 1, 2};  // where a level puts its second vector
  constexpr int kSmallStep[3] = {W / 2, 1, 2};
  int lane = 0;
  int place = i / 2 + i % 2 * (count / 2);
  for (int level = 0, n = count; n > 1; ++level, n /= 2) {
    if (place >= n / 2) {
      lane += kFolds == 4 ? kStep[level] : kSmallStep[level];
      place -= n / 2;
    }
  }
  return lane;
}

template <int Level, int N>
__attribute__((always_inline)) inline Vec fold_all(const Vec (&v)[N]) {
  if constexpr (Level == kFolds) {
    return v[0];
  } else {
    constexpr int kHalf = N > 1 ? N / 2 : 1;
    Vec next[kHalf];
    ETE_UNROLL
    for (int i = 0; i < kHalf; ++i) next[i] = fold<Level>(v[i], v[N > 1 ? i + kHalf : i]);
    return fold_all<Level + 1>(next);
  }
}

// `more(i, folded)` may change what vectors 2 i and 2 i + 1 are after their first folding: the first lies in the lower
// half, the second in the upper one.
template <int N, typename More>
__attribute__((always_inline)) inline void reduce_adds(const Vec (&v)[N], const More& more, float* out) {
  if constexpr (N > W) {
    Vec part[8];
    ETE_UNROLL
    for (int i = 0; i < 8; ++i) part[i] = v[i];
    reduce_adds(part, more, out);
    Vec rest[N - 8];
    ETE_UNROLL
    for (int i = 8; i < N; ++i) rest[i - 8] = v[i];
    reduce_adds(rest, [&](int i, Vec folded) { return more(i + 4, folded); }, out + 8);
  } else {
    constexpr int kCount = N <= 2 ? 2 : N <= 4 ? 4 : N <= 8 ? 8 : 16;
    Vec halves[kCount / 2];
    ETE_UNROLL
    for (int i = 0; i < kCount / 2; ++i) {
      halves[i] = i < N / 2 ? more(i, fold<0>(v[2 * i], v[2 * i + 1])) : halves[0];
    }
    alignas(64) float lanes[W];
    store(lanes, fold_all<1>(halves));
    ETE_UNROLL
    for (int i = 0; i < N; ++i) out[i] = lanes[sum_lane(i, kCount)];
  }
}
#else
template <int N, typename More>
inline void reduce_adds(const Vec (&v)[N], const More&, float* out) {
  for (int i = 0; i < N; ++i) out[i] = reduce_add(v[i]);
}
#endif

// The first n of the W lanes (0 < n < W; up_to: or more), zeros in the others; reads and writes nothing beyond them.
#if defined(ETE_ISA_avx512)
inline Vec load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
inline Vec load_first_f16(const uint16_t* p, int64_t n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p))};
}
inline Vec load_up_to_f16(const uint16_t* p, int64_t n) {
  return {
      _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(__mmask16(_bzhi_u32(0xffff, unsigned(std::min<int64_t>(n, W)))), p))};
}
inline void store_first(float* p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.v); }
#else
inline Vec load_first(const float* p, int64_t n) {
  float padded[W] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}
inline Vec load_first_f16(const uint16_t* p, int64_t n) {
  uint16_t padded[W] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
  return load_f16(padded);
}
inline Vec load_up_to_f16(const uint16_t* p, int64_t n) { return n >= W ? load_f16(p) : load_first_f16(p, n); }
inline void store_first(float* p, Vec a, int64_t n) {
  float padded[W];
  store(padded, a);
  for (int64_t i = 0; i < n; ++i) p[i] = padded[i];
}
#endif

}  // namespace ete::ETE_ISA

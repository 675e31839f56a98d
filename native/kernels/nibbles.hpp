// 4-bit codes as floats without widening them, for the GEMV.
//
// A vector of W 32-bit words holds the codes of W / 4 groups, eight codes a word. Code i of every word becomes a float
// where it lies: masked, and put below the exponent of 2^(23 - position) it reads 2^(23 - position) + code; taking that
// power and the zero point away is exact. Neither widening nor, for most codes, shifting is needed, and W / 4 groups
// share one multiplication by their scales. The activations are brought into the same order once per op
// (order_nibbles).
#pragma once
#include "kernels/dequant.hpp"

namespace ete::ETE_ISA {

constexpr int kWordGroups = W / 4;
constexpr int kWordCols = 8 * W;

#if defined(ETE_ISA_avx512)

struct Words {
  __m512i v;
};
inline Words load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Words load_first_words(const uint8_t* p, int n) {
  return {_mm512_maskz_loadu_epi32(__mmask16((1u << n) - 1), p)};
}
inline Words shift_right_16(Words a) { return {_mm512_srli_epi32(a.v, 16)}; }

// Each of kWordGroups numbers four times.
inline Vec spread_scales(const float* s) {
  const __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return {_mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_loadu_ps(s)))};
}

template <int Position, int Zero>
inline Vec code_at(Words words) {
  if constexpr (Position == 0) {
    // The permutation looks at the low four bits of each index only.
    const __m512 table = _mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                       _mm512_set1_ps(float(Zero)));
    return {_mm512_permutexvar_ps(words.v, table)};
  } else {
    const __m512i mask = _mm512_set1_epi32(15 << Position);
    const __m512i exponent = _mm512_set1_epi32((127 + 23 - Position) << 23);
    const __m512 value = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(words.v, mask, exponent, 0xea));
    return {_mm512_sub_ps(value, _mm512_set1_ps(float((1 << (23 - Position)) + Zero)))};
  }
}

#elif defined(ETE_ISA_avx2)

struct Words {
  __m256i v;
};
inline Words load_words(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline Words load_first_words(const uint8_t* p, int n) {
  alignas(32) uint8_t padded[32] = {};
  std::memcpy(padded, p, size_t(n) * 4);
  return load_words(padded);
}
inline Words shift_right_16(Words a) { return {_mm256_srli_epi32(a.v, 16)}; }
inline Vec spread_scales(const float* s) { return {_mm256_set_m128(_mm_broadcast_ss(s + 1), _mm_broadcast_ss(s))}; }

template <int Position, int Zero>
inline Vec code_at(Words words) {
  const __m256i mask = _mm256_set1_epi32(15 << Position);
  const __m256i exponent = _mm256_set1_epi32((127 + 23 - Position) << 23);
  const __m256i bits = _mm256_or_si256(_mm256_and_si256(words.v, mask), exponent);
  return {_mm256_sub_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(float((1 << (23 - Position)) + Zero)))};
}

#else

struct Words {
  WordLanes v;
};
inline Words load_words(const uint8_t* p) {
  Words a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
inline Words load_first_words(const uint8_t* p, int) { return load_words(p); }  // never called: a group fills a vector
inline Words shift_right_16(Words a) { return {a.v >> 16}; }
inline Vec spread_scales(const float* s) { return set1(*s); }

template <int Position, int Zero>
inline Vec code_at(Words words) {
  const Vec value = from_words((words.v & (15u << Position)) | (uint32_t(127 + 23 - Position) << 23));
  return value - set1(float((1 << (23 - Position)) + Zero));
}

#endif

template <int Zero>
inline void codes_of_words(Words words, Vec (&c)[8]) {
  const Words high = shift_right_16(words);
  c[0] = code_at<0, Zero>(words);
  c[1] = code_at<4, Zero>(words);
  c[2] = code_at<8, Zero>(words);
  c[3] = code_at<12, Zero>(words);
  c[4] = code_at<0, Zero>(high);
  c[5] = code_at<4, Zero>(high);
  c[6] = code_at<8, Zero>(high);
  c[7] = code_at<12, Zero>(high);
}

// x in the order of the codes: ordered[vector][code][lane], zeros past the last group up to a whole vector of words.
inline void order_nibbles(const float* x, int64_t groups, float* ordered) {
  for (int64_t g = 0; g < groups; ++g) {
    float* out = ordered + g / kWordGroups * kWordCols + g % kWordGroups * 4;
    for (int byte = 0; byte < 16; ++byte) {
      out[byte % 4 * 2 * W + byte / 4] = x[g * kGroup + byte];
      out[(byte % 4 * 2 + 1) * W + byte / 4] = x[g * kGroup + 16 + byte];
    }
  }
  for (int64_t g = groups; g % kWordGroups; ++g) {
    float* out = ordered + g / kWordGroups * kWordCols + g % kWordGroups * 4;
    for (int code = 0; code < 8; ++code) std::fill_n(out + code * W, 4, 0.0f);
  }
}

}  // namespace ete::ETE_ISA

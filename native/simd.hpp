// One float vector type per instruction set. A kernel includes this file, is compiled once per set, and lives in
// namespace ete::ETE_ISA. `W` is the number of lanes.
//
// max(a, b) and min(a, b) give b when either is NaN; select_less(a, b, x, y) is a < b ? x : y; round_nearest needs
// |a| < 2^22; scale_by_power(a, n) is a * 2^n for an integral n, |n| <= 250.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(ETE_ISA_avx2) || defined(ETE_ISA_avx512)
// GCC 12 warns of the deliberately undefined operand inside its own AVX-512 intrinsics (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace ete::ETE_ISA {

#if defined(ETE_ISA_avx512)

constexpr int W = 16;
struct Vec {
  __m512 v;
};
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float s) { return {_mm512_set1_ps(s)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec copy_sign(Vec a, Vec sign) {
  const __m512i bits = _mm512_ternarylogic_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(sign.v),
                                                 _mm512_set1_epi32(INT32_MIN), 0xd8);
  return {_mm512_castsi512_ps(bits)};
}
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline Vec round_nearest(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline Vec load_bf16(const uint16_t* p) {
  const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
inline Vec load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Rounds to the nearest bf16, ties to even; a NaN stays a quiet NaN.
inline void store_bf16(uint16_t* p, Vec a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i top = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_blend_epi32(is_nan, _mm512_srli_epi32(sum, 16), quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
}

#elif defined(ETE_ISA_avx2)

constexpr int W = 8;
struct Vec {
  __m256 v;
};
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec set1(float s) { return {_mm256_set1_ps(s)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
inline Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Vec copy_sign(Vec a, Vec sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(mask, a.v), _mm256_and_ps(mask, sign.v))};
}
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline Vec round_nearest(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// Two exact steps, so that results below the normal range are rounded once.
inline Vec scale_by_power(Vec a, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n.v);
  const __m256i first = _mm256_srai_epi32(whole, 1);
  const __m256i second = _mm256_sub_epi32(whole, first);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 one = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23));
  const __m256 two = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, one), two)};
}
inline Vec load_bf16(const uint16_t* p) {
  const __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16))};
}
inline Vec load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
// Rounds to the nearest bf16, ties to even; a NaN stays a quiet NaN.
inline void store_bf16(uint16_t* p, Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i top = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), quiet, is_nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

#else

// Vectors as GCC and Clang have them on every processor: with plain arrays the compiler keeps few lanes together.
constexpr int W = 4;
typedef float Lanes __attribute__((vector_size(16)));
typedef uint32_t WordLanes __attribute__((vector_size(16)));
struct Vec {
  Lanes v;
};
inline Vec zero() { return {Lanes{0, 0, 0, 0}}; }
inline Vec set1(float s) { return {Lanes{s, s, s, s}}; }
inline Vec load(const float* p) {
  Vec a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
inline void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof a.v); }
#define ETE_LANES(expression)                        \
  Vec r;                                             \
  for (int i = 0; i < 4; ++i) r.v[i] = (expression); \
  return r
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
// No fused multiply-add is assumed here (a library call per lane would be far slower): one more rounding per step.
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec sqrt(Vec a) { ETE_LANES(__builtin_sqrtf(a.v[i])); }
inline Vec abs(Vec a) { ETE_LANES(__builtin_fabsf(a.v[i])); }
inline Vec copy_sign(Vec a, Vec sign) { ETE_LANES(__builtin_copysignf(a.v[i], sign.v[i])); }
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) { return {a.v < b.v ? x.v : y.v}; }
// Adding 1.5 * 2^23 leaves no bit for a fraction, and the low bits of the sum's word count the integer.
constexpr float kRoundingShift = 12582912.0f;
inline Vec round_nearest(Vec a) { return {(a.v + kRoundingShift) - kRoundingShift}; }
inline float power_of_2(uint32_t n) {
  const uint32_t word = (n + 127) << 23;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
// Two exact steps, so that results below the normal range are rounded once.
inline Vec scale_by_power(Vec a, Vec n) {
  Vec r;
  for (int i = 0; i < 4; ++i) {
    const float shifted = n.v[i] + kRoundingShift;
    uint32_t word;
    std::memcpy(&word, &shifted, 4);
    const int32_t whole = int32_t(word - 0x4b400000u);
    const int32_t first = whole >> 1;
    r.v[i] = a.v[i] * power_of_2(uint32_t(first)) * power_of_2(uint32_t(whole) - uint32_t(first));
  }
  return r;
}
inline float bf16_to_float(uint16_t bits) {
  const uint32_t word = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline float f16_to_float(uint16_t bits) {
  // Exponent and mantissa moved up by 13 and rescaled by 2^112: exact for normals, subnormals and, below, inf and NaN.
  const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 5.192296858534828e33f;  // 2^112
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if ((bits & 0x7c00) == 0x7c00) word = 0x7f800000u | (uint32_t(bits & 0x03ff) << 13);
  word |= uint32_t(bits & 0x8000) << 16;
  std::memcpy(&value, &word, 4);
  return value;
}
template <typename Element>
inline WordLanes widen(const Element* p) {
  typedef Element Narrow __attribute__((vector_size(4 * sizeof(Element))));
  Narrow narrow;
  std::memcpy(&narrow, p, sizeof narrow);
  return __builtin_convertvector(narrow, WordLanes);
}
inline Vec from_words(WordLanes words) {
  Vec a;
  std::memcpy(&a.v, &words, sizeof words);
  return a;
}
inline Vec load_bf16(const uint16_t* p) { return from_words(widen(p) << 16); }
inline Vec load_f16(const uint16_t* p) {
  const WordLanes bits = widen(p);
  const Lanes scaled = from_words((bits & 0x7fff) << 13).v * 5.192296858534828e33f;  // as in f16_to_float
  WordLanes words;
  std::memcpy(&words, &scaled, sizeof words);
  words = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u | ((bits & 0x03ff) << 13) : words;
  return from_words(words | ((bits & 0x8000) << 16));
}
inline Vec load_i8(const int8_t* p) {
  typedef int32_t Whole __attribute__((vector_size(16)));
  const WordLanes words = widen(p);
  Whole whole;
  std::memcpy(&whole, &words, sizeof words);
  return {__builtin_convertvector(whole, Lanes)};
}
// Rounds to the nearest bf16, ties to even; a NaN stays a quiet NaN.
inline uint16_t float_to_bf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  const uint32_t nearest = word + 0x7fff + ((word >> 16) & 1);
  return uint16_t((value != value ? word | 0x400000 : nearest) >> 16);
}
inline void store_bf16(uint16_t* p, Vec a) {
  for (int i = 0; i < 4; ++i) p[i] = float_to_bf16(a.v[i]);
}
#undef ETE_LANES

#endif

}  // namespace ete::ETE_ISA

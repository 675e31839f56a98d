// One float vector type per instruction set. A kernel includes this file, is compiled once per set, and lives in
// namespace ete::ETE_ISA. `W` is the number of lanes.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(ETE_ISA_avx2) || defined(ETE_ISA_avx512)
#include <immintrin.h>
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

#else

constexpr int W = 4;
struct Vec {
  float v[4];
};
inline Vec zero() { return {{0, 0, 0, 0}}; }
inline Vec set1(float s) { return {{s, s, s, s}}; }
inline Vec load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline void store(float* p, Vec a) { std::memcpy(p, a.v, sizeof a.v); }
#define ETE_LANES(expression)                       \
  Vec r;                                            \
  for (int i = 0; i < 4; ++i) r.v[i] = (expression); \
  return r
inline Vec operator+(Vec a, Vec b) { ETE_LANES(a.v[i] + b.v[i]); }
inline Vec operator-(Vec a, Vec b) { ETE_LANES(a.v[i] - b.v[i]); }
inline Vec operator*(Vec a, Vec b) { ETE_LANES(a.v[i] * b.v[i]); }
inline Vec operator/(Vec a, Vec b) { ETE_LANES(a.v[i] / b.v[i]); }
// No fused multiply-add is assumed here (a library call per lane would be far slower): one more rounding per step.
inline Vec fma(Vec a, Vec b, Vec c) { ETE_LANES(a.v[i] * b.v[i] + c.v[i]); }
inline Vec max(Vec a, Vec b) { ETE_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
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
inline Vec load_bf16(const uint16_t* p) { ETE_LANES(bf16_to_float(p[i])); }
inline Vec load_f16(const uint16_t* p) { ETE_LANES(f16_to_float(p[i])); }
inline Vec load_i8(const int8_t* p) { ETE_LANES(float(p[i])); }
#undef ETE_LANES

#endif

}  // namespace ete::ETE_ISA

// KV elements as vectors, and the arithmetic of attention states that both kernels share.
#pragma once
#include <cmath>
#include <limits>

#include "attention.hpp"
#include "kernels/lanes.hpp"
#include "kernels/math.hpp"

namespace ete::ETE_ISA {

constexpr float kNothing = -std::numeric_limits<float>::infinity();  // m of a state that has seen no position

// Eight elements in the low lanes (W >= 8 only): head_dim is a multiple of 8, so this is the only remainder there is.
inline Vec load_kv(const float* p) { return load(p); }
inline Vec load_kv(const uint16_t* p) { return load_bf16(p); }
#if defined(ETE_ISA_avx512)
inline Vec load_kv_eight(const float* p) { return {_mm512_zextps256_ps512(_mm256_loadu_ps(p))}; }
inline Vec load_kv_eight(const uint16_t* p) {
  const __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_castsi512_ps(_mm512_zextsi256_si512(_mm256_slli_epi32(w, 16)))};
}
inline void store_eight(float* p, Vec a) { _mm256_storeu_ps(p, _mm512_castps512_ps256(a.v)); }
#else
inline Vec load_kv_eight(const float* p) { return load(p); }
inline Vec load_kv_eight(const uint16_t* p) { return load_bf16(p); }
inline void store_eight(float* p, Vec a) { store(p, a); }
#endif

// What is subtracted from scores: m, or 0 where m is -inf, so that e^(s - m) is 0 and not NaN.
inline Vec reference_of(Vec m) { return select_less(m, set1(-3.0e38f), zero(), m); }

// Factors by which two states are multiplied when they merge.
struct MergeFactors {
  Vec m;
  Vec running;
  Vec state;
};
inline MergeFactors merge_factors(Vec running_m, Vec state_m) {
  const Vec m = max(running_m, state_m);
  const Vec reference = reference_of(m);
  return {m, exp(running_m - reference), exp(state_m - reference)};
}
inline Vec merged(const MergeFactors& factors, Vec running, Vec state) {
  return fma(running, factors.running, state * factors.state);
}
// acc / l; adding +0 gives zeros one sign, whichever neutral states were merged or skipped.
inline Vec finished(Vec acc, Vec l) { return acc / l + zero(); }

inline Vec capped(Vec score, float softcap_value) {
  return softcap_value > 0 ? softcap(score, set1(softcap_value)) : score;
}

}  // namespace ete::ETE_ISA

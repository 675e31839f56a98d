// exp, tanh and what is made of them, on vectors. Within 2 ulp of the real function over all floats (exp, tanh);
// a NaN gives a NaN. No table, no fast-math.
#pragma once
#include "simd.hpp"

namespace ete::ETE_ISA {

// e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln 2 / 2; ln 2 in two parts whose first has trailing zeros, so that
// n * first is exact without a fused multiply (Cody and Waite 1980). The polynomial is a minimax fit of
// (e^r - 1 - r) / r^2: relative error 3e-9.
inline Vec exp(Vec x) {
  // Below the first bound the result rounds to 0, above the second it is infinite. The order of operands keeps NaN.
  x = min(set1(89.0f), max(set1(-104.0f), x));
  const Vec n = round_nearest(x * set1(1.44269504088896341f));
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(0.001381459878757596f);
  p = fma(p, r, set1(0.008368716575205326f));
  p = fma(p, r, set1(0.04166838899254799f));
  p = fma(p, r, set1(0.1666652113199234f));
  p = fma(p, r, set1(0.4999999403953552f));
  return scale_by_power(fma(p, r * r, r) + set1(1.0f), n);
}

// Near 0 an odd polynomial (minimax, relative error 4e-9), elsewhere 1 - 2 / (e^2|x| + 1).
inline Vec tanh(Vec x) {
  const Vec size = abs(x);
  const Vec square = x * x;
  Vec p = set1(-0.005704986862838268f);
  p = fma(p, square, set1(0.0206390880048275f));
  p = fma(p, square, set1(-0.05373971536755562f));
  p = fma(p, square, set1(0.13331441581249237f));
  p = fma(p, square, set1(-0.3333328068256378f));
  const Vec near = fma(p * square, size, size);
  const Vec far = set1(1.0f) - set1(2.0f) / (exp(size + size) + set1(1.0f));
  return copy_sign(select_less(size, set1(0.625f), near, far), x);
}

inline Vec silu(Vec x) { return x / (set1(1.0f) + exp(zero() - x)); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), not the erf form.
inline Vec gelu_tanh(Vec x) {
  const Vec inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

// cap * tanh(x / cap).
inline Vec softcap(Vec x, Vec cap) { return cap * tanh(x / cap); }

}  // namespace ete::ETE_ISA

// Codes as floats without widening them, for the GEMV.
//
// A vector of W 32-bit words holds the codes of W / 4 groups of 32 columns, four words a group. A code becomes a float
// where it lies: masked, and put below the exponent of 2^(23 - position) it reads 2^(23 - position) + code; taking that
// power and the zero point away is exact. Neither widening nor, for most codes, shifting is needed, and W / 4 groups
// share one multiplication by their scales. Two shapes:
//   4-bit codes: one vector of words, eight codes a word;
//   5, 6 and 8 bits: two vectors of words, four codes of a byte each: the first halves of the groups, then the second.
// Code i is then, in lane 4 g + j, column 4 j + i / 2 of group g for an even i and the column 16 further for an odd
// one; the activations are brought into the same order once per op (order_codes).
#pragma once
#include <type_traits>

#include "kernels/dequant.hpp"
#include "linear.hpp"

namespace ete::ETE_ISA {

constexpr int kWordGroups = W / 4;
constexpr int kCodes = 8;  // codes of a group that share a lane

#if defined(ETE_ISA_avx512)

struct Words {
  __m512i v;
};
inline Words shift_right_16(Words a) { return {_mm512_srli_epi32(a.v, 16)}; }

template <int Position, int Bits, int Flip, int Zero, bool>
inline Vec code_at(Words words) {
  if constexpr (Position == 0 && Bits == 4) {
    // The permutation looks at the low four bits of each index only.
    const __m512 table = _mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                       _mm512_set1_ps(float(Zero)));
    return {_mm512_permutexvar_ps(words.v, table)};
  } else {
    const __m512i mask = _mm512_set1_epi32(((1 << Bits) - 1) << Position);
    const __m512i exponent = _mm512_set1_epi32((127 + 23 - Position) << 23 | Flip << Position);
    const __m512 value = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(words.v, mask, exponent, 0x6a));
    return {_mm512_sub_ps(value, _mm512_set1_ps(float((1 << (23 - Position)) + Zero)))};
  }
}
inline Words load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Words load_words(const uint8_t* p, int groups) {
  return {_mm512_maskz_loadu_epi32(__mmask16((1u << (4 * groups)) - 1), p)};
}
// The first half of each, of one or two groups.
inline Words load_words(const uint8_t* first, const uint8_t* second, int groups) {
  const __mmask8 mask = __mmask8((1u << (4 * groups)) - 1);
  const __m512i low = _mm512_castsi256_si512(_mm256_maskz_loadu_epi32(mask, first));
  return {_mm512_inserti64x4(low, _mm256_maskz_loadu_epi32(mask, second), 1)};
}

// The bytes of two groups in column order.
struct GroupPair {
  __m512i v;
};
// The first sixteen bytes of all four groups, and the second.
inline void part_groups(GroupPair first, GroupPair second, Words& a, Words& b) {
  a.v = _mm512_shuffle_i32x4(first.v, second.v, 0x88);
  b.v = _mm512_shuffle_i32x4(first.v, second.v, 0xdd);
}
// Each of kWordGroups numbers, Sub apart, four times.
template <int Sub>
inline Vec spread_scales(const float* s) {
  constexpr int k = Sub;
  const __m512i index =
      _mm512_setr_epi32(0, 0, 0, 0, k, k, k, k, 2 * k, 2 * k, 2 * k, 2 * k, 3 * k, 3 * k, 3 * k, 3 * k);
  const __m512 numbers = k == 1 ? _mm512_castps128_ps512(_mm_loadu_ps(s)) : _mm512_castps256_ps512(_mm256_loadu_ps(s));
  return {_mm512_permutexvar_ps(index, numbers)};
}

// Two numbers of each.
inline Vec spread_scales(const float* first, const float* second) {
  const __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __m128d low = _mm_load_sd(reinterpret_cast<const double*>(first));
  const __m128d both = _mm_loadh_pd(low, reinterpret_cast<const double*>(second));
  return {_mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_castpd_ps(both)))};
}

#elif defined(ETE_ISA_avx2)

struct Words {
  __m256i v;
};
inline Words shift_right_16(Words a) { return {_mm256_srli_epi32(a.v, 16)}; }

// Shifted: brought to position 0 first, where all codes share three constants. Worth an instruction more where
// registers are short.
template <int Position, int Bits, int Flip, int Zero, bool Shifted>
inline Vec code_at(Words words) {
  if constexpr (Shifted && Position != 0) {
    return code_at<0, Bits, Flip, Zero, true>(Words{_mm256_srli_epi32(words.v, Position)});
  }
  const __m256i mask = _mm256_set1_epi32(((1 << Bits) - 1) << Position);
  const __m256i exponent = _mm256_set1_epi32((127 + 23 - Position) << 23 | Flip << Position);
  const __m256i bits = _mm256_xor_si256(_mm256_and_si256(words.v, mask), exponent);
  return {_mm256_sub_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(float((1 << (23 - Position)) + Zero)))};
}

inline Words load_words(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline Words load_words(const uint8_t* p, int groups) {
  alignas(32) uint8_t padded[32] = {};
  std::memcpy(padded, p, size_t(groups) * 16);
  return load_words(padded);
}

// The bytes of a group in column order.
struct Group {
  __m256i v;
};
inline void part_groups(Group first, Group second, Words& a, Words& b) {
  a.v = _mm256_permute2x128_si256(first.v, second.v, 0x20);
  b.v = _mm256_permute2x128_si256(first.v, second.v, 0x31);
}

template <int Sub>
inline Vec spread_scales(const float* s) {
  return {_mm256_set_m128(_mm_broadcast_ss(s + Sub), _mm_broadcast_ss(s))};
}

#else

struct Words {
  WordLanes v;
};
inline Words shift_right_16(Words a) { return {a.v >> 16}; }

template <int Position, int Bits, int Flip, int Zero, bool>
inline Vec code_at(Words words) {
  const uint32_t exponent = uint32_t(127 + 23 - Position) << 23 | uint32_t(Flip) << Position;
  const Vec value = from_words((words.v & (((1u << Bits) - 1) << Position)) ^ exponent);
  return value - set1(float((1 << (23 - Position)) + Zero));
}

inline Words load_words(const uint8_t* p) {
  Words a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
inline Words load_words(const uint8_t* p, int) { return load_words(p); }  // a group fills a vector

template <int Sub>
inline Vec spread_scales(const float* s) {
  return set1(*s);
}

#endif

// The value, in a register: without it the compiler loads it again for every use.
__attribute__((always_inline)) inline Vec kept(Vec a) {
#if defined(ETE_ISA_avx512)
  asm("" : "+v"(a.v));
#elif defined(ETE_ISA_avx2)
  asm("" : "+x"(a.v));
#endif
  return a;
}

// ---- 4-bit codes ----------------------------------------------------------------------------------------------------

template <int Zero>
struct Nibbles {
  Words low;
  static constexpr int kCount = kCodes;
  static constexpr int kGroups = kWordGroups;
  static constexpr int column(int i) { return i; }  // which code of the order of order_codes comes i-th

  template <int I, bool Shifted>
  Vec code() const {
    return code_at<I % 4 * 4, 4, 0, Zero, Shifted>(I < 4 ? low : shift_right_16(low));
  }
};

// ---- Codes in bytes -------------------------------------------------------------------------------------------------

template <int Flip, int Zero>
struct Bytes {
  Words a, b;
  static constexpr int kCount = kCodes;
  static constexpr int kGroups = kWordGroups;
  static constexpr int column(int i) { return i < 4 ? 2 * i : 2 * (i - 4) + 1; }

  template <int I, bool Shifted>
  Vec code() const {
    const Words half = I < 4 ? a : b;
    return code_at<I % 2 * 8, 8, Flip, Zero, Shifted>(I % 4 < 2 ? half : shift_right_16(half));
  }
};

template <Format F>
constexpr bool kSignedBytes = F == Format::Q8_0 || F == Format::I8_ROW;

// Code bits of a format whose codes become bytes, where they are not bytes already.
template <Format F>
constexpr int kCodeBits = F == Format::Q6_K ? 6
                          : kSignedBytes<F> ? 8
                                            : 5;

// What is taken off a nibble or byte to have the code: the zero point and centre, or what made a signed code positive.
template <Format F>
constexpr int code_zero() {
  if constexpr (kSignedBytes<F>) {
    return 128;
  } else if constexpr (F == Format::Q6_K) {
    return 32;
  } else {
    return Decoder<F>::kZero + Decoder<F>::kCentre;
  }
}

// Codes of up to `groups` groups from `group` on as bytes in column order, zeros after them.
#if defined(ETE_ISA_avx512)
template <Format F>
inline GroupPair byte_codes(const RowPlanes& row, int64_t group, int groups) {
  if constexpr (kSignedBytes<F>) {
    const uint8_t* p = row.plane[0] + group * 32;
    return {groups >= 2 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi32(groups ? 0xff : 0, p)};
  } else {
    const uint8_t* p = row.plane[0] + group * 16;
    const __m256i pair = groups >= 2 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                                     : _mm256_maskz_loadu_epi32(groups ? 0xf : 0, p);
    const __m512i twice =
        _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(pair));
    const __m512i nibbles = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
    __m512i codes = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
    constexpr int kHigh = kCodeBits<F> - 4;
    uint32_t high[2 * kHigh] = {};
    if (groups) std::memcpy(high, row.plane[1] + group * 4 * kHigh, groups >= 2 ? sizeof high : sizeof high / 2);
    ETE_UNROLL
    for (int b = 0; b < kHigh; ++b) {
      const __mmask64 set = uint64_t(high[kHigh + b]) << 32 | high[b];
      codes = _mm512_mask_add_epi8(codes, set, codes, _mm512_set1_epi8(int8_t(16 << b)));
    }
    return {codes};
  }
}
#elif defined(ETE_ISA_avx2)
template <Format F>
inline Group byte_codes(const RowPlanes& row, int64_t group, int groups) {
  if (groups <= 0) return {_mm256_setzero_si256()};
  if constexpr (kSignedBytes<F>) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row.plane[0] + group * 32))};
  } else {
    constexpr int kHigh = kCodeBits<F> - 4;
    return {packed_codes<kCodeBits<F>>(row.plane[0] + group * 16, row.plane[1] + group * 4 * kHigh)};
  }
}
#else
template <Format F>
inline void byte_codes(const RowPlanes& row, int64_t group, Words& a, Words& b) {
  if constexpr (kSignedBytes<F>) {
    a = load_words(row.plane[0] + group * 32);
    b = load_words(row.plane[0] + group * 32 + 16);
  } else {
    const Words words = load_words(row.plane[0] + group * 16);
    a.v = words.v & 0x0f0f0f0fu;
    b.v = words.v >> 4 & 0x0f0f0f0fu;
    constexpr int kHigh = kCodeBits<F> - 4;
    for (int bit = 0; bit < kHigh; ++bit) {
      uint32_t high;
      std::memcpy(&high, row.plane[1] + (group * kHigh + bit) * 4, 4);
      // Four bits become the low bits of four bytes: each product has one of them at 0, 8, 16 or 24, the rest
      // elsewhere.
      const WordLanes low = WordLanes{high, high >> 4, high >> 8, high >> 12} & 15;
      const WordLanes top = WordLanes{high >> 16, high >> 20, high >> 24, high >> 28} & 15;
      a.v |= (low * 0x00204081u & 0x01010101u) << (4 + bit);
      b.v |= (top * 0x00204081u & 0x01010101u) << (4 + bit);
    }
  }
}
#endif

// ---- Every format ---------------------------------------------------------------------------------------------------

#if defined(ETE_ISA_avx2)
// Signed bytes of one group in column order: here widening costs less than masking.
struct Columns {
  const int8_t* p;
  static constexpr int kCount = kParts;
  static constexpr int kGroups = 1;
  static constexpr int column(int i) { return i; }

  template <int I, bool>
  Vec code() const {
    return load_i8(p + I * W);
  }
};
template <Format F>
constexpr bool kColumns = kSignedBytes<F>;
#else
template <Format F>
constexpr bool kColumns = false;
struct Columns;
#endif

// Whether the GEMV of a format meets the activations in column order.
constexpr bool takes_columns(Format format) {
#if defined(ETE_ISA_avx2)
  if (format == Format::Q8_0 || format == Format::I8_ROW) return true;
#endif
  return is_float_format(format);
}

template <Format F>
using Codes = std::conditional_t<
    kColumns<F>, Columns,
    std::conditional_t<is_nibble_format(F), Nibbles<code_zero<F>()>, Bytes<kSignedBytes<F> ? 128 : 0, code_zero<F>()>>>;

// The codes of up to Codes::kGroups groups (at least one) from `group` on, ready to be taken one by one. Absent groups
// have some code: their activations are zero.
template <Format F>
inline Codes<F> codes_of(const RowPlanes& row, int64_t group, int groups) {
  Codes<F> codes;
  if constexpr (kColumns<F>) {
    codes.p = reinterpret_cast<const int8_t*>(row.plane[0]) + group * kGroup;
  } else if constexpr (is_nibble_format(F)) {
    const uint8_t* p = row.plane[0] + group * 16;
    codes.low = groups == kWordGroups ? load_words(p) : load_words(p, groups);
  } else {
#if defined(ETE_ISA_avx512)
    part_groups(byte_codes<F>(row, group, groups), byte_codes<F>(row, group + 2, groups - 2), codes.a, codes.b);
#elif defined(ETE_ISA_avx2)
    part_groups(byte_codes<F>(row, group, groups), byte_codes<F>(row, group + 1, groups - 1), codes.a, codes.b);
#else
    (void)groups;
    byte_codes<F>(row, group, codes.a, codes.b);
#endif
  }
  return codes;
}

#if defined(ETE_ISA_avx512)
// Those of one or two groups of two rows: the first row's in the lower halves of the vectors.
template <Format F>
inline Codes<F> codes_of(const RowPlanes& first, const RowPlanes& second, int64_t group, int groups) {
  Codes<F> codes;
  if constexpr (is_nibble_format(F)) {
    codes.low = load_words(first.plane[0] + group * 16, second.plane[0] + group * 16, groups);
  } else {
    part_groups(byte_codes<F>(first, group, groups), byte_codes<F>(second, group, groups), codes.a, codes.b);
  }
  return codes;
}
#endif

// ---- Activations ----------------------------------------------------------------------------------------------------

// Four numbers of each of kWordGroups groups, from p on and 32 apart.
inline Vec load_quads(const float* p) {
#if defined(ETE_ISA_avx512)
  const __m256 low = _mm256_set_m128(_mm_loadu_ps(p + kGroup), _mm_loadu_ps(p));
  const __m256 high = _mm256_set_m128(_mm_loadu_ps(p + 3 * kGroup), _mm_loadu_ps(p + 2 * kGroup));
  return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
#elif defined(ETE_ISA_avx2)
  return {_mm256_set_m128(_mm_loadu_ps(p + kGroup), _mm_loadu_ps(p))};
#else
  return load(p);
#endif
}

// Rows of every 4 x 4 square of neighbouring lanes become columns.
inline void transpose_quads(Vec (&r)[4]) {
#if defined(ETE_ISA_avx512)
  const __m512 a = _mm512_unpacklo_ps(r[0].v, r[1].v), b = _mm512_unpackhi_ps(r[0].v, r[1].v);
  const __m512 c = _mm512_unpacklo_ps(r[2].v, r[3].v), d = _mm512_unpackhi_ps(r[2].v, r[3].v);
  r[0].v = _mm512_shuffle_ps(a, c, 0x44);
  r[1].v = _mm512_shuffle_ps(a, c, 0xee);
  r[2].v = _mm512_shuffle_ps(b, d, 0x44);
  r[3].v = _mm512_shuffle_ps(b, d, 0xee);
#elif defined(ETE_ISA_avx2)
  const __m256 a = _mm256_unpacklo_ps(r[0].v, r[1].v), b = _mm256_unpackhi_ps(r[0].v, r[1].v);
  const __m256 c = _mm256_unpacklo_ps(r[2].v, r[3].v), d = _mm256_unpackhi_ps(r[2].v, r[3].v);
  r[0].v = _mm256_shuffle_ps(a, c, 0x44);
  r[1].v = _mm256_shuffle_ps(a, c, 0xee);
  r[2].v = _mm256_shuffle_ps(b, d, 0x44);
  r[3].v = _mm256_shuffle_ps(b, d, 0xee);
#else
  transpose(r);
#endif
}

// Row t of x in the order of the codes: ordered[block of kWordGroups groups][code][t of width][lane], zeros past the
// last group. Where only one or two groups are left for a vector of sixteen lanes, both its halves have them.
inline void order_codes(const float* x, int64_t groups, int t, int width, float* ordered) {
  for (int64_t g = 0; g < groups; g += kWordGroups) {
    const int64_t count = std::min<int64_t>(kWordGroups, groups - g);
    alignas(64) float padded[kWordGroups * kGroup] = {};
    const float* from = x + g * kGroup;
    if (count < kWordGroups) {
      std::copy_n(from, count * kGroup, padded);
      from = padded;
    }
    float* out = ordered + g * kGroup * width;
    for (int half = 0; half < 2; ++half) {
      Vec square[4];
      for (int i = 0; i < 4; ++i) square[i] = load_quads(from + half * kGroup / 2 + i * 4);
      transpose_quads(square);
      for (int i = 0; i < 4; ++i) {
#if defined(ETE_ISA_avx512)
        if (count <= kWordGroups / 2) square[i].v = _mm512_shuffle_f32x4(square[i].v, square[i].v, 0x44);
#endif
        store(out + ((2 * i + half) * width + t) * W, square[i]);
      }
    }
  }
}

}  // namespace ete::ETE_ISA

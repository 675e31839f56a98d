// Weight formats as float vectors: what GEMV, GEMM and embedding rows read. Group g of a row is its columns 32 g to 32
// g + 31.
//
// A Decoder<format> has
//   codes<Centred>(row, g, c)
//     the 32 codes of a group as floats in column order. With Centred, kCentre is taken off: a format with minimums
//     then has codes on both sides of zero and sums without cancellation. Formats without minimums take their zero
//     point off always.
//   kBytes, kPlanes
//     bytes of a group's codes (low bits) in plane 0; number of planes
//   kScaled, kRowScaled
//     codes are multiplied by scales; by one for the whole row
//   scales(row, g0, n, s, m)
//     kSub scales per group (one per 32 / kSub columns) and, when kMinimum, one minimum per group:
//     value = code * scale + minimum. g0 is a multiple of 8; s and m are padded with zeros to multiples of W.
// Products code * scale are exact in fp32 for every format with f16 scales (at most 24 significant bits), so that value
// is rounded once.
#pragma once
#include "kernels/lanes.hpp"
#include "weight_view.hpp"

namespace ete::ETE_ISA {

constexpr int kGroup = 32;
constexpr int kParts = kGroup / W;  // vectors per group

template <Format F>
struct Decoder;

// ---- Floats ---------------------------------------------------------------------------------------------------------

// `n` elements (n <= 32) of a row of floats, zeros after them.
template <Format F>
struct FloatDecoder {
  static constexpr int kElement = F == Format::F32 ? 4 : 2;
  static constexpr int kBytes = kGroup * kElement;
  static constexpr int kPlanes = 1;
  static constexpr bool kScaled = false;
  static constexpr bool kRowScaled = false;

  static void codes(const uint8_t* p, Vec (&c)[kParts]) {
    ETE_UNROLL
    for (int i = 0; i < kParts; ++i) {
      if constexpr (F == Format::F32) {
        c[i] = load(reinterpret_cast<const float*>(p) + i * W);
      } else if constexpr (F == Format::F16) {
        c[i] = load_f16(reinterpret_cast<const uint16_t*>(p) + i * W);
      } else {
        c[i] = load_bf16(reinterpret_cast<const uint16_t*>(p) + i * W);
      }
    }
  }
  template <bool>
  static void codes(const RowPlanes& row, int64_t group, Vec (&c)[kParts]) {
    codes(row.plane[0] + group * kBytes, c);
  }
  static void first_codes(const RowPlanes& row, int64_t group, int64_t n, Vec (&c)[kParts]) {
    alignas(64) uint8_t padded[kBytes] = {};
    std::memcpy(padded, row.plane[0] + group * kBytes, size_t(n) * kElement);
    codes(padded, c);
  }
};

template <>
struct Decoder<Format::F32> : FloatDecoder<Format::F32> {};
template <>
struct Decoder<Format::F16> : FloatDecoder<Format::F16> {};
template <>
struct Decoder<Format::BF16> : FloatDecoder<Format::BF16> {};

// ---- Quantized codes ------------------------------------------------------------------------------------------------

#if defined(ETE_ISA_avx2)
// 4 to 6 bit codes of a group as bytes in column order, stored as nibble_codes says.
template <int Bits>
inline __m256i packed_codes(const uint8_t* p, const uint8_t* high) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i mask = _mm_set1_epi8(0x0f);
  __m256i codes = _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(bytes, 4), mask), _mm_and_si128(bytes, mask));
  if constexpr (Bits >= 5) {
    // Byte i of `spread` holds the byte of the word that has bit i; the bit is then compared in place.
    const __m256i pick = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201ull));
    ETE_UNROLL
    for (int b = 4; b < Bits; ++b) {
      int32_t word;
      std::memcpy(&word, high + (b - 4) * 4, 4);
      const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(word), pick);
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
      codes = _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi8(int8_t(1 << b))));
    }
  }
  return codes;
}
#endif

// 4 to 6 bit codes less `zero`: nibbles at p (byte j: column j low, column j + 16 high), bit 4 of column i in bit i of
// the first high word, bit 5 in the second.
template <int Bits>
inline void nibble_codes(const uint8_t* p, const uint8_t* high, int zero, Vec (&c)[kParts]) {
#if defined(ETE_ISA_avx512)
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  // The permutation looks at the low four bits of each index only, so the high nibble need not be cleared.
  const __m512 table =
      _mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(float(zero)));
  __m512 low = _mm512_permutexvar_ps(bytes, table);
  __m512 top = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
  if constexpr (Bits >= 5) {
    uint16_t m[2];
    std::memcpy(m, high, 4);
    low = _mm512_mask_add_ps(low, m[0], low, _mm512_set1_ps(16.0f));
    top = _mm512_mask_add_ps(top, m[1], top, _mm512_set1_ps(16.0f));
  }
  if constexpr (Bits >= 6) {
    uint16_t m[2];
    std::memcpy(m, high + 4, 4);
    low = _mm512_mask_add_ps(low, m[0], low, _mm512_set1_ps(32.0f));
    top = _mm512_mask_add_ps(top, m[1], top, _mm512_set1_ps(32.0f));
  }
  c[0].v = low;
  c[1].v = top;
#elif defined(ETE_ISA_avx2)
  const __m256i codes = _mm256_sub_epi8(packed_codes<Bits>(p, high), _mm256_set1_epi8(int8_t(zero)));
  const __m128i first = _mm256_castsi256_si128(codes);
  const __m128i second = _mm256_extracti128_si256(codes, 1);
  c[0].v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(first));
  c[1].v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(first, first)));
  c[2].v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(second));
  c[3].v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(second, second)));
#else
  const WordLanes bit = {1, 2, 4, 8};
  for (int i = 0; i < kParts; ++i) {
    const WordLanes bytes = widen(p + i % 4 * W);
    WordLanes codes = i < 4 ? bytes & 15 : bytes >> 4;
    if constexpr (Bits >= 5) {
      for (int b = 4; b < Bits; ++b) {
        uint32_t word;
        std::memcpy(&word, high + (b - 4) * 4, 4);
        codes |= ((word >> (i * 4)) & bit) != 0 ? WordLanes{} + (1u << b) : WordLanes{};
      }
    }
    // Below the exponent of 2^23 an integer reads 2^23 more; taking that off is exact.
    c[i] = from_words(codes | 0x4b000000u) - set1(float((1 << 23) + zero));
  }
#endif
}

// n f16 numbers as floats, zeros after them to a multiple of W.
inline void f16_row(const uint8_t* p, int64_t n, float* out) {
  const auto* half = reinterpret_cast<const uint16_t*>(p);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load_f16(half + i));
  if (i < n) store(out + i, load_first_f16(half + i, n - i));
}

// Bits: of a code; HighPlane, ScalePlane: their index (0: none); Zero: always taken off; Centre: taken off when
// centred.
template <int Bits, int HighPlane, int ScalePlane, int MinimumPlane, int Zero, int Centre>
struct GroupDecoder {
  static constexpr bool kScaled = true;
  static constexpr bool kRowScaled = false;
  static constexpr int kBytes = 16;
  static constexpr int kPlanes = (MinimumPlane ? MinimumPlane : ScalePlane) + 1;
  static constexpr int kSub = 1;
  static constexpr bool kMinimum = MinimumPlane != 0;
  static constexpr int kZero = Zero;
  static constexpr int kCentre = Centre;
  // Planes that are rows of f16 numbers, one per group, and nothing else.
  static constexpr int kHalfScales = ScalePlane;
  static constexpr int kHalfMinimums = MinimumPlane;

  template <bool Centred>
  static void codes(const RowPlanes& row, int64_t group, Vec (&c)[kParts]) {
    const uint8_t* high = HighPlane ? row.plane[HighPlane] + group * 4 : nullptr;
    nibble_codes<Bits>(row.plane[0] + group * 16, high, Centred ? Zero + Centre : Zero, c);
  }
  static void scales(const RowPlanes& row, int64_t first, int64_t n, float* s, float* m) {
    f16_row(row.plane[ScalePlane] + first * 2, n, s);
    if constexpr (kMinimum) f16_row(row.plane[MinimumPlane] + first * 2, n, m);
  }
};

template <>
struct Decoder<Format::Q4_0> : GroupDecoder<4, 0, 1, 0, 8, 0> {};
template <>
struct Decoder<Format::Q4_1> : GroupDecoder<4, 0, 1, 2, 0, 8> {};
template <>
struct Decoder<Format::Q5_0> : GroupDecoder<5, 1, 2, 0, 16, 0> {};
template <>
struct Decoder<Format::Q5_1> : GroupDecoder<5, 1, 2, 3, 0, 16> {};

// 4-bit codes whose scale serves Groups groups.
template <int Groups>
struct WideGroupDecoder : GroupDecoder<4, 0, 1, 0, 8, 0> {
  static constexpr int kHalfScales = 0;

  static void scales(const RowPlanes& row, int64_t first, int64_t n, float* s, float*) {
    alignas(64) float own[64 / Groups];  // a caller asks for 64 groups at most
    f16_row(row.plane[1] + first / Groups * 2, n / Groups, own);
    for (int64_t i = 0; i < n; ++i) s[i] = own[i / Groups];
    for (int64_t i = n; i % W; ++i) s[i] = 0;
  }
};
template <>
struct Decoder<Format::I4_G64> : WideGroupDecoder<2> {};
template <>
struct Decoder<Format::I4_G128> : WideGroupDecoder<4> {};

struct ByteDecoder {
  static constexpr int kBytes = 32;
  static constexpr int kPlanes = 2;
  static constexpr int kSub = 1;
  static constexpr bool kMinimum = false;
  static constexpr int kCentre = 0;

  template <bool>
  static void codes(const RowPlanes& row, int64_t group, Vec (&c)[kParts]) {
    const auto* p = reinterpret_cast<const int8_t*>(row.plane[0]) + group * kGroup;
    ETE_UNROLL
    for (int i = 0; i < kParts; ++i) c[i] = load_i8(p + i * W);
  }
};

template <>
struct Decoder<Format::I8_ROW> : ByteDecoder {
  static constexpr bool kScaled = false;
  static constexpr bool kRowScaled = true;

  static float row_scale(const RowPlanes& row) {
    float scale;
    std::memcpy(&scale, row.plane[1], 4);
    return scale;
  }
};

template <>
struct Decoder<Format::Q8_0> : ByteDecoder {
  static constexpr bool kScaled = true;
  static constexpr bool kRowScaled = false;
  static constexpr int kHalfScales = 1;
  static constexpr int kHalfMinimums = 0;

  static void scales(const RowPlanes& row, int64_t first, int64_t n, float* s, float*) {
    f16_row(row.plane[1] + first * 2, n, s);
  }
};

inline float half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
#if defined(ETE_ISA_plain)
  return f16_to_float(bits);
#else
  return _cvtsh_ss(bits);
#endif
}

// Scales d * n and minimums -dmin * n of one superblock from d, dmin (f16) and 12 bytes of eight 6-bit numbers n of
// each, as GGUF packs them: bytes 0-3 and 4-7 hold scales and minimums 0-3 in their low six bits, bytes 8-11 the low
// four bits of scales (low nibbles) and minimums (high nibbles) 4-7; the two bits over them are the top of bytes 0-7.
#if defined(ETE_ISA_plain)
inline void super_scales(const uint8_t* p, int64_t n, float* s, float* m) {
  for (int64_t done = 0; done < n; done += 8, p += 16) {
    uint32_t a, b, c;
    std::memcpy(&a, p + 4, 4);
    std::memcpy(&b, p + 8, 4);
    std::memcpy(&c, p + 12, 4);
    const uint32_t words[4] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u),  //
                               b & 0x3f3f3f3fu, ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u)};
    int8_t numbers[16];
    std::memcpy(numbers, words, 16);
    for (int i = 0; i < 8; i += W) {
      store(s + done + i, set1(half_at(p)) * load_i8(numbers + i));
      store(m + done + i, set1(-half_at(p + 2)) * load_i8(numbers + 8 + i));
    }
  }
}
#else
struct SuperNumbers {
  __m128i numbers;  // eight scales, then eight minimums
  __m128 factors;   // d, -dmin
};
inline SuperNumbers super_numbers(const uint8_t* p) {
  const __m128i block = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i low =
      _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(block, _MM_SHUFFLE(3, 2, 3, 1)), _mm_setr_epi32(0, 0, 0, 4)),
                    _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
  const __m128i high = _mm_and_si128(_mm_srli_epi32(_mm_shuffle_epi32(block, _MM_SHUFFLE(2, 2, 1, 1)), 2),
                                     _mm_setr_epi32(0, 0x30303030, 0, 0x30303030));
  return {_mm_or_si128(low, high), _mm_cvtph_ps(_mm_xor_si128(block, _mm_setr_epi32(INT32_MIN, 0, 0, 0)))};
}
#if defined(ETE_ISA_avx512)
inline __m512 super_products(const uint8_t* p) {
  const __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const SuperNumbers block = super_numbers(p);
  return _mm512_mul_ps(_mm512_permutexvar_ps(index, _mm512_castps128_ps512(block.factors)),
                       _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(block.numbers)));
}
// Two superblocks at a time: whole vectors are stored, since they are read as whole vectors at once.
inline void super_scales(const uint8_t* p, int64_t n, float* s, float* m) {
  for (int64_t done = 0; done < n; done += 16, p += 32) {
    const __m512 first = super_products(p);
    const __m512 second = done + 8 < n ? super_products(p + 16) : _mm512_setzero_ps();
    _mm512_storeu_ps(s + done, _mm512_shuffle_f32x4(first, second, 0x44));
    _mm512_storeu_ps(m + done, _mm512_shuffle_f32x4(first, second, 0xee));
  }
}
#else
inline void super_scales(const uint8_t* p, int64_t n, float* s, float* m) {
  for (int64_t done = 0; done < n; done += 8, p += 16) {
    const SuperNumbers block = super_numbers(p);
    const __m128i second = _mm_unpackhi_epi64(block.numbers, block.numbers);
    const __m256 scale = _mm256_broadcastss_ps(block.factors);
    const __m256 minimum = _mm256_broadcastss_ps(_mm_movehdup_ps(block.factors));
    _mm256_storeu_ps(s + done, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(block.numbers))));
    _mm256_storeu_ps(m + done, _mm256_mul_ps(minimum, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(second))));
  }
}
#endif
#endif

template <int Bits, int HighPlane, int ScalePlane, int Centre>
struct SuperDecoder {
  static constexpr bool kScaled = true;
  static constexpr bool kRowScaled = false;
  static constexpr int kBytes = 16;
  static constexpr int kPlanes = ScalePlane + 1;
  static constexpr int kSub = 1;
  static constexpr bool kMinimum = true;
  static constexpr int kZero = 0;
  static constexpr int kCentre = Centre;
  static constexpr int kHalfScales = 0;

  template <bool Centred>
  static void codes(const RowPlanes& row, int64_t group, Vec (&c)[kParts]) {
    const uint8_t* high = HighPlane ? row.plane[HighPlane] + group * 4 : nullptr;
    nibble_codes<Bits>(row.plane[0] + group * 16, high, Centred ? Centre : 0, c);
  }
  static void scales(const RowPlanes& row, int64_t first, int64_t n, float* s, float* m) {
    super_scales(row.plane[ScalePlane] + first * 2, n, s, m);
  }
};

template <>
struct Decoder<Format::Q4_K> : SuperDecoder<4, 0, 1, 8> {};
template <>
struct Decoder<Format::Q5_K> : SuperDecoder<5, 1, 2, 16> {};

template <>
struct Decoder<Format::Q6_K> {
  static constexpr bool kScaled = true;
  static constexpr bool kRowScaled = false;
  static constexpr int kBytes = 16;
  static constexpr int kPlanes = 4;
  static constexpr int kSub = 2;
  static constexpr bool kMinimum = false;
  static constexpr int kCentre = 0;
  static constexpr int kHalfScales = 0;

  template <bool>
  static void codes(const RowPlanes& row, int64_t group, Vec (&c)[kParts]) {
    nibble_codes<6>(row.plane[0] + group * 16, row.plane[1] + group * 8, 32, c);
  }
  static void scales(const RowPlanes& row, int64_t first, int64_t n, float* s, float*) {
    for (int64_t done = 0; done < n; done += 8) {
      const auto* p = reinterpret_cast<const int8_t*>(row.plane[2]) + (first + done) * 2;
      const Vec d = set1(half_at(row.plane[3] + (first + done) / 4));
      for (int i = 0; i < 16; i += W) store(s + done * 2 + i, d * load_i8(p + i));
    }
  }
};

// ---- Values ---------------------------------------------------------------------------------------------------------

// Columns [col, col + cols) of one row as fp32, equal to the gguf package's, zeros after them up to a multiple of 32.
// `col` is a multiple of 256.
template <Format F>
void dequantize_row(const RowPlanes& row, int64_t col, int64_t cols, float* out) {
  using D = Decoder<F>;
  Vec c[kParts];
  const int64_t first = col / kGroup;
  if constexpr (D::kRowScaled) {
    const Vec scale = set1(D::row_scale(row));
    for (int64_t done = 0; done < cols; done += kGroup) {
      D::template codes<false>(row, (col + done) / kGroup, c);
      for (int i = 0; i < kParts; ++i) store(out + done + i * W, c[i] * scale);
    }
  } else if constexpr (!D::kScaled) {
    for (int64_t done = 0; done < cols; done += kGroup) {
      if (cols - done >= kGroup) {
        D::template codes<false>(row, (col + done) / kGroup, c);
      } else {
        D::first_codes(row, (col + done) / kGroup, cols - done, c);
      }
      for (int i = 0; i < kParts; ++i) store(out + done + i * W, c[i]);
    }
  } else {
    constexpr int kChunk = 16;  // groups whose scales are converted at once
    const int64_t groups = cols / kGroup;
    for (int64_t g0 = 0; g0 < groups; g0 += kChunk) {
      const int64_t n = std::min<int64_t>(kChunk, groups - g0);
      alignas(64) float s[kChunk * D::kSub];
      alignas(64) float m[kChunk];
      D::scales(row, first + g0, n, s, m);
      for (int64_t g = 0; g < n; ++g) {
        D::template codes<false>(row, first + g0 + g, c);
        ETE_UNROLL
        for (int i = 0; i < kParts; ++i) {
          const Vec scale = set1(s[g * D::kSub + i * D::kSub / kParts]);
          Vec value;
          if constexpr (D::kMinimum) {
            value = fma(c[i], scale, set1(m[g]));
          } else {
            value = c[i] * scale;
          }
          store(out + (g0 + g) * kGroup + i * W, value);
        }
      }
    }
  }
}

}  // namespace ete::ETE_ISA

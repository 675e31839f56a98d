// Counts the instructions that unpack a group of 32 codes on AVX-512, for docs/weight-layout.md.
//   g++ -O3 -march=x86-64-v4 -mprefer-vector-width=512 -fno-unroll-loops -S -o - lab/weight_layout/unpack_avx512.cpp
// Each function is the inner product of n groups with fp32 activations; its loop body is one group.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

inline __m512i load_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

}  // namespace

// The order chosen: byte j holds columns j (low nibble) and j + 16 (high).
__m512 halves_4bit(const uint8_t* codes, const float* x, int64_t n, __m512 table) {
  __m512 a = _mm512_setzero_ps(), b = a;
  for (int64_t g = 0; g < n; ++g) {
    const __m512i bytes = load_bytes(codes + 16 * g);
    a = _mm512_fmadd_ps(_mm512_permutexvar_ps(bytes, table), _mm512_loadu_ps(x + 32 * g), a);
    b = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table), _mm512_loadu_ps(x + 32 * g + 16), b);
  }
  return _mm512_add_ps(a, b);
}

// Not chosen: byte j holds columns 2j (low nibble) and 2j + 1 (high); the columns are put in order by permutations.
__m512 pairs_4bit(const uint8_t* codes, const float* x, int64_t n, __m512 table) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i last = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  __m512 a = _mm512_setzero_ps(), b = a;
  for (int64_t g = 0; g < n; ++g) {
    const __m512i bytes = load_bytes(codes + 16 * g);
    const __m512 low = _mm512_permutexvar_ps(bytes, table);
    const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    a = _mm512_fmadd_ps(_mm512_permutex2var_ps(low, first, high), _mm512_loadu_ps(x + 32 * g), a);
    b = _mm512_fmadd_ps(_mm512_permutex2var_ps(low, last, high), _mm512_loadu_ps(x + 32 * g + 16), b);
  }
  return _mm512_add_ps(a, b);
}

// Bit 4 of column i in bit i of one 32-bit word: a mask register without further work.
__m512 halves_5bit(const uint8_t* codes, const uint8_t* high_bits, const float* x, int64_t n, __m512 table) {
  const __m512 sixteen = _mm512_set1_ps(16);
  __m512 a = _mm512_setzero_ps(), b = a;
  for (int64_t g = 0; g < n; ++g) {
    const __m512i bytes = load_bytes(codes + 16 * g);
    uint16_t mask[2];
    std::memcpy(mask, high_bits + 4 * g, 4);
    __m512 low = _mm512_permutexvar_ps(bytes, table);
    __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    low = _mm512_mask_add_ps(low, mask[0], low, sixteen);
    high = _mm512_mask_add_ps(high, mask[1], high, sixteen);
    a = _mm512_fmadd_ps(low, _mm512_loadu_ps(x + 32 * g), a);
    b = _mm512_fmadd_ps(high, _mm512_loadu_ps(x + 32 * g + 16), b);
  }
  return _mm512_add_ps(a, b);
}

// Two words per group, bit 4 and bit 5.
__m512 halves_6bit(const uint8_t* codes, const uint8_t* high_bits, const float* x, int64_t n, __m512 table) {
  const __m512 sixteen = _mm512_set1_ps(16), thirty_two = _mm512_set1_ps(32);
  __m512 a = _mm512_setzero_ps(), b = a;
  for (int64_t g = 0; g < n; ++g) {
    const __m512i bytes = load_bytes(codes + 16 * g);
    uint16_t mask[4];
    std::memcpy(mask, high_bits + 8 * g, 8);
    __m512 low = _mm512_permutexvar_ps(bytes, table);
    __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    low = _mm512_mask_add_ps(low, mask[0], low, sixteen);
    high = _mm512_mask_add_ps(high, mask[1], high, sixteen);
    low = _mm512_mask_add_ps(low, mask[2], low, thirty_two);
    high = _mm512_mask_add_ps(high, mask[3], high, thirty_two);
    a = _mm512_fmadd_ps(low, _mm512_loadu_ps(x + 32 * g), a);
    b = _mm512_fmadd_ps(high, _mm512_loadu_ps(x + 32 * g + 16), b);
  }
  return _mm512_add_ps(a, b);
}

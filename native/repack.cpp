#include "repack.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ete {

namespace {

// Source bytes after which pages are given back: small enough to keep memory flat, large enough to make calls rare.
constexpr int64_t kReleaseBytes = 2 << 20;

#if defined(__SSE2__)

inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline void store_16(uint8_t* p, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }

// The high-bit word of 32 columns: bit i is bit `bit` of bytes[i].
inline void bit_plane(const uint8_t* bytes, int bit, uint8_t* out) {
  // The shift moves the bit to the top of its byte, where the mask of the vector takes it from.
  const uint32_t low = uint32_t(_mm_movemask_epi8(_mm_slli_epi16(load_16(bytes), 7 - bit)));
  const uint32_t high = uint32_t(_mm_movemask_epi8(_mm_slli_epi16(load_16(bytes + 16), 7 - bit)));
  const uint32_t word = low | high << 16;
  std::memcpy(out, &word, 4);
}

// 32 bytes holding 32 columns in their low nibbles and 32 other columns in their high nibbles -> two groups of 16
// bytes, byte j of a group holding its columns j (low) and j + 16 (high).
inline void split_nibbles(const uint8_t* bytes, uint8_t* low_group, uint8_t* high_group) {
  const __m128i first = load_16(bytes), second = load_16(bytes + 16);
  const __m128i low_half = _mm_set1_epi8(0x0f), high_half = _mm_set1_epi8(int8_t(0xf0));
  store_16(low_group,
           _mm_or_si128(_mm_and_si128(first, low_half), _mm_and_si128(_mm_slli_epi16(second, 4), high_half)));
  store_16(high_group,
           _mm_or_si128(_mm_and_si128(_mm_srli_epi16(first, 4), low_half), _mm_and_si128(second, high_half)));
}

#else

// The high-bit word of 32 columns: bit i is bit `bit` of bytes[i].
inline void bit_plane(const uint8_t* bytes, int bit, uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    // The product moves bit 0 of byte i to bit 56 + i, without carries.
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    out[i] = uint8_t((((word >> bit) & 0x0101010101010101ull) * 0x0102040810204080ull) >> 56);
  }
}

// 32 bytes holding 32 columns in their low nibbles and 32 other columns in their high nibbles -> two groups of 16
// bytes, byte j of a group holding its columns j (low) and j + 16 (high).
inline void split_nibbles(const uint8_t* bytes, uint8_t* low_group, uint8_t* high_group) {
  for (int j = 0; j < 16; ++j) {
    low_group[j] = uint8_t((bytes[j] & 0x0f) | (bytes[j + 16] << 4));
    high_group[j] = uint8_t((bytes[j] >> 4) | (bytes[j + 16] & 0xf0));
  }
}

#endif

// Each struct repacks one block: `in` is the block, `out` the planes at this block's place, moved on by `advance`.
struct Q8_0 {
  static constexpr int block = 34;
  static constexpr int advance[kMaxPlanes] = {32, 2, 0, 0};
  static void run(const uint8_t* in, uint8_t* const* out) {
    std::memcpy(out[1], in, 2);
    std::memcpy(out[0], in + 2, 32);
  }
};

struct Q4_0 {
  static constexpr int block = 18;
  static constexpr int advance[kMaxPlanes] = {16, 2, 0, 0};
  static void run(const uint8_t* in, uint8_t* const* out) {
    std::memcpy(out[1], in, 2);
    std::memcpy(out[0], in + 2, 16);
  }
};

struct Q4_1 {
  static constexpr int block = 20;
  static constexpr int advance[kMaxPlanes] = {16, 2, 2, 0};
  static void run(const uint8_t* in, uint8_t* const* out) {
    std::memcpy(out[1], in, 2);
    std::memcpy(out[2], in + 2, 2);
    std::memcpy(out[0], in + 4, 16);
  }
};

struct Q5_0 {
  static constexpr int block = 22;
  static constexpr int advance[kMaxPlanes] = {16, 4, 2, 0};
  static void run(const uint8_t* in, uint8_t* const* out) {
    std::memcpy(out[2], in, 2);
    std::memcpy(out[1], in + 2, 4);
    std::memcpy(out[0], in + 6, 16);
  }
};

struct Q5_1 {
  static constexpr int block = 24;
  static constexpr int advance[kMaxPlanes] = {16, 4, 2, 2};
  static void run(const uint8_t* in, uint8_t* const* out) {
    std::memcpy(out[2], in, 2);
    std::memcpy(out[3], in + 2, 2);
    std::memcpy(out[1], in + 4, 4);
    std::memcpy(out[0], in + 8, 16);
  }
};

// d, dmin, 12 bytes of 6-bit scales and minimums, 128 bytes of nibbles: group 2j in the low, 2j + 1 in the high ones.
struct Q4_K {
  static constexpr int block = 144;
  static constexpr int advance[kMaxPlanes] = {128, 16, 0, 0};
  static void run(const uint8_t* in, uint8_t* const* out) {
    std::memcpy(out[1], in, 16);
    for (int j = 0; j < 4; ++j) split_nibbles(in + 16 + 32 * j, out[0] + 32 * j, out[0] + 32 * j + 16);
  }
};

// As Q4_K with 32 bytes of high bits before the nibbles: bit g of byte i belongs to column i of group g.
struct Q5_K {
  static constexpr int block = 176;
  static constexpr int advance[kMaxPlanes] = {128, 32, 16, 0};
  static void run(const uint8_t* in, uint8_t* const* out) {
    std::memcpy(out[2], in, 16);
    for (int group = 0; group < 8; ++group) bit_plane(in + 16, group, out[1] + 4 * group);
    for (int j = 0; j < 4; ++j) split_nibbles(in + 48 + 32 * j, out[0] + 32 * j, out[0] + 32 * j + 16);
  }
};

// 128 bytes of nibbles, 64 of bit pairs, 16 int8 scales, d. Per half of 128 columns: groups 0, 2 in the low and high
// nibbles of the first 32 bytes, groups 1, 3 in those of the next 32; bits 2g, 2g + 1 of pair byte i to column i of
// group g.
struct Q6_K {
  static constexpr int block = 210;
  static constexpr int advance[kMaxPlanes] = {128, 64, 16, 2};
  static void run(const uint8_t* in, uint8_t* const* out) {
    for (int half = 0; half < 2; ++half) {
      const uint8_t* nibbles = in + 64 * half;
      const uint8_t* pairs = in + 128 + 32 * half;
      uint8_t* codes = out[0] + 64 * half;
      uint8_t* high = out[1] + 32 * half;
      split_nibbles(nibbles, codes, codes + 32);
      split_nibbles(nibbles + 32, codes + 16, codes + 48);
      for (int group = 0; group < 4; ++group) {
        bit_plane(pairs, 2 * group, high + 8 * group);
        bit_plane(pairs, 2 * group + 1, high + 8 * group + 4);
      }
    }
    std::memcpy(out[2], in + 192, 16);
    std::memcpy(out[3], in + 208, 2);
  }
};

template <typename Format>
void repack_row(const uint8_t* source, int64_t blocks, uint8_t* const* rows) {
  uint8_t* out[kMaxPlanes];
  std::copy_n(rows, kMaxPlanes, out);
  for (int64_t b = 0; b < blocks; ++b) {
    Format::run(source + b * Format::block, out);
    for (int p = 0; p < kMaxPlanes; ++p) out[p] += Format::advance[p];
  }
}

template <int Bytes>
void copy_row(const uint8_t* source, int64_t values, uint8_t* const* rows) {
  std::memcpy(rows[0], source, size_t(values) * Bytes);
}

// Only pages that lie wholly in [begin, end): a neighbour may share the first and the last one.
void release(const uint8_t* begin, const uint8_t* end) {
  static const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (uintptr_t(begin) + page - 1) / page * page;
  const uintptr_t last = uintptr_t(end) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

template <typename RowFunction>
void repack_rows(const RepackJob& job, int64_t row_bytes, const RowFunction& row_function) {
  int64_t released = 0;
  for (int64_t row = 0; row < job.rows; ++row) {
    uint8_t* rows[kMaxPlanes];
    for (int p = 0; p < kMaxPlanes; ++p) rows[p] = job.planes[p] + row * job.pitches[p];
    const int64_t from = job.row_order != nullptr ? job.row_order[row] : row;
    row_function(job.source + from * row_bytes, job.blocks, rows);
    if (job.row_order == nullptr && (row + 1 - released) * row_bytes >= kReleaseBytes) {
      release(job.source + released * row_bytes, job.source + (row + 1) * row_bytes);
      released = row + 1;
    }
  }
  release(job.source, job.source + job.rows * row_bytes);
}

template <typename Format>
void repack_blocks(const RepackJob& job) {
  repack_rows(job, job.blocks * Format::block, repack_row<Format>);
}

template <int Bytes>
void copy_values(const RepackJob& job) {
  repack_rows(job, job.blocks * Bytes, copy_row<Bytes>);
}

}  // namespace

bool repack(const std::string& format, const RepackJob& job) {
  if (format == "F32") {
    copy_values<4>(job);
  } else if (format == "F16" || format == "BF16") {
    copy_values<2>(job);
  } else if (format == "Q8_0") {
    repack_blocks<Q8_0>(job);
  } else if (format == "Q4_0") {
    repack_blocks<Q4_0>(job);
  } else if (format == "Q4_1") {
    repack_blocks<Q4_1>(job);
  } else if (format == "Q5_0") {
    repack_blocks<Q5_0>(job);
  } else if (format == "Q5_1") {
    repack_blocks<Q5_1>(job);
  } else if (format == "Q4_K") {
    repack_blocks<Q4_K>(job);
  } else if (format == "Q5_K") {
    repack_blocks<Q5_K>(job);
  } else if (format == "Q6_K") {
    repack_blocks<Q6_K>(job);
  } else {
    return false;
  }
  return true;
}

}  // namespace ete

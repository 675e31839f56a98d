// What both GEMMs share: the slice of 32 columns that a thread takes of a weight row, from global memory to numbers.
#pragma once

#include "prelude.cuh"
#include "weights.cuh"

// A thread's share of 32 columns of a weight row: with `parts` threads to a row, thread `part` has 32 / parts columns.
// Formats in column order: columns 32 / parts * part on. 4-bit formats: bytes 16 / parts * part on, which hold half of
// the columns in their low nibbles and half, 16 columns on, in their high ones.
template <Format F, int parts>
struct Slice {
  static constexpr int kBytes = code_bytes(F) / parts;
  static constexpr int kWords = kBytes / 4;
  uint32_t words[kWords];
  uint2 high;
  uint4 scales;  // as stored, for the row's thread 0
};

template <Format F, int parts>
ETE_DEVICE Slice<F, parts> empty_slice() {
  Slice<F, parts> slice;
#pragma unroll
  for (int i = 0; i < Slice<F, parts>::kWords; ++i) slice.words[i] = 0;
  slice.high = make_uint2(0, 0);
  slice.scales = make_uint4(0, 0, 0, 0);
  return slice;
}

// Columns 32 group ... A row of floats may end inside: bytes past its pitch are not read.
template <Format F, int parts>
ETE_DEVICE Slice<F, parts> load_slice(const RowPlanes& row, int group, int part, int cols) {
  Slice<F, parts> slice = empty_slice<F, parts>();
  constexpr int bytes = Slice<F, parts>::kBytes;
  const int64_t from = static_cast<int64_t>(group) * code_bytes(F) + part * bytes;
  const int64_t end = is_float(F) ? row_pitch(static_cast<int64_t>(cols) * (code_bytes(F) / kGroup)) : from + bytes;
  if constexpr (bytes >= 16) {
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) {
      if (from + 16 * i >= end) continue;
      const uint4 words = load16(row.codes + from + 16 * i);
#pragma unroll
      for (int w = 0; w < 4; ++w) slice.words[4 * i + w] = word_of(words, w);
    }
  } else if constexpr (bytes == 8) {
    const uint2 words = load8(row.codes + from);
    slice.words[0] = words.x;
    slice.words[1] = words.y;
  } else {
    slice.words[0] = load4(row.codes + from);
  }
  slice.high = load_high<F>(row, group);
  if (part == 0) slice.scales = load_scales<F>(row, group);
  return slice;
}

// The column, within the 32, of the first of the four numbers `piece` of a slice.
template <Format F, int parts>
ETE_DEVICE int piece_column(int part, int piece) {
  if constexpr (code_bytes(F) == 16) {
    constexpr int half = 4 / parts;
    return 4 * (part * half + piece % half) + 16 * (piece / half);
  }
  return 32 / parts * part + 4 * piece;
}

// Four numbers of a slice: codes, or values of the float formats, zero from column `limit` on (of the 32).
template <Format F, int parts>
ETE_DEVICE void slice_numbers(const Slice<F, parts>& slice, int part, int piece, int limit, float (&numbers)[4]) {
  if constexpr (F == Format::F32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) numbers[i] = __uint_as_float(slice.words[4 * piece + i]);
  } else if constexpr (F == Format::BF16 || F == Format::F16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = slice.words[2 * piece + i];
      numbers[2 * i] = F == Format::BF16 ? bf16_low(pair) : half_to_float(static_cast<uint16_t>(pair & 0xffffu));
      numbers[2 * i + 1] = F == Format::BF16 ? bf16_high(pair) : half_to_float(static_cast<uint16_t>(pair >> 16));
    }
  } else if constexpr (is_byte(F)) {
    bytes_to_floats(slice.words[piece] ^ 0x80808080u, code_offset(F), numbers);
  } else {
    constexpr int half = 4 / parts;
    const int chunk = part * half + piece % half + 4 * (piece / half);
    bytes_to_floats(nibble_codes<F>(slice.words[piece % half], slice.high, chunk), code_offset(F), numbers);
  }
  if constexpr (is_float(F)) {
    const int column = piece_column<F, parts>(part, piece);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i >= limit) numbers[i] = 0.0f;
    }
  }
}

// Columns [from, from + count) of a row of x; zero past `cols`. count is a multiple of 4.
template <int count>
ETE_DEVICE void load_x(const float* row, int from, int cols, bool live, float (&values)[count]) {
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int col = from + i;
    if (live && col < cols) {
      if (cols % 4 == 0) {
        four = load16_float(row + col);
      } else {
        four.x = row[col];
        if (col + 1 < cols) four.y = row[col + 1];
        if (col + 2 < cols) four.z = row[col + 2];
        if (col + 3 < cols) four.w = row[col + 3];
      }
    }
    values[i] = four.x;
    values[i + 1] = four.y;
    values[i + 2] = four.z;
    values[i + 3] = four.w;
  }
}

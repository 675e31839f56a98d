// Weights as planes (docs/weight-layout.md): where a row's planes lie, and how codes become numbers. Every number made
// here is exact: integers of at most 8 bits, or the f16 and bf16 as they are; scales and minimums stay apart.
#pragma once

#include "prelude.cuh"

enum class Format { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, I8_ROW, I4_G64, I4_G128 };

constexpr int kGroup = 32;  // columns that share a scale, or a part of those (Q6_K: two scales, one for each half)

ETE_DEVICE constexpr bool is_float(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }
ETE_DEVICE constexpr bool is_k(Format f) { return f == Format::Q4_K || f == Format::Q5_K; }
ETE_DEVICE constexpr bool has_minimum(Format f) { return f == Format::Q4_1 || f == Format::Q5_1 || is_k(f); }
// Codes are bytes.
ETE_DEVICE constexpr bool is_byte(Format f) { return f == Format::Q8_0 || f == Format::I8_ROW; }
// Neighbouring groups that share a scale, where it serves more than one.
ETE_DEVICE constexpr int groups_of_scale(Format f) {
  if (f == Format::I4_G128) return 4;
  return f == Format::I4_G64 ? 2 : 1;
}
// Words of high bits per group: bit 4, and for Q6_K bit 5.
ETE_DEVICE constexpr int high_words(Format f) {
  if (f == Format::Q6_K) return 2;
  return f == Format::Q5_0 || f == Format::Q5_1 || f == Format::Q5_K ? 1 : 0;
}
// What is taken off a code, as an unsigned byte, to make it signed.
ETE_DEVICE constexpr int code_offset(Format f) {
  switch (f) {
    case Format::Q8_0:
    case Format::I8_ROW:
      return 128;  // codes are signed: their top bit is turned first
    case Format::Q4_0:
    case Format::I4_G64:
    case Format::I4_G128:
      return 8;
    case Format::Q5_0:
      return 16;
    case Format::Q6_K:
      return 32;
    default:
      return 0;
  }
}
// Bytes of codes for 32 columns.
ETE_DEVICE constexpr int code_bytes(Format f) {
  if (f == Format::F32) return 128;
  if (f == Format::F16 || f == Format::BF16) return 64;
  return is_byte(f) ? 32 : 16;
}
// Columns whose codes fill 16 bytes.
ETE_DEVICE constexpr int unit_columns(Format f) { return 16 * kGroup / code_bytes(f); }
ETE_DEVICE constexpr int scales_per_group(Format f) { return f == Format::Q6_K ? 2 : 1; }

ETE_DEVICE int64_t row_pitch(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// The planes of one row. `extra` holds minimums (Q4_1, Q5_1) or superscales (Q6_K).
struct RowPlanes {
  const uint8_t* codes;
  const uint8_t* high;
  const uint8_t* scales;
  const uint8_t* extra;
};

// Bytes from one row of a plane to the next.
struct RowPitches {
  int64_t codes, high, scales, extra;
};

template <Format F>
ETE_DEVICE RowPitches row_pitches(int cols) {
  RowPitches pitches;
  pitches.codes = pitches.high = pitches.scales = pitches.extra = 0;
  if constexpr (is_float(F)) {
    pitches.codes = row_pitch(static_cast<int64_t>(cols) * (code_bytes(F) / kGroup));
  } else {
    const int64_t groups = cols / kGroup;
    pitches.codes = row_pitch(groups * code_bytes(F));
    if constexpr (high_words(F) > 0) pitches.high = row_pitch(groups * (4 * high_words(F)));
    // K formats: 16 bytes for 8 groups
    pitches.scales = row_pitch(F == Format::I8_ROW ? 4 : groups / groups_of_scale(F) * 2);
    if constexpr (F == Format::Q4_1 || F == Format::Q5_1) pitches.extra = row_pitch(groups * 2);
    if constexpr (F == Format::Q6_K) pitches.extra = row_pitch(groups / 8 * 2);
  }
  return pitches;
}

// The planes `rows` rows further on.
template <Format F>
ETE_DEVICE RowPlanes rows_on(const RowPlanes& planes, int rows, int cols) {
  const RowPitches pitches = row_pitches<F>(cols);
  RowPlanes on = planes;
  on.codes = planes.codes + rows * pitches.codes;
  if constexpr (high_words(F) > 0) on.high = planes.high + rows * pitches.high;
  if constexpr (!is_float(F)) on.scales = planes.scales + rows * pitches.scales;
  if constexpr (F == Format::Q4_1 || F == Format::Q5_1 || F == Format::Q6_K) {
    on.extra = planes.extra + rows * pitches.extra;
  }
  return on;
}

// `second`, `third`, `fourth`: bytes from the weight's address to the planes after the first, in the order of
// formats/weight.py.
template <Format F>
ETE_DEVICE RowPlanes row_planes(const uint8_t* weight, int64_t second, int64_t third, int64_t fourth, int row,
                                int cols) {
  RowPlanes planes;
  planes.codes = weight;
  if constexpr (!is_float(F)) {
    planes.high = weight + second;
    planes.scales = weight + (high_words(F) > 0 ? third : second);
    planes.extra = weight + (high_words(F) > 0 ? fourth : third);
  }
  return rows_on<F>(planes, row, cols);
}

// ---- codes

ETE_DEVICE uint32_t word_of(const uint4& words, int index) {
  return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// Four unsigned bytes as floats less `offset`: a byte in the low mantissa bits of 2^23 is 2^23 + byte.
ETE_DEVICE void bytes_to_floats(uint32_t bytes, int offset, float (&numbers)[4]) {
  const float bias = 8388608.0f + static_cast<float>(offset);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    numbers[i] = __uint_as_float(byte_permute(bytes, 0x4b000000u, 0x7440u + static_cast<uint32_t>(i))) - bias;
  }
}

// Four high bits (`chunk` of the eight in a word) moved to bit 4 of four bytes.
ETE_DEVICE uint32_t spread_high(uint32_t word, int chunk) {
  return (((word >> (4 * chunk)) & 15u) * 0x02040810u) & 0x10101010u;
}

// The codes of columns 4 chunk .. 4 chunk + 3 of a group, as unsigned bytes; `word` holds bytes 4 (chunk % 4) ...
template <Format F>
ETE_DEVICE uint32_t nibble_codes(uint32_t word, const uint2& high, int chunk) {
  uint32_t codes = (chunk < 4 ? word : word >> 4) & 0x0f0f0f0fu;
  if constexpr (high_words(F) > 0) codes |= spread_high(high.x, chunk);
  if constexpr (high_words(F) > 1) codes |= spread_high(high.y, chunk) << 1;
  return codes;
}

// The high bits of a group (zero for formats without them).
template <Format F>
ETE_DEVICE uint2 load_high(const RowPlanes& row, int group) {
  uint2 high = make_uint2(0, 0);
  if constexpr (high_words(F) == 1) high.x = load4_once(row.high + 4 * group);
  if constexpr (high_words(F) == 2) high = load8_once(row.high + 8 * group);
  return high;
}

// 16 bytes of codes with their high bits: unit_columns(F) columns.
struct Unit {
  uint4 codes;
  uint2 high;
};

// Columns 4 chunk .. 4 chunk + 3 of a unit, as signed codes or values.
template <Format F>
ETE_DEVICE void unit_numbers(const Unit& unit, int chunk, float (&numbers)[4]) {
  if constexpr (F == Format::F32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) numbers[i] = __uint_as_float(word_of(unit.codes, i));
  } else if constexpr (F == Format::BF16 || F == Format::F16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = word_of(unit.codes, 2 * chunk + i);
      if constexpr (F == Format::BF16) {
        numbers[2 * i] = bf16_low(pair);
        numbers[2 * i + 1] = bf16_high(pair);
      } else {
        numbers[2 * i] = half_to_float(static_cast<uint16_t>(pair & 0xffffu));
        numbers[2 * i + 1] = half_to_float(static_cast<uint16_t>(pair >> 16));
      }
    }
  } else if constexpr (is_byte(F)) {
    bytes_to_floats(word_of(unit.codes, chunk) ^ 0x80808080u, code_offset(F), numbers);
  } else {
    bytes_to_floats(nibble_codes<F>(word_of(unit.codes, chunk % 4), unit.high, chunk), code_offset(F), numbers);
  }
}

// Codes of 4 to 6 bits as floats without a conversion: a code left where it lies in the low 23 bits of a word is the
// number code * 2^(place - 149), below the normal ones but exact, and fmaf takes it like any other. x is multiplied
// beforehand by kPlaceScale * 2^-place of its column (exact), so that every product is code * x * 2^-53: |x| may go up
// to 2^31, and a sum is as exact as any down to 2^-70.
constexpr float kPlaceScale = 79228162514264337593543950336.0f;  // 2^96
constexpr float kPlaceUnscale = 9007199254740992.0f;             // 2^53

template <Format F>
ETE_DEVICE constexpr bool has_placed_codes() {
  return code_bytes(F) == 16;
}

// Four neighbouring columns of x, scaled for placed_codes: places 0, 8, 16 and, shifted down, 0.
ETE_DEVICE float4 scale_for_places(float4 x) {
  return make_float4(x.x * kPlaceScale, x.y * (kPlaceScale / 256.0f), x.z * (kPlaceScale / 65536.0f),
                     x.w * kPlaceScale);
}

// Columns 4 chunk .. 4 chunk + 3 of a unit, as unsigned codes in their places.
template <Format F>
ETE_DEVICE void placed_codes(const Unit& unit, int chunk, float (&numbers)[4]) {
  const uint32_t word = word_of(unit.codes, chunk % 4);
  if constexpr (high_words(F) == 0) {
    const uint32_t nibbles = chunk < 4 ? word : word >> 4;
    numbers[0] = __uint_as_float(nibbles & 0xfu);
    numbers[1] = __uint_as_float(nibbles & 0xf00u);
    numbers[2] = __uint_as_float(nibbles & 0xf0000u);
    numbers[3] = __uint_as_float((nibbles >> 24) & 0xfu);
  } else {
    const uint32_t codes = nibble_codes<F>(word, unit.high, chunk);
    numbers[0] = __uint_as_float(codes & 0xffu);
    numbers[1] = __uint_as_float(codes & 0xff00u);
    numbers[2] = __uint_as_float(codes & 0xff0000u);
    numbers[3] = __uint_as_float(codes >> 24);
  }
}

// ---- scales

// The stored scales of a group, as bits; K formats: the 16 bytes of its block of 256 columns.
template <Format F>
ETE_DEVICE uint4 load_scales(const RowPlanes& row, int group) {
  uint4 stored = make_uint4(0, 0, 0, 0);
  if constexpr (is_k(F)) {
    stored = load16_once(row.scales + 16 * (group / 8));
  } else if constexpr (F == Format::I8_ROW) {
    stored.x = load4(row.scales);  // used again by every group
  } else if constexpr (!is_float(F)) {
    stored.x = load2_once(row.scales + 2 * (group / groups_of_scale(F)));
    if constexpr (F == Format::Q4_1 || F == Format::Q5_1) stored.y = load2_once(row.extra + 2 * group);
    if constexpr (F == Format::Q6_K) stored.y = load2_once(row.extra + 2 * (group / 8));
  }
  return stored;
}

// value = scale * code + minimum; each rounded as the format's definition rounds it. Only Q6_K sets scale[1].
struct Scales {
  float scale[2];
  float minimum;
};

template <Format F>
ETE_DEVICE Scales scales_of(const uint4& stored, int group) {
  Scales scales;
  scales.scale[0] = scales.scale[1] = 1.0f;
  scales.minimum = 0.0f;
  if constexpr (is_k(F)) {
    const float d = half_to_float(static_cast<uint16_t>(stored.x & 0xffffu));
    const float dmin = half_to_float(static_cast<uint16_t>(stored.x >> 16));
    const int sub = group % 8;
    const int shift = 8 * (sub % 4);
    const uint32_t first = stored.y >> shift, second = stored.z >> shift, mixed = stored.w >> shift;
    const uint32_t scale = sub < 4 ? first & 63u : (mixed & 15u) | (((first >> 6) & 3u) << 4);
    const uint32_t minimum = sub < 4 ? second & 63u : ((mixed >> 4) & 15u) | (((second >> 6) & 3u) << 4);
    scales.scale[0] = d * static_cast<float>(scale);
    scales.minimum = -(dmin * static_cast<float>(minimum));
  } else if constexpr (F == Format::Q6_K) {
    const float d = half_to_float(static_cast<uint16_t>(stored.y));
    scales.scale[0] = d * static_cast<float>(static_cast<int8_t>(stored.x & 0xffu));
    scales.scale[1] = d * static_cast<float>(static_cast<int8_t>(stored.x >> 8));
  } else if constexpr (F == Format::I8_ROW) {
    scales.scale[0] = __uint_as_float(stored.x);
  } else if constexpr (!is_float(F)) {
    scales.scale[0] = half_to_float(static_cast<uint16_t>(stored.x));
    if constexpr (has_minimum(F)) scales.minimum = half_to_float(static_cast<uint16_t>(stored.y));
  }
  return scales;
}

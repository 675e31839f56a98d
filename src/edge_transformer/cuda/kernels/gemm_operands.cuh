// Weights of the tensor-core GEMM on their way from shared memory, where their codes lie as stored, to operands.
//
// An operand of mma.m16n8k16 holds, in lane 4 g + t, columns (2t, 2t + 1) and (2t + 8, 2t + 9) of row g. Codes come as
// words of four columns 4t .. 4t + 3, and masking two bytes at a time gives (4t, 4t + 2) and (4t + 1, 4t + 3). Since
// the order of the 16 columns is free as long as x has the same one, x is brought into it (gemm_terms.cu, `coded`).
// BF16 weights are operands as they are, in column order.
//
// With three terms operands are exact and scales stay apart. With one term an operand is the weight's value,
// scale * code + minimum, rounded to bf16 (the minimum's sum: once more), so that sums need not stop at groups.
#pragma once

#include "prelude.cuh"
#include "weights.cuh"

// How many bf16 terms make a weight, beside `terms` of an activation.
ETE_DEVICE constexpr int weight_terms(Format f, int terms) {
  if (terms == 1) return 1;
  return f == Format::F32 ? 3 : f == Format::F16 ? 2 : 1;
}

// ---- codes in shared memory: [row of the tile][16-byte pieces of a group], pieces permuted against bank conflicts

ETE_DEVICE constexpr int group_pieces(Format f) { return code_bytes(f) / 16; }

template <Format F>
ETE_DEVICE int piece_in_row(int row, int piece) {
  if constexpr (is_byte(F)) return piece ^ ((row >> 2) & 1);
  if constexpr (F == Format::BF16) return piece ^ ((row >> 1) & 3);
  if constexpr (F == Format::F16) return piece ^ (row & 2);
  if constexpr (F == Format::F32) return piece ^ ((row & 1) * 4);
  return piece;
}

template <Format F>
ETE_DEVICE int place_of_piece(int row, int piece) {
  return row * group_pieces(F) + piece_in_row<F>(row, piece);
}

// ---- what else a row has: planes beside the codes, whose 16-byte pieces are brought as they are stored

constexpr int kStageGroups = 2;  // of columns, in a stage

ETE_DEVICE constexpr bool has_extra(Format f) { return f == Format::Q4_1 || f == Format::Q5_1 || f == Format::Q6_K; }
// Scales; minimums or superscales; high bits.
ETE_DEVICE constexpr int beside_planes(Format f) {
  return is_float(f) ? 0 : 1 + (has_extra(f) ? 1 : 0) + (high_words(f) > 0 ? 1 : 0);
}
ETE_DEVICE constexpr bool is_high_plane(Format f, int plane) {
  return high_words(f) > 0 && plane == beside_planes(f) - 1;
}

template <Format F>
ETE_DEVICE const uint8_t* beside_plane(const RowPlanes& planes, int plane) {
  if (is_high_plane(F, plane)) return planes.high;
  return plane == 0 ? planes.scales : planes.extra;
}

// Where, in a row of a plane, the numbers of a group begin.
template <Format F>
ETE_DEVICE int beside_offset(int plane, int group) {
  if (is_high_plane(F, plane)) return 4 * high_words(F) * group;
  if (is_k(F)) return 16 * (group / 8);
  if (F == Format::I8_ROW) return 0;
  if (F == Format::Q6_K) return plane == 0 ? 2 * group : group / 8 * 2;
  return group / groups_of_scale(F) * 2;
}

// ---- and what is made of it for a group, as words: [word][row of the tile]

// Words of scales and minimums. One term: each as a bf16 pair of its own twice, and one of what is left of it.
ETE_DEVICE constexpr int scale_words(Format f, int terms) {
  if (is_float(f)) return 0;
  return (scales_per_group(f) + (has_minimum(f) ? 1 : 0)) * (terms == 1 ? 2 : 1);
}
ETE_DEVICE constexpr int beside_words(Format f, int terms) { return scale_words(f, terms) + high_words(f); }

ETE_DEVICE void store_twice(uint32_t* words, int pitch, float value) {
  words[0] = pack_bf16(value, value);
  const float rest = value - bf16_low(words[0]);
  words[pitch] = pack_bf16(rest, rest);
}

// `pieces`: the piece of each plane that holds the group, `plane_pitch` bytes apart.
template <Format F, int terms>
ETE_DEVICE void make_beside(uint32_t* words, int pitch, const uint8_t* pieces, int plane_pitch, int group) {
  uint4 stored = make_uint4(0, 0, 0, 0);
  if constexpr (is_k(F)) {
    stored = load16(pieces);
  } else {
    const uint8_t* at = pieces + beside_offset<F>(0, group) % 16;
    stored.x = F == Format::I8_ROW ? load4(at) : load2(at);
    if constexpr (has_extra(F)) stored.y = load2(pieces + plane_pitch + beside_offset<F>(1, group) % 16);
  }
  const Scales scales = scales_of<F>(stored, group);
  constexpr int each = terms == 1 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < scales_per_group(F); ++i) {
    if constexpr (terms == 1) {
      store_twice(words + i * each * pitch, pitch, scales.scale[i]);
    } else {
      words[i * pitch] = __float_as_uint(scales.scale[i]);
    }
  }
  if constexpr (has_minimum(F)) {
    if constexpr (terms == 1) {
      store_twice(words + scales_per_group(F) * each * pitch, pitch, scales.minimum);
    } else {
      words[scales_per_group(F) * pitch] = __float_as_uint(scales.minimum);
    }
  }
  constexpr int high_plane = beside_planes(F) - 1, at = scale_words(F, terms);
#pragma unroll
  for (int i = 0; i < high_words(F); ++i)
    words[(at + i) * pitch] =
        load4(pieces + high_plane * plane_pitch + beside_offset<F>(high_plane, group) % 16 + 4 * i);
}

// ---- operands

constexpr uint32_t kOnePair = 0x3f803f80u;

// Constants of code_pairs that would be put into registers over and over.
struct PairConstants {
  uint32_t exponent, negative;
};
ETE_DEVICE PairConstants pair_constants() {
  return {static_cast<uint32_t>(made_again(0x43004300)), static_cast<uint32_t>(made_again(-0x3cff3d00))};
}
static_assert(static_cast<uint32_t>(-0x3cff3d00) == 0xc300c300u, "-128 twice");

// Bytes 0 and 2, and bytes 1 and 3, of four codes as exact bf16 pairs. 0x4300 | code is 128 + code for codes below 128.
template <Format F>
ETE_DEVICE uint2 code_pairs(uint32_t codes, const PairConstants& constants) {
  const uint32_t odd = codes >> 8, exponent = constants.exponent;
  if constexpr (is_byte(F)) {  // signed: the low seven bits, less 128, and less 128 again if the top bit is clear
    return make_uint2(
        bf16_pair_fma((codes & 0x007f007fu) | exponent, kOnePair, (codes & 0x00800080u) | constants.negative),
        bf16_pair_fma((odd & 0x007f007fu) | exponent, kOnePair, (odd & 0x00800080u) | constants.negative));
  } else {
    constexpr uint32_t mask = high_words(F) > 0 ? 0x00ff00ffu : 0x000f000fu;
    constexpr uint32_t less = (0xc300u + code_offset(F)) * 0x10001u;  // -(128 + offset)
    return make_uint2(bf16_pair_fma((codes & mask) | exponent, kOnePair, less),
                      bf16_pair_fma((odd & mask) | exponent, kOnePair, less));
  }
}

// What one row has beside its codes, in registers.
template <Format F, int terms>
struct Beside {
  uint32_t words[beside_words(F, terms) == 0 ? 1 : beside_words(F, terms)];
};

template <Format F, int terms>
ETE_DEVICE Beside<F, terms> load_beside(const uint32_t* words, int pitch) {
  Beside<F, terms> beside;
  beside.words[0] = 0;
#pragma unroll
  for (int i = 0; i < beside_words(F, terms); ++i) beside.words[i] = words[i * pitch];
  return beside;
}

template <Format F>
ETE_DEVICE uint32_t folded(const Beside<F, 1>& beside, int half, uint32_t codes) {
  constexpr int scales = scales_per_group(F);
  const uint32_t* scale = beside.words + (scales == 2 ? 2 * half : 0);
  if constexpr (has_minimum(F)) {
    const uint32_t rest = bf16_pair_fma(codes, scale[1], beside.words[2 * scales + 1]);
    return bf16_pair_fma(bf16_pair_fma(codes, scale[0], rest), kOnePair, beside.words[2 * scales]);
  } else {
    return bf16_pair_fma(codes, scale[0], bf16_pair_fma(codes, scale[1], 0u));
  }
}

// One row's two words of an operand (columns 2t.. and 2t + 8..) for columns 16 half .. 16 half + 15 of a group, by
// terms. `codes`: the codes of the group of a row whose number is `row8` modulo 8. Every format but BF16.
template <Format F, int terms>
ETE_DEVICE void row_operand(const uint8_t* codes, int row8, int t, int half, const PairConstants& constants,
                            const Beside<F, terms>& beside, uint2 (&operand)[weight_terms(F, terms)]) {
  if constexpr (F == Format::F32 || F == Format::F16) {
    float n[4];
    if constexpr (F == Format::F32) {
      const float4 four = load16_float(codes + 16 * piece_in_row<F>(row8, 4 * half + t));
      n[0] = four.x, n[1] = four.y, n[2] = four.z, n[3] = four.w;
    } else {
      const uint2 four = load8(codes + 16 * piece_in_row<F>(row8, 2 * half + t / 2) + 8 * (t % 2));
      n[0] = half_to_float(static_cast<uint16_t>(four.x & 0xffffu));
      n[1] = half_to_float(static_cast<uint16_t>(four.x >> 16));
      n[2] = half_to_float(static_cast<uint16_t>(four.y & 0xffffu));
      n[3] = half_to_float(static_cast<uint16_t>(four.y >> 16));
    }
    if constexpr (terms == 1) {
      operand[0] = make_uint2(pack_bf16(n[0], n[2]), pack_bf16(n[1], n[3]));
    } else {
      uint2 high, middle, low;
      split_bf16_pair(n[0], n[2], high.x, middle.x, low.x);
      split_bf16_pair(n[1], n[3], high.y, middle.y, low.y);
      operand[0] = high;
      operand[1] = middle;
      if constexpr (F == Format::F32) operand[2] = low;
    }
  } else {
    uint32_t word;
    if constexpr (is_byte(F)) {
      word = load4(codes + 16 * piece_in_row<F>(row8, half) + 4 * t);
    } else {
      word = load4(codes + 4 * t) >> (4 * half);
      constexpr int at = scale_words(F, terms);
      if constexpr (high_words(F) > 0) word = (word & 0x0f0f0f0fu) | spread_high(beside.words[at], 4 * half + t);
      if constexpr (high_words(F) > 1) word |= spread_high(beside.words[at + 1], 4 * half + t) << 1;
    }
    operand[0] = code_pairs<F>(word, constants);
    if constexpr (terms == 1) {
      operand[0].x = folded<F>(beside, half, operand[0].x);
      operand[0].y = folded<F>(beside, half, operand[0].y);
    }
  }
}

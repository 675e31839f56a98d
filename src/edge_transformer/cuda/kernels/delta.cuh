// What the kernels of the gated delta rule share: the pieces of prompt rows, the state of a sequence, heads.
//
// Per value head, state S [key_dim][value_dim] and a row's q, k, v, beta, g:
//   S = S * exp(g), d = beta * (v - S^T k), S = S + k d^T, o = S^T q.
// The state block of a sequence and layer is S [value_heads][key_dim][value_dim], then the values before the
// convolution of the last tokens, [channels][conv_width - 1], oldest first. Nobody clears it: at position 0 it counts
// as zero and is not read. Channels of qkv are q [key_heads][key_dim], k the same, v [value_heads][value_dim].
//
// Macros: ETE_KEY_DIM, ETE_VALUE_DIM: multiples of 4, at most 256.
#pragma once

#include "prelude.cuh"

constexpr int kKeyDim = ETE_KEY_DIM;
constexpr int kValueDim = ETE_VALUE_DIM;
constexpr int kPieceRows = 64;

// Prompt rows of one sequence between two absolute borders of 64 positions. `before`: rows of the sequence in this pass
// that come before the piece; `last`: none comes after.
struct Piece {
  int row, rows, position, sequence, before;
  bool last;
};

// Piece `index` of int32 [.][8]; rows is 0 behind the last.
ETE_DEVICE Piece piece_at(const int* pieces, int index) {
  const int* entry = pieces + 8 * index;
  return Piece{entry[0], entry[1], entry[2], entry[3], entry[4], entry[5] != 0};
}

struct Heads {
  int keys, values;
  int tiled;

  __device__ __forceinline__ int channels() const { return 2 * keys * kKeyDim + values * kValueDim; }
  // The head of q and k that goes with a value head.
  __device__ __forceinline__ int key_of(int value_head) const {
    return tiled ? value_head % keys : value_head / (values / keys);
  }
  __device__ __forceinline__ int query_channel(int value_head) const { return key_of(value_head) * kKeyDim; }
  __device__ __forceinline__ int key_channel(int value_head) const { return (keys + key_of(value_head)) * kKeyDim; }
  __device__ __forceinline__ int value_channel(int value_head) const {
    return 2 * keys * kKeyDim + value_head * kValueDim;
  }
  // Heads of q, k and v, one after another.
  __device__ __forceinline__ int all() const { return 2 * keys + values; }
  __device__ __forceinline__ int first_channel(int head) const {
    return head < 2 * keys ? head * kKeyDim : 2 * keys * kKeyDim + (head - 2 * keys) * kValueDim;
  }
  __device__ __forceinline__ int dim(int head) const { return head < 2 * keys ? kKeyDim : kValueDim; }
  // Of the history within a state block.
  __device__ __forceinline__ int64_t history_offset() const {
    return static_cast<int64_t>(values) * kKeyDim * kValueDim;
  }
};

ETE_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
ETE_DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
// log(1 + e^x) without overflow.
ETE_DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

ETE_DEVICE float* state_of(const int64_t* table, int sequence) { return reinterpret_cast<float*>(table[sequence]); }

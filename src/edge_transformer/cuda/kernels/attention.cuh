// What the attention kernels share: where keys and values lie, what a row sees, how a state takes more positions in.
//
// A state is (m, l, acc): the largest score m, l = sum of e^(s - m), acc = sum of e^(s - m) v, over the positions taken
// in. Empty: m = -infinity, l = 0, acc = 0. The running state of a row and head lies in global memory between launches:
// acc [head_dim] where the row's result will be, m and l in `state`, so that the tiles of a row can come in any number
// of launches, in ascending order, without a bit of difference.
//
// Set by the host for all of them: ETE_HEAD_DIM (multiple of 8, <= 256), ETE_GROUP (query heads of a KV head),
// ETE_HEADS (of those, how many a block takes), ETE_KV_BF16 (1: bf16, 0: f32), ETE_SOFTCAP (1: scores are capped).
#pragma once
#include "prelude.cuh"

// One block a multiprocessor is enough: without the 1 the assembler spills to make room for more.
#define ETE_ATTENTION_BOUNDS __launch_bounds__(ETE_THREADS, 1)

constexpr int kHeadDim = ETE_HEAD_DIM;
constexpr int kGroup = ETE_GROUP;
constexpr int kHeads = ETE_HEADS;
constexpr int kHeadChunks = (kGroup + kHeads - 1) / kHeads;
constexpr int kTilePositions = 512;
constexpr float kLog2E = 1.4426950408889634f;
constexpr int kElementBytes = ETE_KV_BF16 ? 2 : 4;
constexpr int kRowBytes = kHeadDim * kElementBytes;
// Copies of m and l that a row and head have in `state`: one for each block that holds columns of its acc.
constexpr int kStateColumns = 64;
constexpr int kStateCopies = (kHeadDim + kStateColumns - 1) / kStateColumns;

// Bits of `flags`: the states start empty; the states end as results.
constexpr int kBegin = 1;
constexpr int kEnd = 2;

// Where the tiles of one sequence are: one by one by a table of addresses, or in one run that starts with `first_tile`.
struct Tiles {
  const int64_t* table;  // null: `run`
  const uint8_t* run;
  int first_tile;
  int kv_heads;
};

// Keys of a KV head in a tile, [512][head_dim]; the values follow those of all heads, in the same order.
ETE_DEVICE const uint8_t* tile_keys(const Tiles& tiles, int tile, int kv_head) {
  const int64_t head_bytes = static_cast<int64_t>(kTilePositions) * kRowBytes;
  const uint8_t* base = tiles.table != nullptr
                            ? reinterpret_cast<const uint8_t*>(tiles.table[tile])
                            : tiles.run + (tile - tiles.first_tile) * (2 * tiles.kv_heads * head_bytes);
  return base + kv_head * head_bytes;
}
ETE_DEVICE int64_t values_offset(const Tiles& tiles) {
  return static_cast<int64_t>(tiles.kv_heads) * kTilePositions * kRowBytes;
}

ETE_DEVICE int first_visible(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// Positions [begin, end) of those from `first` to `last` that lie in the tiles of this launch.
struct Span {
  int begin;
  int end;
};
ETE_DEVICE Span in_tiles(int first, int last, int first_tile, int tile_count) {
  const int last_tile = min(last / kTilePositions, first_tile + tile_count - 1);
  return {max(first, first_tile * kTilePositions), min(last, last_tile * kTilePositions + kTilePositions - 1) + 1};
}

ETE_DEVICE float scaled_score(float product, float scale, float softcap) {
  const float score = product * scale;
#if ETE_SOFTCAP
  return softcap * tanhf(score / softcap);
#else
  return score;
#endif
}

// What is subtracted from scores: m, or 0 where nothing has been seen, so that e^(s - m) is 0 and not NaN.
ETE_DEVICE float reference_of(float m) { return m == -ETE_INFINITY ? 0.0f : m; }

// What acc is multiplied with when it is stored: by a launch that ends the states, or by one that keeps them.
ETE_DEVICE float stored_factor(float l, bool end) { return end ? 1.0f / l : 1.0f; }
// Adding +0 gives zeros one sign, whatever neutral states were merged or skipped.
ETE_DEVICE float stored(float acc, float factor) { return acc * factor + 0.0f; }

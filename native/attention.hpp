// Attention over KV tiles: what one instruction set provides, and the op made of it.
//
// For every row and query head, one state (m, l, acc) per absolute tile of 512 positions: m the largest visible score,
// l = sum of e^(s - m), acc = sum of e^(s - m) v. States merge in ascending order of tiles
// (kernels/attention_state.hpp); a tile of which a row sees nothing has the neutral state (-inf, 0, 0). So the numbers
// of a row depend on its own query, its kind and absolute positions only.
#pragma once
#include <cstdint>

#include "batch_view.hpp"
#include "thread_pool.hpp"

namespace ete {

constexpr int kMaxHeadDim = 256;
constexpr int kDecodeRows = 8;      // decode rows attended together
constexpr int kDecodeTiles = 4;     // tiles per row whose states are kept when kDecodeRows rows are attended together
constexpr int kMaxUnitVectors = 8;  // lane vectors of a prompt unit
constexpr int kBlockVectors = 2;    // lane vectors that share one pass over a tile
constexpr int kStatePadding = 16;   // a state is acc [head_dim], m, l, padding

// ops.backend.AttentionShape.
struct AttentionLayer {
  int layer;
  int heads;
  int kv_heads;
  int head_dim;    // a multiple of 8, at most kMaxHeadDim
  int rotary_dim;  // even, at most head_dim
  int rope;        // -1: none
  float scale;
  float softcap;   // 0: none
  int64_t window;  // 0: none
  bool bf16;       // dtype of the KV tiles, else float

  int group() const { return heads / kv_heads; }
  int64_t head_bytes() const { return int64_t(kTilePositions) * head_dim * (bf16 ? 2 : 4); }
  const void* keys(int64_t tile, int kv_head) const {
    return reinterpret_cast<const char*>(tile) + kv_head * head_bytes();
  }
  const void* values(int64_t tile, int kv_head) const { return keys(tile, kv_heads + kv_head); }
  int64_t first_visible(int64_t position) const { return window == 0 || position < window ? 0 : position - window + 1; }
  int64_t state_floats() const { return head_dim + kStatePadding; }
};

// Consecutive lanes of one prompt span and KV head. Lane i of a span is row i / group, query head i % group of the KV
// head.
struct PromptUnit {
  const float* q;        // [span rows][heads * head_dim]
  float* out;            // the same shape
  const int64_t* tiles;  // addresses, by absolute tile
  int64_t position;      // of the span's first row
  int kv_head;
  int64_t first_lane;
  int lanes;  // <= kMaxUnitVectors * W
};

// One decode row, KV head and tile: queries of the group, positions [begin, end) of the tile, one state per query head.
struct DecodeUnit {
  const float* q;  // [group][head_dim]
  const void* keys;
  const void* values;
  int begin;
  int end;
  float* states;  // [group][state_floats]
};

struct AttentionKernels {
  int lanes;
  void (*prompt)(const AttentionLayer& layer, const PromptUnit& unit, float* scratch);
  void (*decode)(const AttentionLayer& layer, const DecodeUnit& unit, float* scratch);
  // running = running merged with state (same layout).
  void (*merge)(const AttentionLayer& layer, const float* state, float* running);
  // out = acc / l.
  void (*finish)(const AttentionLayer& layer, const float* running, float* out);
};

// What the kernels take, whatever the instruction set. Throws std::invalid_argument that says what is supported.
void check_heads(int heads, int kv_heads, int head_dim, int rotary_dim);

// Bytes of scratch that the ops of a layer take from the pool, whatever the rows and the context.
struct AttentionWorkspace {
  int64_t shared_bytes;
  int64_t thread_bytes;
};
AttentionWorkspace attention_workspace(int heads, int head_dim);

// q and out [rows][heads * head_dim]. The pool's scratch must hold attention_workspace(heads, head_dim).
void attention(ThreadPool& pool, const AttentionKernels& kernels, const AttentionLayer& layer, const BatchView& batch,
               const float* q, float* out);

}  // namespace ete

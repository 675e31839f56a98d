#include "qk_norm_rope_append.hpp"

#include <cstring>

namespace ete {

namespace {

// Rows of a thread's share: below this waking the others takes longer than the work.
constexpr int64_t kRowGrain = 8;

void append_row(const ElementwiseKernels& kernels, const AttentionLayer& layer, const BatchView& batch,
                const AppendArgs& args, int64_t row) {
  const int64_t dim = layer.head_dim;
  HeadTurn turn{dim, args.q_norm, args.eps, 0, nullptr, nullptr};
  if (layer.rope >= 0) {
    const RopeRows& rope = batch.ropes[layer.rope];
    turn.half = rope.half;
    turn.cos = rope.cos + row * rope.half;
    turn.sin = rope.sin + row * rope.half;
  }
  for (int head = 0; head < layer.heads; ++head) {
    float* q = args.q + (row * layer.heads + head) * dim;
    kernels.turn_head(turn, q, q);
  }
  turn.norm = args.k_norm;
  const int64_t position = batch.positions[row];
  const int64_t tile = batch.tiles(layer.layer, batch.row_sequence[row])[position / kTilePositions];
  const int64_t offset = position % kTilePositions * dim;
  for (int head = 0; head < layer.kv_heads; ++head) {
    const float* k = args.k + (row * layer.kv_heads + head) * dim;
    const float* v = args.v + (row * layer.kv_heads + head) * dim;
    void* keys = const_cast<void*>(layer.keys(tile, head));
    void* values = const_cast<void*>(layer.values(tile, head));
    if (layer.bf16) {
      float turned[kMaxHeadDim];
      kernels.turn_head(turn, k, turned);
      kernels.to_bf16(turned, dim, static_cast<uint16_t*>(keys) + offset);
      kernels.to_bf16(v, dim, static_cast<uint16_t*>(values) + offset);
    } else {
      kernels.turn_head(turn, k, static_cast<float*>(keys) + offset);
      std::memcpy(static_cast<float*>(values) + offset, v, size_t(dim) * sizeof(float));
    }
  }
}

}  // namespace

void qk_norm_rope_append(ThreadPool& pool, const ElementwiseKernels& kernels, const AttentionLayer& layer,
                         const BatchView& batch, const AppendArgs& args) {
  pool.run(batch.rows, kRowGrain, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) append_row(kernels, layer, batch, args, row);
  });
}

}  // namespace ete

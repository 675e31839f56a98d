// Attention of prompt rows: one lane is one (row, query head) pair, so that nothing is summed across lanes and every
// lane does the same operations in the same order whoever its neighbours are. Masked positions score -inf and weigh
// exactly 0.
//
// Per tile and block of two lane vectors: scores[pos][lane] = q . k (keys broadcast), largest score, weights, then
// acc[d][lane] += v (broadcast) * weight with acc in registers over the whole tile, merged into the running state.
// Multiply-adds per lane vector and position: 2 * head_dim. bf16 tiles are widened once per unit of up to 8 lane
// vectors.
#include <array>

#include "kernels/attention_parts.hpp"
#include "kernels/attention_state.hpp"

namespace ete::ETE_ISA {

namespace {

#if defined(ETE_ISA_avx512)
constexpr int kKeys = 8;  // positions scored together
constexpr int kDims = 8;  // columns of V summed together
#else
constexpr int kKeys = 4;
constexpr int kDims = 4;
#endif
constexpr int kBlockLanes = kBlockVectors * W;

constexpr int round_down(int value, int multiple) { return value / multiple * multiple; }
constexpr int round_up(int value, int multiple) { return round_down(value + multiple - 1, multiple); }

// Where things lie in the scratch. Per block: q and acc [head_dim][lanes], then vectors of the lanes' states and
// limits.
struct PromptScratch {
  float* keys;    // [512][head_dim], bf16 tiles only
  float* values;  // the same
  float* scores;  // [512][lanes of a block]
  float* blocks;
  int64_t block_floats;

  PromptScratch(const AttentionLayer& layer, float* base)
      : keys(base),
        values(keys + kTilePositions * layer.head_dim),
        scores(values + kTilePositions * layer.head_dim),
        blocks(scores + kTilePositions * kBlockLanes),
        block_floats(int64_t(2 * layer.head_dim + 4) * kBlockLanes) {}
};

// The lanes of one block: queries, running states, and what they see.
struct Block {
  float* q;      // [head_dim][lanes]
  float* acc;    // [head_dim][lanes]
  float* m;      // [lanes]
  float* l;      // [lanes]
  float* first;  // [lanes] first visible position
  float* last;   // [lanes] last visible position
  int lanes;
  int64_t begin;  // positions that any lane sees
  int64_t end;
  int64_t all_begin;  // positions that every lane with a row sees
  int64_t all_end;
};

struct LaneRow {
  int64_t row;
  int head;
};
LaneRow row_of(const AttentionLayer& layer, const PromptUnit& unit, int64_t lane) {
  const int group = layer.group();
  const int64_t row = lane / group;
  return {row, unit.kv_head * group + int(lane - row * group)};
}

// W rows of up to W columns, to columns of W lanes, or back.
void pack_queries(const AttentionLayer& layer, const PromptUnit& unit, int64_t first_lane, int lanes, float* q) {
  const float* rows[W] = {};
  for (int i = 0; i < lanes; ++i) {
    const LaneRow lane = row_of(layer, unit, first_lane + i);
    rows[i] = unit.q + (lane.row * layer.heads + lane.head) * layer.head_dim;
  }
  for (int d = 0; d < layer.head_dim; d += W) {
    const int count = std::min(W, layer.head_dim - d);
    Vec square[W];
    for (int i = 0; i < W; ++i)
      square[i] = i >= lanes ? zero() : count == W ? load(rows[i] + d) : load_kv_eight(rows[i] + d);
    transpose(square);
    for (int j = 0; j < count; ++j) store(q + int64_t(d + j) * kBlockLanes, square[j]);
  }
}

void unpack_results(const AttentionLayer& layer, const PromptUnit& unit, int64_t first_lane, int lanes,
                    const float* acc, Vec l) {
  float* rows[W] = {};
  for (int i = 0; i < lanes; ++i) {
    const LaneRow lane = row_of(layer, unit, first_lane + i);
    rows[i] = unit.out + (lane.row * layer.heads + lane.head) * layer.head_dim;
  }
  for (int d = 0; d < layer.head_dim; d += W) {
    const int count = std::min(W, layer.head_dim - d);
    Vec square[W];
    for (int j = 0; j < W; ++j) square[j] = j < count ? finished(load(acc + int64_t(d + j) * kBlockLanes), l) : zero();
    transpose(square);
    for (int i = 0; i < lanes; ++i) {
      if (count == W) {
        store(rows[i] + d, square[i]);
      } else {
        store_eight(rows[i] + d, square[i]);
      }
    }
  }
}

Block make_block(const AttentionLayer& layer, const PromptUnit& unit, const PromptScratch& scratch, int index) {
  Block block;
  const int start = index * kBlockLanes;
  block.lanes = std::min(kBlockLanes, unit.lanes - start);
  block.q = scratch.blocks + index * scratch.block_floats;
  block.acc = block.q + int64_t(layer.head_dim) * kBlockLanes;
  block.m = block.acc + int64_t(layer.head_dim) * kBlockLanes;
  block.l = block.m + kBlockLanes;
  block.first = block.l + kBlockLanes;
  block.last = block.first + kBlockLanes;
  for (int v = 0; v < kBlockVectors; ++v) {
    const int lanes = std::clamp(block.lanes - v * W, 0, W);
    if (lanes > 0) pack_queries(layer, unit, unit.first_lane + start + v * W, lanes, block.q + v * W);
  }
  std::fill(block.acc, block.acc + int64_t(layer.head_dim) * kBlockLanes, 0.0f);
  std::fill(block.m, block.m + kBlockLanes, kNothing);
  std::fill(block.l, block.l + kBlockLanes, 0.0f);
  // Lanes without a row see no position.
  std::fill(block.first, block.first + kBlockLanes, 0.0f);
  std::fill(block.last, block.last + kBlockLanes, -1.0f);
  for (int i = 0; i < block.lanes; ++i) {
    const int64_t position = unit.position + row_of(layer, unit, unit.first_lane + start + i).row;
    block.first[i] = float(layer.first_visible(position));
    block.last[i] = float(position);
  }
  const int64_t first_position = unit.position + row_of(layer, unit, unit.first_lane + start).row;
  const int64_t last_position = unit.position + row_of(layer, unit, unit.first_lane + start + block.lanes - 1).row;
  block.begin = layer.first_visible(first_position);
  block.end = last_position + 1;
  block.all_begin = layer.first_visible(last_position);
  block.all_end = first_position + 1;
  return block;
}

// Scores of positions [begin, end) of the tile, a multiple of kKeys, and the largest of each lane.
template <int V>
void score(const AttentionLayer& layer, const Block& block, const float* keys, int64_t tile_start, int begin, int end,
           float* scores, Vec (&largest)[V]) {
  const Vec scale = set1(layer.scale);
  ETE_UNROLL
  for (int v = 0; v < V; ++v) largest[v] = set1(kNothing);
  for (int pos = begin; pos < end; pos += kKeys) {
    Vec sum[kKeys][V];
    ETE_UNROLL
    for (int j = 0; j < kKeys; ++j) {
      ETE_UNROLL
      for (int v = 0; v < V; ++v) sum[j][v] = zero();
    }
    const float* k = keys + int64_t(pos) * layer.head_dim;
    for (int d = 0; d < layer.head_dim; ++d) {
      Vec q[V];
      ETE_UNROLL
      for (int v = 0; v < V; ++v) q[v] = load(block.q + int64_t(d) * kBlockLanes + v * W);
      ETE_UNROLL
      for (int j = 0; j < kKeys; ++j) {
        const Vec key = set1(k[j * layer.head_dim + d]);
        ETE_UNROLL
        for (int v = 0; v < V; ++v) sum[j][v] = fma(key, q[v], sum[j][v]);
      }
    }
    const bool all = tile_start + pos >= block.all_begin && tile_start + pos + kKeys <= block.all_end;
    ETE_UNROLL
    for (int j = 0; j < kKeys; ++j) {
      const Vec position = set1(float(tile_start + pos + j));
      ETE_UNROLL
      for (int v = 0; v < V; ++v) {
        Vec s = capped(sum[j][v] * scale, layer.softcap);
        if (!all) {
          s = select_less(position, load(block.first + v * W), set1(kNothing), s);
          s = select_less(load(block.last + v * W), position, set1(kNothing), s);
        }
        store(scores + (int64_t(pos) + j) * kBlockLanes + v * W, s);
        largest[v] = max(largest[v], s);
      }
    }
  }
}

// Scores become weights e^(s - m); the sum of each lane, four partial sums by position.
template <int V>
void weigh(const Vec (&largest)[V], int begin, int end, float* scores, Vec (&total)[V]) {
  Vec reference[V];
  Vec sum[4][V];
  ETE_UNROLL
  for (int v = 0; v < V; ++v) {
    reference[v] = reference_of(largest[v]);
    for (int i = 0; i < 4; ++i) sum[i][v] = zero();
  }
  for (int pos = begin; pos < end; pos += 4) {
    ETE_UNROLL
    for (int i = 0; i < 4; ++i) {
      ETE_UNROLL
      for (int v = 0; v < V; ++v) {
        float* s = scores + (int64_t(pos) + i) * kBlockLanes + v * W;
        const Vec weight = exp(load(s) - reference[v]);
        store(s, weight);
        sum[i][v] = sum[i][v] + weight;
      }
    }
  }
  ETE_UNROLL
  for (int v = 0; v < V; ++v) total[v] = (sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v]);
}

// acc of the tile's positions [begin, end), merged into the block's.
template <int V>
void accumulate(const AttentionLayer& layer, const Block& block, const float* values, int begin, int end,
                const float* scores, const MergeFactors (&factors)[V]) {
  for (int d = 0; d < layer.head_dim; d += kDims) {
    Vec sum[kDims][V];
    ETE_UNROLL
    for (int j = 0; j < kDims; ++j) {
      ETE_UNROLL
      for (int v = 0; v < V; ++v) sum[j][v] = zero();
    }
    for (int pos = begin; pos < end; ++pos) {
      Vec weight[V];
      ETE_UNROLL
      for (int v = 0; v < V; ++v) weight[v] = load(scores + int64_t(pos) * kBlockLanes + v * W);
      const float* row = values + int64_t(pos) * layer.head_dim + d;
      ETE_UNROLL
      for (int j = 0; j < kDims; ++j) {
        const Vec value = set1(row[j]);
        ETE_UNROLL
        for (int v = 0; v < V; ++v) sum[j][v] = fma(value, weight[v], sum[j][v]);
      }
    }
    ETE_UNROLL
    for (int j = 0; j < kDims; ++j) {
      ETE_UNROLL
      for (int v = 0; v < V; ++v) {
        float* acc = block.acc + int64_t(d + j) * kBlockLanes + v * W;
        store(acc, merged(factors[v], load(acc), sum[j][v]));
      }
    }
  }
}

template <int V>
void attend_tile(const AttentionLayer& layer, const Block& block, const float* keys, const float* values,
                 int64_t tile_start, float* scores) {
  const int begin = int(std::max(block.begin - tile_start, int64_t(0)));
  const int end = int(std::min(block.end - tile_start, int64_t(kTilePositions)));
  if (begin >= end) return;
  const int rounded_begin = round_down(begin, kKeys);
  const int rounded_end = round_up(end, kKeys);
  Vec largest[V];
  Vec total[V];
  score<V>(layer, block, keys, tile_start, rounded_begin, rounded_end, scores, largest);
  weigh<V>(largest, rounded_begin, rounded_end, scores, total);
  MergeFactors factors[V];
  ETE_UNROLL
  for (int v = 0; v < V; ++v) {
    factors[v] = merge_factors(load(block.m + v * W), largest[v]);
    store(block.m + v * W, factors[v].m);
    store(block.l + v * W, merged(factors[v], load(block.l + v * W), total[v]));
  }
  accumulate<V>(layer, block, values, begin, end, scores, factors);
}

// Elements [begin, end) of a head's tile as floats: in place, or widened into `copy`.
const float* as_floats(const AttentionLayer& layer, const void* tile, int begin, int end, float* copy) {
  if (!layer.bf16) return static_cast<const float*>(tile);
  const auto* words = static_cast<const uint16_t*>(tile);
  const int64_t stop = int64_t(end) * layer.head_dim;
  int64_t i = int64_t(begin) * layer.head_dim;
  for (; i + W <= stop; i += W) store(copy + i, load_bf16(words + i));
  if (i < stop) store_eight(copy + i, load_kv_eight(words + i));
  return copy;
}

}  // namespace

void attend_prompt(const AttentionLayer& layer, const PromptUnit& unit, float* base) {
  const PromptScratch scratch(layer, base);
  const int count = (unit.lanes + kBlockLanes - 1) / kBlockLanes;
  std::array<Block, kMaxUnitVectors / kBlockVectors> blocks{};
  for (int i = 0; i < count; ++i) blocks[i] = make_block(layer, unit, scratch, i);
  const int64_t unit_begin = blocks[0].begin;
  const int64_t unit_end = blocks[count - 1].end;
  for (int64_t tile = unit_begin / kTilePositions; tile * kTilePositions < unit_end; ++tile) {
    const int64_t start = tile * kTilePositions;
    const int begin = round_down(int(std::max(unit_begin - start, int64_t(0))), kKeys);
    const int end = round_up(int(std::min(unit_end - start, int64_t(kTilePositions))), kKeys);
    const float* keys = as_floats(layer, layer.keys(unit.tiles[tile], unit.kv_head), begin, end, scratch.keys);
    const float* values = as_floats(layer, layer.values(unit.tiles[tile], unit.kv_head), begin, end, scratch.values);
    for (int i = 0; i < count; ++i) {
      if (blocks[i].lanes > W) {
        attend_tile<2>(layer, blocks[i], keys, values, start, scratch.scores);
      } else {
        attend_tile<1>(layer, blocks[i], keys, values, start, scratch.scores);
      }
    }
  }
  for (int i = 0; i < count; ++i) {
    for (int v = 0; v * W < blocks[i].lanes; ++v) {
      unpack_results(layer, unit, unit.first_lane + i * kBlockLanes + v * W, std::min(W, blocks[i].lanes - v * W),
                     blocks[i].acc + v * W, load(blocks[i].l + v * W));
    }
  }
}

}  // namespace ete::ETE_ISA

#include "attention.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "balanced.hpp"

namespace ete {

namespace {

constexpr int64_t kLanesAtMost = 16;  // of a vector, whatever the instruction set
// Multiply-adds below which a job stays on one thread (about 2 us of work).
constexpr int64_t kWorthThreads = 100000;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// ---- Prompt rows ----------------------------------------------------------------------------------------------------

int64_t units_of(const AttentionLayer& layer, const PromptSpan& span, int64_t unit_lanes) {
  return (span.row_count * layer.group() + unit_lanes - 1) / unit_lanes * layer.kv_heads;
}

// Prompt unit `index` of a pass, counted over spans, then KV heads, then lanes.
PromptUnit prompt_unit(const AttentionLayer& layer, const BatchView& batch, int64_t unit_lanes, int64_t index,
                       const float* q, float* out) {
  size_t s = 0;
  while (index >= units_of(layer, batch.spans[s], unit_lanes)) index -= units_of(layer, batch.spans[s++], unit_lanes);
  const PromptSpan& span = batch.spans[s];
  const int64_t span_lanes = span.row_count * layer.group();
  const int64_t per_head = (span_lanes + unit_lanes - 1) / unit_lanes;
  const int64_t first_lane = index % per_head * unit_lanes;
  const int64_t offset = span.row_start * layer.heads * layer.head_dim;
  return {q + offset,
          out + offset,
          batch.tiles(layer.layer, span.sequence),
          span.position,
          int(index / per_head),
          first_lane,
          int(std::min(unit_lanes, span_lanes - first_lane))};
}

int64_t prompt_cost(const AttentionLayer& layer, const PromptUnit& unit) {
  const int64_t first = unit.position + unit.first_lane / layer.group();
  const int64_t last = unit.position + (unit.first_lane + unit.lanes - 1) / layer.group();
  return (last + 1 - layer.first_visible(first)) * unit.lanes * layer.head_dim * 2;
}

void attend_prompt_rows(ThreadPool& pool, const AttentionKernels& kernels, const AttentionLayer& layer,
                        const BatchView& batch, const float* q, float* out) {
  // Large units share the widening of bf16 tiles; smaller ones when there would be too few for the threads.
  int64_t unit_lanes = int64_t(kMaxUnitVectors) * kernels.lanes;
  const auto count_units = [&] {
    int64_t units = 0;
    for (const PromptSpan& span : batch.spans) units += units_of(layer, span, unit_lanes);
    return units;
  };
  while (unit_lanes > kBlockVectors * kernels.lanes && count_units() < 4 * int64_t(pool.threads())) unit_lanes /= 2;
  run_balanced(
      pool, count_units(), kWorthThreads,
      [&](int64_t unit) { return prompt_cost(layer, prompt_unit(layer, batch, unit_lanes, unit, q, out)); },
      [&](int thread, int64_t unit) {
        auto* scratch = reinterpret_cast<float*>(pool.thread_scratch(thread));
        kernels.prompt(layer, prompt_unit(layer, batch, unit_lanes, unit, q, out), scratch);
      });
}

// ---- Decode rows ----------------------------------------------------------------------------------------------------

// Decode rows [first, first + rows), rows <= kDecodeRows: `tiles` tiles of each at a time, then their states are merged
// into the running ones in ascending order.
class DecodeRows {
 public:
  DecodeRows(ThreadPool& pool, const AttentionKernels& kernels, const AttentionLayer& layer, const BatchView& batch,
             int64_t first, int64_t rows)
      : pool_(pool),
        kernels_(kernels),
        layer_(layer),
        batch_(batch),
        first_(first),
        rows_(rows),
        tiles_(kDecodeRows * kDecodeTiles / rows),
        running_(reinterpret_cast<float*>(pool.shared_scratch())),
        states_(running_ + kDecodeRows * layer.heads * layer.state_floats()) {}

  void attend(const float* q, float* out) {
    const int64_t heads = rows_ * layer_.heads;
    for (int64_t i = 0; i < heads; ++i) start(running_ + i * layer_.state_floats());
    int64_t tile = std::numeric_limits<int64_t>::max();
    int64_t last_tile = 0;
    for (int64_t row = first_; row < first_ + rows_; ++row) {
      tile = std::min(tile, layer_.first_visible(batch_.positions[row]) / kTilePositions);
      last_tile = std::max(last_tile, int64_t(batch_.positions[row]) / kTilePositions);
    }
    tiles_ = std::min(tiles_, last_tile + 1 - tile);
    for (; tile <= last_tile; tile += tiles_) {
      attend_tiles(q, tile);
      for (int64_t pair = 0; pair < rows_ * layer_.kv_heads; ++pair) merge_tiles(tile, pair);
    }
    for (int64_t i = 0; i < heads; ++i) {
      kernels_.finish(layer_, running_ + i * layer_.state_floats(),
                      out + (first_ * layer_.heads + i) * layer_.head_dim);
    }
  }

 private:
  struct Range {
    int begin;
    int end;
  };

  // What `row` sees of a tile.
  Range seen(int64_t row, int64_t tile) const {
    const int64_t position = batch_.positions[row];
    const int64_t start = tile * kTilePositions;
    const int64_t begin = std::max(layer_.first_visible(position) - start, int64_t(0));
    const int64_t end = std::min(position + 1 - start, int64_t(kTilePositions));
    return {int(std::min(begin, int64_t(kTilePositions))), int(std::max(end, int64_t(0)))};
  }

  void start(float* state) const {
    std::fill(state, state + layer_.state_floats(), 0.0f);
    state[layer_.head_dim] = -std::numeric_limits<float>::infinity();
  }

  float* states_of(int64_t pair, int64_t tile_index) const {
    return states_ + (pair * tiles_ + tile_index) * layer_.group() * layer_.state_floats();
  }

  void attend_tiles(const float* q, int64_t first_tile) {
    const int64_t work_per_position = int64_t(2) * layer_.head_dim * layer_.group();
    run_balanced(
        pool_, rows_ * layer_.kv_heads * tiles_, kWorthThreads,
        [&](int64_t unit) {
          const Range range = seen(first_ + unit / tiles_ / layer_.kv_heads, first_tile + unit % tiles_);
          return std::max(range.end - range.begin, 0) * work_per_position;
        },
        [&](int thread, int64_t unit) {
          const int64_t pair = unit / tiles_;
          const int64_t row = first_ + pair / layer_.kv_heads;
          const int kv_head = int(pair % layer_.kv_heads);
          const int64_t tile = first_tile + unit % tiles_;
          const Range range = seen(row, tile);
          if (range.begin >= range.end) return;
          const int64_t address = batch_.tiles(layer_.layer, batch_.row_sequence[row])[tile];
          const DecodeUnit work{q + (row * layer_.heads + kv_head * layer_.group()) * layer_.head_dim,
                                layer_.keys(address, kv_head),
                                layer_.values(address, kv_head),
                                range.begin,
                                range.end,
                                states_of(pair, unit % tiles_)};
          kernels_.decode(layer_, work, reinterpret_cast<float*>(pool_.thread_scratch(thread)));
        });
  }

  void merge_tiles(int64_t first_tile, int64_t pair) const {
    for (int64_t i = 0; i < tiles_; ++i) {
      const Range range = seen(first_ + pair / layer_.kv_heads, first_tile + i);
      if (range.begin >= range.end) continue;
      for (int head = 0; head < layer_.group(); ++head) {
        kernels_.merge(layer_, states_of(pair, i) + head * layer_.state_floats(),
                       running_ + (pair * layer_.group() + head) * layer_.state_floats());
      }
    }
  }

  ThreadPool& pool_;
  const AttentionKernels& kernels_;
  const AttentionLayer& layer_;
  const BatchView& batch_;
  int64_t first_;
  int64_t rows_;
  int64_t tiles_;
  float* running_;
  float* states_;
};

}  // namespace

void check_heads(int heads, int kv_heads, int head_dim, int rotary_dim) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
  };
  require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "attention has " + std::to_string(heads) + " heads and " +
                                                                  std::to_string(kv_heads) +
                                                                  " KV heads; needed: a multiple");
  require(
      head_dim >= 8 && head_dim % 8 == 0 && head_dim <= kMaxHeadDim,
      "head_dim is " + std::to_string(head_dim) + "; supported: multiples of 8 up to " + std::to_string(kMaxHeadDim));
  require(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= head_dim,
          "rotary_dim is " + std::to_string(rotary_dim) + "; needed: even, at most head_dim");
}

AttentionWorkspace attention_workspace(int heads, int head_dim) {
  const int64_t state = head_dim + kStatePadding;
  const int64_t shared = kDecodeRows * heads * state * (1 + kDecodeTiles);
  const int64_t tile = 2 * int64_t(kTilePositions) * head_dim;
  const int64_t scores = int64_t(kTilePositions) * kBlockVectors * kLanesAtMost;
  const int64_t blocks = (2 * int64_t(head_dim) + 4) * kMaxUnitVectors * kLanesAtMost;
  return {round_up(shared * 4, 64), round_up((tile + scores + blocks) * 4, 64)};
}

void attention(ThreadPool& pool, const AttentionKernels& kernels, const AttentionLayer& layer, const BatchView& batch,
               const float* q, float* out) {
  if (batch.prompt_rows > 0) attend_prompt_rows(pool, kernels, layer, batch, q, out);
  for (int64_t row = batch.prompt_rows; row < batch.rows; row += kDecodeRows) {
    const int64_t rows = std::min(int64_t(kDecodeRows), batch.rows - row);
    DecodeRows(pool, kernels, layer, batch, row, rows).attend(q, out);
  }
}

}  // namespace ete

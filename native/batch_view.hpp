// One pass as the kernels see it: ops.batch.Batch with its arrays as pointers. The arrays belong to Python.
#pragma once
#include <cstdint>
#include <vector>

namespace ete {

constexpr int kTilePositions = 512;  // ops.batch.KV_TILE_POSITIONS

struct PromptSpan {
  int64_t row_start;
  int64_t row_count;
  int64_t position;
  int64_t sequence;
};

struct TileTable {
  const int64_t* tiles;  // [sequences][tiles_per_sequence] addresses
  int64_t tiles_per_sequence;
};

struct RopeRows {
  const float* cos;  // [rows][half]
  const float* sin;
  int64_t half;
};

// A copy of a sequence's blocks of state, as they are before the row at `position`.
struct StateCheckpoint {
  int64_t sequence;
  int64_t position;          // inside of the sequence's span, or its end; ascending
  const int64_t* addresses;  // [layers] where each layer's block goes
  int64_t layers;
};

struct BatchView {
  int64_t rows;
  int64_t prompt_rows;
  const int32_t* positions;     // [rows]
  const int32_t* row_sequence;  // [rows]
  std::vector<PromptSpan> spans;
  std::vector<RopeRows> ropes;
  std::vector<TileTable> tables;       // per layer
  std::vector<const int64_t*> states;  // per layer [sequences] addresses of blocks; null where a layer has none
  std::vector<StateCheckpoint> checkpoints;

  const int64_t* tiles(int layer, int64_t sequence) const {
    return tables[layer].tiles + sequence * tables[layer].tiles_per_sequence;
  }
};

}  // namespace ete

// Binds one pass's arrays. What could make a kernel write or read outside of them is checked here, once per pass; which
// tiles are there is checked by each op (attention_bindings.cpp).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "batch_view.hpp"
#include "bindings.hpp"
#include "gated_delta.hpp"

namespace nb = nanobind;

namespace ete {

namespace {

template <typename T, int Dimensions>
using Array = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// The kernels compare positions as floats.
constexpr int64_t kMaxPosition = int64_t(1) << 24;

void check_positions(const BatchView& batch) {
  int64_t tiles = kMaxPosition / kTilePositions;
  for (const TileTable& table : batch.tables) {
    if (table.tiles_per_sequence > 0) tiles = std::min(tiles, table.tiles_per_sequence);  // else: no attention
  }
  for (int64_t row = 0; row < batch.rows; ++row) {
    const int64_t position = batch.positions[row];
    if (position < 0 || position / kTilePositions >= tiles) {
      throw std::invalid_argument("row " + std::to_string(row) + " has position " + std::to_string(position) +
                                  "; a tile table of the pass has " + std::to_string(tiles) +
                                  " tiles of 512 positions");
    }
  }
}

void check_spans(const BatchView& batch) {
  int64_t row = 0;
  for (const PromptSpan& span : batch.spans) {
    require(span.row_start == row && span.row_count > 0 && row + span.row_count <= batch.prompt_rows,
            "prompt spans must follow each other and cover the prompt rows");
    for (int64_t i = 0; i < span.row_count; ++i, ++row) {
      if (batch.positions[row] != span.position + i || batch.row_sequence[row] != span.sequence) {
        throw std::invalid_argument("row " + std::to_string(row) +
                                    " does not have the position and sequence of its prompt span");
      }
    }
  }
  require(row == batch.prompt_rows, "prompt spans must cover the prompt rows");
}

void check_checkpoints(const BatchView& batch) {
  size_t inside = 0;
  for (const PromptSpan& span : batch.spans) {
    int64_t newest = span.position;
    for (const StateCheckpoint& checkpoint : batch.checkpoints) {
      if (checkpoint.sequence != span.sequence) continue;
      require(checkpoint.position % kDeltaPiece == 0 && checkpoint.position > newest &&
                  checkpoint.position <= span.position + span.row_count,
              "checkpoints of a sequence must lie on ascending multiples of 64 positions inside of its prompt rows");
      newest = checkpoint.position;
      ++inside;
    }
  }
  require(inside == batch.checkpoints.size(), "a checkpoint must be of a sequence that has one span of prompt rows");
}

BatchView* make_batch(int64_t prompt_rows, Array<int32_t, 1> positions, Array<int32_t, 1> row_sequence,
                      const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>& spans,
                      const std::vector<Array<float, 2>>& rope_cos, const std::vector<Array<float, 2>>& rope_sin,
                      const std::vector<Array<int64_t, 2>>& tile_tables,
                      const std::vector<Array<int64_t, 1>>& state_tables,
                      const std::vector<std::tuple<int64_t, int64_t, Array<int64_t, 1>>>& state_checkpoints) {
  auto batch = std::make_unique<BatchView>();
  batch->rows = int64_t(positions.shape(0));
  batch->prompt_rows = prompt_rows;
  batch->positions = positions.data();
  batch->row_sequence = row_sequence.data();
  require(int64_t(row_sequence.shape(0)) == batch->rows && prompt_rows >= 0 && prompt_rows <= batch->rows,
          "positions and row_sequence must have one entry per row, and prompt rows be some of them");
  for (const auto& [row_start, row_count, position, sequence] : spans) {
    batch->spans.push_back({row_start, row_count, position, sequence});
  }
  require(rope_cos.size() == rope_sin.size(), "cos and sin must have as many ropes");
  for (size_t i = 0; i < rope_cos.size(); ++i) {
    require(int64_t(rope_cos[i].shape(0)) == batch->rows && int64_t(rope_sin[i].shape(0)) == batch->rows &&
                rope_cos[i].shape(1) == rope_sin[i].shape(1),
            "cos and sin must have one row per row of the pass, and as many columns");
    batch->ropes.push_back({rope_cos[i].data(), rope_sin[i].data(), int64_t(rope_cos[i].shape(1))});
  }
  int64_t sequences = 0;
  for (int64_t row = 0; row < batch->rows; ++row) {
    require(row_sequence.data()[row] >= 0, "row_sequence must not be negative");
    sequences = std::max(sequences, int64_t(row_sequence.data()[row]) + 1);
  }
  for (const auto& table : tile_tables) {
    require(int64_t(table.shape(0)) >= sequences, "a tile table has fewer rows than the pass has sequences");
    batch->tables.push_back({table.data(), int64_t(table.shape(1))});
  }
  for (const auto& table : state_tables) {
    const auto blocks = int64_t(table.shape(0));
    require(blocks == 0 || blocks >= sequences, "a table of states has fewer entries than the pass has sequences");
    batch->states.push_back(blocks == 0 ? nullptr : table.data());
  }
  for (const auto& [sequence, position, addresses] : state_checkpoints) {
    batch->checkpoints.push_back({sequence, position, addresses.data(), int64_t(addresses.shape(0))});
  }
  check_positions(*batch);
  check_spans(*batch);
  check_checkpoints(*batch);
  return batch.release();
}

}  // namespace

void bind_batch(nb::module_& m) {
  // A converted array would be a copy that dies with the call.
  nb::class_<BatchView>(m, "BatchView")
      .def(nb::new_(&make_batch), nb::arg("prompt_rows"), nb::arg("positions").noconvert(),
           nb::arg("row_sequence").noconvert(), nb::arg("prompt_spans"), nb::arg("rope_cos").noconvert(),
           nb::arg("rope_sin").noconvert(), nb::arg("tile_tables").noconvert(),
           nb::arg("state_tables").noconvert() = std::vector<Array<int64_t, 1>>(),
           nb::arg("state_checkpoints").noconvert() = std::vector<std::tuple<int64_t, int64_t, Array<int64_t, 1>>>())
      .def_ro("rows", &BatchView::rows)
      .def_ro("prompt_rows", &BatchView::prompt_rows);
}

}  // namespace ete

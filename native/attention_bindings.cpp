// Binds one pass's arrays and the attention of one layer. What could make a kernel write or read outside its arrays is
// checked here, once per pass or per op; shapes of tensors are checked by cpu/backend.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "attention.hpp"
#include "bindings.hpp"
#include "elementwise.hpp"
#include "isa.hpp"

namespace nb = nanobind;

namespace ete {

ETE_KERNEL_TABLE(AttentionKernels, attention_kernels)
ETE_KERNEL_TABLE(ElementwiseKernels, elementwise_kernels)

namespace {

using Address = uint64_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

template <typename T, int Dimensions>
using Array = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;

// For what is checked seldom: the message is built in any case.
void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

// The kernels compare positions as floats.
constexpr int64_t kMaxPosition = int64_t(1) << 24;

void check_positions(const BatchView& batch) {
  int64_t tiles = kMaxPosition / kTilePositions;
  for (const TileTable& table : batch.tables) tiles = std::min(tiles, table.tiles_per_sequence);
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

BatchView* make_batch(int64_t prompt_rows, Array<int32_t, 1> positions, Array<int32_t, 1> row_sequence,
                      const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>& spans,
                      const std::vector<Array<float, 2>>& rope_cos, const std::vector<Array<float, 2>>& rope_sin,
                      const std::vector<Array<int64_t, 2>>& tile_tables) {
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
  check_positions(*batch);
  check_spans(*batch);
  return batch.release();
}

// Attention of one layer, bound to a pool and an instruction set.
class AttentionOp {
 public:
  AttentionOp(ThreadPool& pool, int isa, int layer, int heads, int kv_heads, int head_dim, int rotary_dim, int rope,
              float scale, float softcap, int64_t window, bool bf16)
      : pool_(pool),
        kernels_(attention_kernels_by_isa(isa)),
        elementwise_(elementwise_kernels_by_isa(isa)),
        layer_{layer, heads, kv_heads, head_dim, rotary_dim, rope, scale, softcap, window, bf16} {
    require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "attention has " + std::to_string(heads) +
                                                                    " heads and " + std::to_string(kv_heads) +
                                                                    " KV heads; needed: a multiple");
    require(
        head_dim >= 8 && head_dim % 8 == 0 && head_dim <= kMaxHeadDim,
        "head_dim is " + std::to_string(head_dim) + "; supported: multiples of 8 up to " + std::to_string(kMaxHeadDim));
    require(rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= head_dim,
            "rotary_dim is " + std::to_string(rotary_dim) + "; needed: even, at most head_dim");
    require(layer >= 0 && rope >= -1 && window >= 0 && softcap >= 0,
            "layer, rope (-1: none), window and softcap (0: none) must not be negative");
  }

  void append(const BatchView& batch, Address q, Address k, Address v, Address q_norm, Address k_norm,
              float eps) const {
    check(batch);
    if (layer_.rope >= int(batch.ropes.size()) ||
        (layer_.rope >= 0 && 2 * batch.ropes[layer_.rope].half != layer_.rotary_dim)) {
      throw std::invalid_argument("the batch has no cos and sin of rope " + std::to_string(layer_.rope) + " for " +
                                  std::to_string(layer_.rotary_dim) + " rotated columns");
    }
    for (int64_t row = 0; row < batch.rows; ++row) {
      const int64_t position = batch.positions[row];
      check_tiles(batch, batch.row_sequence[row], position, position);
    }
    const AppendArgs args{
        at<float>(q), at<const float>(k), at<const float>(v), at<const float>(q_norm), at<const float>(k_norm), eps};
    const nb::gil_scoped_release release;
    qk_norm_rope_append(pool_, elementwise_, layer_, batch, args);
  }

  void attend(const BatchView& batch, Address q, Address out) const {
    check(batch);
    for (const PromptSpan& span : batch.spans) {
      check_tiles(batch, span.sequence, layer_.first_visible(span.position), span.position + span.row_count - 1);
    }
    for (int64_t row = batch.prompt_rows; row < batch.rows; ++row) {
      const int64_t position = batch.positions[row];
      check_tiles(batch, batch.row_sequence[row], layer_.first_visible(position), position);
    }
    const AttentionWorkspace needed = attention_workspace(layer_.heads, layer_.head_dim);
    if (needed.shared_bytes > int64_t(pool_.shared_bytes()) || needed.thread_bytes > int64_t(pool_.thread_bytes())) {
      throw std::length_error(
          "the thread pool's scratch is too small for attention: reserve "
          "attention_workspace(heads, head_dim) at load");
    }
    const nb::gil_scoped_release release;
    attention(pool_, kernels_, layer_, batch, at<const float>(q), at<float>(out));
  }

 private:
  void check(const BatchView& batch) const {
    if (layer_.layer >= int(batch.tables.size())) {
      throw std::invalid_argument("the batch has no tile table of layer " + std::to_string(layer_.layer));
    }
  }

  // Positions first to last are about to be read or written: their tiles must be there.
  void check_tiles(const BatchView& batch, int64_t sequence, int64_t first, int64_t last) const {
    const int64_t* tiles = batch.tiles(layer_.layer, sequence);
    for (int64_t tile = first / kTilePositions; tile <= last / kTilePositions; ++tile) {
      if (tiles[tile] == 0) {
        throw std::invalid_argument("layer " + std::to_string(layer_.layer) + ", sequence " + std::to_string(sequence) +
                                    ": KV tile " + std::to_string(tile) + " is needed but freed");
      }
    }
  }

  ThreadPool& pool_;
  const AttentionKernels& kernels_;
  const ElementwiseKernels& elementwise_;
  AttentionLayer layer_;
};

}  // namespace

void bind_attention(nb::module_& m) {
  // A converted array would be a copy that dies with the call.
  nb::class_<BatchView>(m, "BatchView")
      .def(nb::new_(&make_batch), nb::arg("prompt_rows"), nb::arg("positions").noconvert(),
           nb::arg("row_sequence").noconvert(), nb::arg("prompt_spans"), nb::arg("rope_cos").noconvert(),
           nb::arg("rope_sin").noconvert(), nb::arg("tile_tables").noconvert())
      .def_ro("rows", &BatchView::rows)
      .def_ro("prompt_rows", &BatchView::prompt_rows);
  nb::class_<AttentionOp>(m, "AttentionOp")
      .def(nb::init<ThreadPool&, int, int, int, int, int, int, int, float, float, int64_t, bool>(), nb::arg("pool"),
           nb::arg("isa"), nb::arg("layer"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("rotary_dim"), nb::arg("rope"), nb::arg("scale"), nb::arg("softcap"), nb::arg("window"),
           nb::arg("bf16"), nb::keep_alive<1, 2>())
      .def("append", &AttentionOp::append, nb::arg("batch"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
           nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("eps"))
      .def("attend", &AttentionOp::attend, nb::arg("batch"), nb::arg("q"), nb::arg("out"));
  m.def(
      "attention_workspace",
      [](int heads, int head_dim) {
        const AttentionWorkspace needed = attention_workspace(heads, head_dim);
        return std::pair(needed.shared_bytes, needed.thread_bytes);
      },
      nb::arg("heads"), nb::arg("head_dim"), "Bytes of shared scratch and of each thread's scratch.");
}

}  // namespace ete

// Binds the attention of one layer. That the tiles of every position are there, and that the pool's scratch is large
// enough, is checked here; the pass's arrays in batch_bindings.cpp, shapes of tensors by cpu/backend.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <stdexcept>
#include <string>

#include "address.hpp"
#include "attention.hpp"
#include "bindings.hpp"
#include "elementwise.hpp"
#include "isa.hpp"
#include "qk_norm_rope_append.hpp"

namespace nb = nanobind;

namespace ete {

ETE_KERNEL_TABLE(AttentionKernels, attention_kernels)
ETE_KERNEL_TABLE(ElementwiseKernels, elementwise_kernels)

namespace {

// Attention of one layer, bound to a pool and an instruction set.
class AttentionOp {
 public:
  AttentionOp(ThreadPool& pool, int isa, int layer, int heads, int kv_heads, int head_dim, int rotary_dim, int rope,
              float scale, float softcap, int64_t window, bool bf16)
      : pool_(pool),
        kernels_(attention_kernels_by_isa(isa)),
        elementwise_(elementwise_kernels_by_isa(isa)),
        layer_{layer, heads, kv_heads, head_dim, rotary_dim, rope, scale, softcap, window, bf16} {
    check_heads(heads, kv_heads, head_dim, rotary_dim);
    if (layer < 0 || rope < -1 || window < 0 || !(softcap >= 0)) {
      throw std::invalid_argument("layer, rope (-1: none), window and softcap (0: none) must not be negative");
    }
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
  m.def("check_heads", &check_heads, nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("rotary_dim"),
        "Raises ValueError that says what is supported when the kernels do not take these heads.");
}

}  // namespace ete

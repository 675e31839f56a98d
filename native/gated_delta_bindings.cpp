// Binds the gated delta rule of one layer. That every sequence has a block, and that the pool's scratch is large
// enough, is checked here; the pass's arrays in batch_bindings.cpp, shapes of tensors by cpu/backend.py.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "address.hpp"
#include "bindings.hpp"
#include "gated_delta.hpp"
#include "isa.hpp"

namespace nb = nanobind;

namespace ete {

ETE_KERNEL_TABLE(DeltaKernels, delta_kernels)

namespace {

// Bound to a pool and an instruction set.
class DeltaOp {
 public:
  DeltaOp(ThreadPool& pool, int isa, int layer, int key_heads, int value_heads, int key_dim, int value_dim,
          int conv_width, bool tiled, float norm_eps)
      : pool_(pool),
        kernels_(delta_kernels_by_isa(isa)),
        layer_{layer, key_heads, value_heads, key_dim, value_dim, conv_width, tiled, norm_eps} {
    check_delta(key_heads, value_heads, key_dim, value_dim, conv_width);
    if (layer < 0) throw std::invalid_argument("layer must not be negative");
  }

  void run(const BatchView& batch, Address qkv, Address z, Address a, Address b, Address conv, Address decay,
           Address dt_bias, Address norm, Address out) const {
    if (layer_.layer >= int(batch.states.size()) || !batch.states[layer_.layer]) {
      throw std::invalid_argument("the batch has no blocks of state for layer " + std::to_string(layer_.layer));
    }
    for (int64_t row = 0; row < batch.rows; ++row) {
      if (batch.states[layer_.layer][batch.row_sequence[row]] == 0) {
        throw std::invalid_argument("row " + std::to_string(row) + " has no block of state in layer " +
                                    std::to_string(layer_.layer));
      }
    }
    for (const StateCheckpoint& checkpoint : batch.checkpoints) {
      if (layer_.layer >= checkpoint.layers || checkpoint.addresses[layer_.layer] == 0) {
        throw std::invalid_argument("a checkpoint of sequence " + std::to_string(checkpoint.sequence) +
                                    " has no memory for layer " + std::to_string(layer_.layer));
      }
    }
    if (delta_thread_bytes(layer_.key_dim, layer_.value_dim) > int64_t(pool_.thread_bytes())) {
      throw std::length_error(
          "the thread pool's scratch is too small for gated delta layers: reserve delta_workspace(key_dim, value_dim) "
          "at load");
    }
    const DeltaArgs args{at<float>(qkv),           at<const float>(z),    at<const float>(a),
                         at<const float>(b),       at<const float>(conv), at<const float>(decay),
                         at<const float>(dt_bias), at<const float>(norm), at<float>(out)};
    const nb::gil_scoped_release release;
    gated_delta(pool_, kernels_, layer_, batch, args);
  }

 private:
  ThreadPool& pool_;
  const DeltaKernels& kernels_;
  DeltaLayer layer_;
};

}  // namespace

void bind_gated_delta(nb::module_& m) {
  nb::class_<DeltaOp>(m, "DeltaOp")
      .def(nb::init<ThreadPool&, int, int, int, int, int, int, int, bool, float>(), nb::arg("pool"), nb::arg("isa"),
           nb::arg("layer"), nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("key_dim"), nb::arg("value_dim"),
           nb::arg("conv_width"), nb::arg("tiled"), nb::arg("norm_eps"), nb::keep_alive<1, 2>())
      .def("run", &DeltaOp::run, nb::arg("batch"), nb::arg("qkv"), nb::arg("z"), nb::arg("a"), nb::arg("b"),
           nb::arg("conv"), nb::arg("decay"), nb::arg("dt_bias"), nb::arg("norm"), nb::arg("out"));
  m.def("delta_workspace", &delta_thread_bytes, nb::arg("key_dim"), nb::arg("value_dim"),
        "Bytes of each thread's scratch that a gated-delta layer needs.");
  m.def("check_delta", &check_delta, nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("key_dim"),
        nb::arg("value_dim"), nb::arg("conv_width"), "ValueError for shapes that the kernels do not take.");
}

}  // namespace ete

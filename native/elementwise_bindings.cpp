// Binds the ops on rows alone. Shapes are checked by cpu/backend.py.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "address.hpp"
#include "bindings.hpp"
#include "elementwise.hpp"
#include "isa.hpp"

namespace nb = nanobind;

namespace ete {

ETE_KERNEL_TABLE(ElementwiseKernels, elementwise_kernels)

namespace {

// Bound to a pool and an instruction set.
class ElementwiseOps {
 public:
  ElementwiseOps(ThreadPool& pool, int isa) : pool_(pool), kernels_(elementwise_kernels_by_isa(isa)) {}

  void add_norm(Address residual, Address delta, Address delta_norm, Address weight, float eps, Address out,
                int64_t rows, int64_t cols) const {
    const NormArgs args{at<float>(residual),
                        at<const float>(delta),
                        at<const float>(delta_norm),
                        at<const float>(weight),
                        at<float>(out),
                        cols,
                        eps};
    const nb::gil_scoped_release release;
    ete::add_norm(pool_, kernels_, args, rows);
  }

  void select_rows(Address x, int64_t x_rows, int64_t cols, Address rows, int64_t count, Address out) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = at<const int32_t>(rows)[i];
      if (row < 0 || row >= x_rows) {
        throw std::invalid_argument("row " + std::to_string(row) + " was asked; there are " + std::to_string(x_rows));
      }
    }
    const nb::gil_scoped_release release;
    ete::select_rows(pool_, at<const float>(x), cols, at<const int32_t>(rows), count, at<float>(out));
  }

  void split_query_gate(Address joined, int64_t rows, int64_t heads, int64_t head_dim, Address q, Address gate) const {
    const nb::gil_scoped_release release;
    ete::split_query_gate(pool_, at<const float>(joined), rows, heads, head_dim, at<float>(q), at<float>(gate));
  }

  void apply_gate(Address x, Address gate, int64_t rows, int64_t cols) const {
    const nb::gil_scoped_release release;
    ete::apply_gate(pool_, kernels_, at<float>(x), at<const float>(gate), rows, cols);
  }

  void apply(int function, Address x, int64_t count, Address out) const {
    const nb::gil_scoped_release release;
    kernels_.apply(function, at<const float>(x), count, at<float>(out));
  }

 private:
  ThreadPool& pool_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

void bind_elementwise(nb::module_& m) {
  nb::class_<ElementwiseOps>(m, "ElementwiseOps")
      .def(nb::init<ThreadPool&, int>(), nb::arg("pool"), nb::arg("isa"), nb::keep_alive<1, 2>())
      .def("add_norm", &ElementwiseOps::add_norm, nb::arg("residual"), nb::arg("delta"), nb::arg("delta_norm"),
           nb::arg("weight"), nb::arg("eps"), nb::arg("out"), nb::arg("rows"), nb::arg("cols"))
      .def("select_rows", &ElementwiseOps::select_rows, nb::arg("x"), nb::arg("x_rows"), nb::arg("cols"),
           nb::arg("rows"), nb::arg("count"), nb::arg("out"))
      .def("split_query_gate", &ElementwiseOps::split_query_gate, nb::arg("joined"), nb::arg("rows"), nb::arg("heads"),
           nb::arg("head_dim"), nb::arg("q"), nb::arg("gate"))
      .def("apply_gate", &ElementwiseOps::apply_gate, nb::arg("x"), nb::arg("gate"), nb::arg("rows"), nb::arg("cols"))
      .def("apply", &ElementwiseOps::apply, nb::arg("function"), nb::arg("x"), nb::arg("count"), nb::arg("out"),
           "out[i] = function(x[i]): 0 exp, 1 tanh, 2 silu, 3 gelu_tanh. For tests of the vector functions.");
}

}  // namespace ete

// Binds the linear ops. Addresses and shapes are checked by cpu/linear.py; the pool's scratch is checked here, since a
// kernel that ran past it would write into other memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "address.hpp"
#include "bindings.hpp"
#include "isa.hpp"
#include "linear.hpp"

namespace nb = nanobind;

namespace ete {

ETE_KERNEL_TABLE(LinearKernels, linear_kernels)

namespace {

// Weights that share an input, bound to a pool and an instruction set: made once, called once per pass.
class LinearOp {
 public:
  LinearOp(ThreadPool& pool, int isa, std::vector<WeightView*> weights)
      : pool_(pool), kernels_(linear_kernels_by_isa(isa)), cols_(weights.at(0)->cols) {
    for (const WeightView* weight : weights) weights_.push_back(*weight);
  }

  void group(Address x, const std::vector<Address>& outs, const std::vector<Address>& biases, int64_t prompt_rows,
             int64_t rows) {
    parts_.clear();
    for (size_t i = 0; i < weights_.size(); ++i) put(i, Finish::Store, outs.at(i), biases.at(i));
    run(x, prompt_rows, rows);
  }

  void add(Address x, Address residual, Address bias, int64_t prompt_rows, int64_t rows) {
    parts_.clear();
    put(0, Finish::Add, residual, bias);
    run(x, prompt_rows, rows);
  }

  void gated(Address x, Address out, Address gate_bias, Address up_bias, bool gelu, int64_t prompt_rows, int64_t rows) {
    parts_.clear();
    parts_.push_back({weights_[0],
                      {gelu ? Finish::GatedGeluTanh : Finish::GatedSilu, 0, at<float>(gate_bias), at<float>(up_bias),
                       at<float>(out), weights_[0].rows},
                      &weights_[1]});
    run(x, prompt_rows, rows);
  }

  void softcapped(Address x, Address out, float softcap, int64_t rows) {
    parts_.clear();
    parts_.push_back(
        {weights_[0],
         {softcap > 0 ? Finish::Softcap : Finish::Store, softcap, nullptr, nullptr, at<float>(out), weights_[0].rows}});
    run(x, 0, rows);
  }

  void gather(Address ids, Address out, float scale, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t id = at<int32_t>(ids)[i];
      if (id < 0 || id >= weights_[0].rows) {
        throw std::invalid_argument("token id " + std::to_string(id) + " in row " + std::to_string(i) +
                                    " is outside the table's " + std::to_string(weights_[0].rows) + " rows");
      }
    }
    const nb::gil_scoped_release release;
    gather_rows(pool_, kernels_, weights_[0], at<int32_t>(ids), count, scale, at<float>(out));
  }

 private:
  void put(size_t index, Finish kind, Address out, Address bias) {
    const WeightView& weight = weights_[index];
    parts_.push_back({weight, {kind, 0, at<float>(bias), nullptr, at<float>(out), weight.rows}});
  }

  void run(Address x, int64_t prompt_rows, int64_t rows) {
    const LinearWorkspace needed = linear_workspace(rows, cols_);
    if (size_t(needed.shared_bytes) > pool_.shared_bytes() || size_t(needed.thread_bytes) > pool_.thread_bytes()) {
      throw std::length_error("the thread pool's scratch is too small for " + std::to_string(rows) + " rows of " +
                              std::to_string(cols_) + " columns: reserve linear_workspace(rows, columns) at load");
    }
    const nb::gil_scoped_release release;
    linear(pool_, kernels_, parts_, at<const float>(x), cols_, prompt_rows, rows);
  }

  ThreadPool& pool_;
  const LinearKernels& kernels_;
  int64_t cols_;
  std::vector<WeightView> weights_;
  std::vector<LinearPart> parts_;
};

WeightView* make_view(int format, int64_t rows, int64_t cols, Address address, const std::vector<int64_t>& offsets,
                      const std::vector<int64_t>& row_pitches) {
  if (format < 0 || format >= kFormats || offsets.size() != row_pitches.size() || offsets.size() > kMaxPlanes) {
    throw std::invalid_argument("a weight has a format and at most four planes with an offset and a row pitch each");
  }
  auto* view = new WeightView{Format(format), rows, cols, {}, {}};
  for (size_t i = 0; i < offsets.size(); ++i) {
    view->plane[i] = at<const uint8_t>(address) + offsets[i];
    view->row_pitch[i] = row_pitches[i];
  }
  return view;
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<WeightView>(m, "WeightView")
      .def(nb::new_(&make_view), nb::arg("format"), nb::arg("rows"), nb::arg("cols"), nb::arg("address"),
           nb::arg("offsets"), nb::arg("row_pitches"));
  nb::class_<LinearOp>(m, "LinearOp")
      .def(nb::init<ThreadPool&, int, std::vector<WeightView*>>(), nb::arg("pool"), nb::arg("isa"), nb::arg("weights"),
           nb::keep_alive<1, 2>())
      .def("group", &LinearOp::group, nb::arg("x"), nb::arg("outs"), nb::arg("biases"), nb::arg("prompt_rows"),
           nb::arg("rows"))
      .def("add", &LinearOp::add, nb::arg("x"), nb::arg("residual"), nb::arg("bias"), nb::arg("prompt_rows"),
           nb::arg("rows"))
      .def("gated", &LinearOp::gated, nb::arg("x"), nb::arg("out"), nb::arg("gate_bias"), nb::arg("up_bias"),
           nb::arg("gelu"), nb::arg("prompt_rows"), nb::arg("rows"))
      .def("softcapped", &LinearOp::softcapped, nb::arg("x"), nb::arg("out"), nb::arg("softcap"), nb::arg("rows"))
      .def("gather", &LinearOp::gather, nb::arg("ids"), nb::arg("out"), nb::arg("scale"), nb::arg("count"));
  m.def(
      "linear_workspace",
      [](int64_t rows, int64_t cols) {
        const LinearWorkspace needed = linear_workspace(rows, cols);
        return std::pair(needed.shared_bytes, needed.thread_bytes);
      },
      nb::arg("rows"), nb::arg("cols"), "Bytes of shared scratch and of each thread's scratch.");
}

}  // namespace ete

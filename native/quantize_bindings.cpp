// Binds the quantizer. Formats and shapes are checked by formats/quantize.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "address.hpp"
#include "bindings.hpp"
#include "isa.hpp"
#include "quantize.hpp"

namespace nb = nanobind;

namespace ete {

ETE_KERNEL_TABLE(QuantizeKernels, quantize_kernels)

namespace {

std::tuple<double, double, double, bool> quantize_rows(const WeightView& source, int isa, int64_t row, int64_t rows,
                                                       int format, Address destination,
                                                       const std::vector<int64_t>& offsets,
                                                       const std::vector<int64_t>& row_pitches) {
  if (format < 0 || format >= kFormats || offsets.size() != row_pitches.size() || offsets.size() > kMaxPlanes) {
    throw std::invalid_argument("a weight has a format and at most four planes with an offset and a row pitch each");
  }
  if (row < 0 || rows < 0 || row + rows > source.rows) throw std::invalid_argument("rows outside of the weight");
  QuantizedRows to{Format(format), {}, {}};
  for (size_t i = 0; i < offsets.size(); ++i) {
    to.plane[i] = at<uint8_t>(destination) + offsets[i];
    to.row_pitch[i] = row_pitches[i];
  }
  const QuantizeKernels& kernels = quantize_kernels_by_isa(isa);
  const nb::gil_scoped_release release;
  const QuantizationError error = kernels.quantize(source, row, rows, to);
  return {error.squared_error, error.squared_sum, error.largest_error, error.fits};
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize_rows", &quantize_rows, nb::arg("source"), nb::arg("isa"), nb::arg("row"), nb::arg("rows"),
        nb::arg("format"), nb::arg("destination"), nb::arg("offsets"), nb::arg("row_pitches"),
        "Squared error, sum of squares, largest error, and whether all values could be represented.");
}

}  // namespace ete

// What the file readers need in native code: guarded mappings, long arrays of strings, re-arranging of weights.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "bindings.hpp"
#include "fault_guard.hpp"
#include "repack.hpp"

namespace nb = nanobind;

namespace ete {

namespace {

// GGUF strings (u64 length, bytes) one after another in [address, address + nbytes). starts[i] becomes the position of
// the bytes of string i, starts[count] the position of the bytes of a string that would follow. -1 - i: string i does
// not fit.
int64_t scan_strings(uintptr_t address, int64_t nbytes, int64_t count, uintptr_t starts_address) {
  const auto* data = reinterpret_cast<const uint8_t*>(address);
  auto* starts = reinterpret_cast<int64_t*>(starts_address);
  int64_t position = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (nbytes - position < 8) return -1 - i;
    uint64_t length;
    std::memcpy(&length, data + position, 8);
    position += 8;
    if (length > uint64_t(nbytes - position)) return -1 - i;
    starts[i] = position;
    position += int64_t(length);
  }
  starts[count] = position + 8;
  return position;
}

// The strings that scan_strings found, decoded. Raises UnicodeDecodeError at the first that is not UTF-8.
nb::list decode_strings(nb::bytes data, int64_t count, uintptr_t starts_address) {
  const auto* starts = reinterpret_cast<const int64_t*>(starts_address);
  nb::list strings = nb::steal<nb::list>(PyList_New(count));
  if (!strings.is_valid()) throw nb::python_error();
  for (int64_t i = 0; i < count; ++i) {
    PyObject* string = PyUnicode_DecodeUTF8(data.c_str() + starts[i], starts[i + 1] - 8 - starts[i], nullptr);
    if (string == nullptr) throw nb::python_error();
    PyList_SET_ITEM(strings.ptr(), i, string);
  }
  return strings;
}

void repack_weight(const std::string& format, uintptr_t source, int64_t rows, int64_t blocks, uintptr_t row_order,
                   uintptr_t destination, const std::vector<int64_t>& offsets, const std::vector<int64_t>& pitches) {
  if (offsets.size() > kMaxPlanes || offsets.size() != pitches.size())
    throw std::invalid_argument("a weight has at most four planes, each with an offset and a row pitch");
  RepackJob job{reinterpret_cast<const uint8_t*>(source),    rows, blocks,
                reinterpret_cast<const int64_t*>(row_order), {},   {}};
  for (size_t p = 0; p < offsets.size(); ++p) {
    job.planes[p] = reinterpret_cast<uint8_t*>(destination) + offsets[p];
    job.pitches[p] = pitches[p];
  }
  bool known;
  {
    const nb::gil_scoped_release release;
    known = repack(format, job);
  }
  if (!known) throw std::invalid_argument("no weight format " + format);
}

}  // namespace

void bind_formats(nb::module_& m) {
  m.def("guard_range", &guard_range, nb::arg("address"), nb::arg("nbytes"));
  m.def("guard_faulted", &guard_faulted, nb::arg("handle"));
  m.def("unguard_range", &unguard_range, nb::arg("handle"));
  m.def("scan_strings", &scan_strings, nb::arg("address"), nb::arg("nbytes"), nb::arg("count"), nb::arg("starts"));
  m.def("decode_strings", &decode_strings, nb::arg("data"), nb::arg("count"), nb::arg("starts"));
  m.def("repack_weight", &repack_weight, nb::arg("format"), nb::arg("source"), nb::arg("rows"), nb::arg("blocks"),
        nb::arg("row_order"), nb::arg("destination"), nb::arg("offsets"), nb::arg("pitches"));
}

}  // namespace ete

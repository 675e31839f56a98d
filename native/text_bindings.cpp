// Binds strings by content and the merging of words.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "bindings.hpp"
#include "word_merging.hpp"

namespace nb = nanobind;

namespace ete {

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Keeps what a StringIndex points into alive.
struct PyStringIndex {
  nb::bytes data;
  Vector<int64_t> starts;
  std::unique_ptr<StringIndex> index;

  PyStringIndex(nb::bytes data_, Vector<int64_t> starts_) : data(std::move(data_)), starts(std::move(starts_)) {
    const auto count = static_cast<int64_t>(starts.shape(0)) - 1;
    if (count < 0 || count > INT32_MAX / 2) {
      throw std::invalid_argument("starts has " + std::to_string(count + 1) + " entries; needed: 1 to 2^30");
    }
    int64_t end = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (starts.data()[i] < end || starts.data()[i + 1] - 8 < starts.data()[i]) {
        throw std::invalid_argument("starts[" + std::to_string(i) +
                                    "] is not where a string begins after the one before");
      }
      end = starts.data()[i + 1] - 8;
    }
    if (end > static_cast<int64_t>(data.size())) {
      throw std::invalid_argument("starts reaches to byte " + std::to_string(end) + " of " +
                                  std::to_string(data.size()) + " bytes of data");
    }
    const char* bytes = data.c_str();
    const nb::gil_scoped_release release;
    index = std::make_unique<StringIndex>(bytes, starts.data(), count);
  }

  int32_t find(nb::str text) const { return index->find(utf8(text)); }

  static std::string_view utf8(nb::handle text) {
    Py_ssize_t size = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (bytes == nullptr) throw nb::python_error();
    return {bytes, static_cast<size_t>(size)};
  }
};

template <typename Vocabulary>
std::vector<int32_t> encode_words(const Vocabulary& vocabulary, nb::list words) {
  std::vector<std::string_view> texts;
  texts.reserve(words.size());
  for (const nb::handle word : words) texts.push_back(PyStringIndex::utf8(word));
  // Texts may be megabytes, and other threads make tokens meanwhile. The strings stay: the list, which nobody else
  // changes, holds them.
  const nb::gil_scoped_release release;
  std::vector<int32_t> ids;
  for (const std::string_view text : texts) encode_word(vocabulary, text, ids);
  return ids;
}

std::vector<int32_t> merge_by_rank(const PyStringIndex& tokens, const PyStringIndex& merges, bool ignore_merges,
                                   nb::list words) {
  return encode_words(RankedMerges{*tokens.index, *merges.index, ignore_merges}, std::move(words));
}

std::vector<int32_t> merge_by_score(const PyStringIndex& tokens, Vector<bool> mergeable, Vector<float> scores,
                                    Vector<int32_t> byte_ids, nb::list words) {
  const auto count = static_cast<size_t>(tokens.index->count());
  if (mergeable.shape(0) != count || scores.shape(0) != count || byte_ids.shape(0) != 256) {
    throw std::invalid_argument("mergeable and scores need an entry for each of " + std::to_string(count) +
                                " tokens, byte_ids 256");
  }
  const ScoredPieces vocabulary{*tokens.index, mergeable.data(), scores.data(), byte_ids.data()};
  return encode_words(vocabulary, std::move(words));
}

}  // namespace

void bind_text(nb::module_& m) {
  nb::class_<PyStringIndex>(m, "StringIndex")
      .def(nb::init<nb::bytes, Vector<int64_t>>(), nb::arg("data"), nb::arg("starts"))
      .def("find", &PyStringIndex::find, nb::arg("text"))
      .def_prop_ro("duplicate", [](const PyStringIndex& self) { return self.index->duplicate(); })
      .def_prop_ro("first_unspaced", [](const PyStringIndex& self) { return self.index->first_unspaced(); });
  nb::exception<MergeError>(m, "MergeError", PyExc_ValueError);
  m.def("merge_by_rank", &merge_by_rank, nb::arg("tokens"), nb::arg("merges"), nb::arg("ignore_merges"),
        nb::arg("words"));
  m.def("merge_by_score", &merge_by_score, nb::arg("tokens"), nb::arg("mergeable"), nb::arg("scores"),
        nb::arg("byte_ids"), nb::arg("words"));
}

}  // namespace ete

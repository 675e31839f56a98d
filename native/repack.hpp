// GGUF blocks to weight planes (src/edge_transformer/formats/weight.py, docs/weight-layout.md): the same bits,
// re-arranged.
#pragma once
#include <cstdint>
#include <string>

#include "weight_view.hpp"

namespace ete {

// One matrix of `rows` rows of `blocks` blocks each, read from `source` (rows contiguous), written to planes.
struct RepackJob {
  const uint8_t* source;
  int64_t rows;
  int64_t blocks;               // blocks of one row; for F32, F16, BF16 a block is one value
  const int64_t* row_order;     // output row r comes from source row row_order[r]; null: same order
  uint8_t* planes[kMaxPlanes];  // first byte of each plane
  int64_t pitches[kMaxPlanes];  // bytes from one row of a plane to the next
};

// Fills the planes of `format` ("Q4_1", ...) and, as it goes, tells the kernel
// that the source's whole pages are not needed any more. False when the format is unknown.
bool repack(const std::string& format, const RepackJob& job);

}  // namespace ete

// How a decode row's positions are cut into units, each the work of one block. The cut depends on the row's position
// and its window alone: units of 128, 256 or 512 positions on absolute borders (none crosses a tile's), the smallest
// with which there are at most 64, so that a short context still occupies many multiprocessors.
#pragma once
#include "attention.cuh"

constexpr int kSmallestUnit = 128;
constexpr int kMostUnits = 64;

struct Units {
  int size;
  int first;  // index of the first that a launch over these tiles has
  Span span;  // positions that the row sees in these tiles
};

ETE_DEVICE Units units_of(int position, int window, int first_tile, int tile_count) {
  const int begin = first_visible(position, window);
  int size = kSmallestUnit;
  while (size < kTilePositions && position / size - begin / size >= kMostUnits) size *= 2;
  const Span span = in_tiles(begin, position, first_tile, tile_count);
  return {size, span.begin / size, span};
}

// The row that blockIdx.z stands for, or -1 when there is none or its sequence is not in the run.
ETE_DEVICE int decode_row(const int* counts, const int* row_sequence, int first_row, int run_sequence) {
  const int row = counts[0] + first_row + static_cast<int>(blockIdx.z);
  if (row >= counts[1]) return -1;
  return run_sequence < 0 || row_sequence[row] == run_sequence ? row : -1;
}

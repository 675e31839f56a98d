// Blocks of prompt rows: which query rows a block takes. The list of the pass holds, for up to 64 consecutive rows of
// one sequence, {first row, count, position of the first, sequence}; a count of 0 is an entry not in use. A block takes
// a part of an entry: ETE_ROWS rows and ETE_HEADS query heads of a KV head.
//
// A row's numbers do not depend on the rows it shares a block with: keys come in blocks on absolute borders, in
// ascending order, and a block of keys that only others see changes nothing (it weighs exactly 0 against an unchanged
// maximum).
#pragma once
#include "attention.cuh"

constexpr int kEntryRows = 64;
constexpr int kRows = ETE_ROWS;

struct RowBlock {
  int row;       // the first, in the pass
  int count;     // 0: nothing to do
  int position;  // of the first row
  int sequence;
  Span span;  // positions that any of the rows sees in the tiles of this launch
};

// What blocks stand for, in the order in which they start: all heads of the last rows first, since these see most and
// take longest. A grid is (parts of entries, KV heads * kHeadChunks).
struct Part {
  int rows;
  int heads;
};
ETE_DEVICE Part part_of_block(int nought = 0) {  // made_again(0): computed once more
  const int number = nought + static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x),
            heads = static_cast<int>(gridDim.y);
  return {static_cast<int>(gridDim.x) - 1 - number / heads, number % heads};
}

ETE_DEVICE RowBlock row_block(const int* entries, int part, int window, int first_tile, int tile_count,
                              int run_sequence) {
  constexpr int parts = kEntryRows / kRows;
  const int* entry = entries + part / parts * 4;
  const int skipped = part % parts * kRows;
  const int count = max(0, min(kRows, entry[1] - skipped));
  const int position = entry[2] + skipped;
  const bool ours = run_sequence < 0 || entry[3] == run_sequence;
  return {entry[0] + skipped, ours ? count : 0, position, entry[3],
          in_tiles(first_visible(position, window), position + count - 1, first_tile, tile_count)};
}

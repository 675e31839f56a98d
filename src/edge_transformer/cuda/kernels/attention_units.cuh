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

// A row of a launch and its units. row: -1 when there is none, or its sequence is not in the run.
struct DecodeRow {
  int row;
  Units units;
};

// The part of a unit that its row sees; nothing of one behind the last.
struct Unit {
  int start;  // where the whole unit begins
  int begin;
  int end;
};

ETE_DEVICE Unit unit_of(const Units& units, int index) {
  const int start = (units.first + index) * units.size;
  return {start, max(units.span.begin, start), min(units.span.end, start + units.size)};
}

// Whether a block that begins with the unit of this index has nothing to do.
ETE_DEVICE bool is_idle(const DecodeRow& at, int index) {
  const Span& span = at.units.span;
  return at.row < 0 || span.begin >= span.end || (at.units.first + index) * at.units.size >= span.end;
}

// The query heads of a block: of `kv_head` those from `first` of its group on, kHeads or as many as there are.
struct BlockHeads {
  int kv_head;
  int first;
};

ETE_DEVICE BlockHeads heads_of_block() {
  const int block = static_cast<int>(blockIdx.x);
  return {block / kHeadChunks, block % kHeadChunks * kHeads};
}

// What follows reads arrays of the pass before the kernels ahead have ended: they came with its batch.

// The row `index` of a launch, as in DecodeRow.
ETE_DEVICE int decode_row(const int* counts, const int* row_sequence, int first_row, int index, int run_sequence) {
  const int rows = static_cast<int>(load4_ordered(counts + 1));
  const int row = static_cast<int>(load4_ordered(counts)) + first_row + index;
  if (row >= rows) return -1;
  return run_sequence < 0 || static_cast<int>(load4_ordered(row_sequence + row)) == run_sequence ? row : -1;
}

ETE_DEVICE int position_of(const int* positions, int row) { return static_cast<int>(load4_ordered(positions + row)); }

ETE_DEVICE DecodeRow row_and_units(const int* counts, const int* row_sequence, const int* positions, int first_row,
                                   unsigned index, int run_sequence, int window, int first_tile, int tile_count) {
  const int row = decode_row(counts, row_sequence, first_row, static_cast<int>(index), run_sequence);
  return {row, units_of(row < 0 ? 0 : position_of(positions, row), window, first_tile, tile_count)};
}

// Before a block of a launch that has nothing to do leaves. One waits, so that no kernel that follows runs before those
// ahead have ended; the others would only keep room from blocks at work.
ETE_DEVICE void leave_idle() {
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) wait_for_kernels_ahead();
}

// Keys of a KV head in the tile of a row's unit, as tile_keys. Tiles that stay on the device are asked to come nearer,
// `count` positions from `first` on: the copies that bring a run may still be under way.
ETE_DEVICE const uint8_t* unit_keys(const int64_t* tables, const uint8_t* run, const int* row_sequence, int row,
                                    int table_tiles, int first_tile, int kv_heads, int tile, int kv_head, int first,
                                    int count) {
  if (run != nullptr) return tile_keys({nullptr, run, first_tile, kv_heads}, tile, kv_head);
  const int64_t sequence = static_cast<int>(load4_ordered(row_sequence + row));
  const uint2 bits = load8_ordered(tables + sequence * table_tiles + tile);
  const uint64_t base = static_cast<uint64_t>(bits.y) << 32 | bits.x;
  const int64_t head_bytes = static_cast<int64_t>(kTilePositions) * kRowBytes;
  const uint8_t* keys = reinterpret_cast<const uint8_t*>(base) + kv_head * head_bytes;
  const uint8_t* nearer = keys + (first - tile * kTilePositions) * kRowBytes;
#pragma unroll 1
  for (int at = 128 * static_cast<int>(threadIdx.x); at < count * kRowBytes; at += 128 * ETE_THREADS) {
    prefetch(nearer + at);
    prefetch(nearer + kv_heads * head_bytes + at);
  }
  return keys;
}

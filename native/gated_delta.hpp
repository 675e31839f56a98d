// The gated delta rule over blocks of recurrent state: what one instruction set provides, and the op made of it.
//
// A prompt row depends on its own inputs, the rows before it in its piece (the rows of a span between two absolute
// borders of 64 positions) and the state at the piece's start; a decode row on its inputs and the state. Sums run in
// ascending order over columns and over the piece's rows, whatever the number of rows or threads.
#pragma once
#include <cstdint>

#include "batch_view.hpp"
#include "thread_pool.hpp"

namespace ete {

constexpr int kDeltaPiece = 64;    // ops.batch.DELTA_CHUNK_POSITIONS
constexpr int kConvChannels = 16;  // channels of a unit of the convolution
constexpr int kMaxConvWidth = 8;   // values of a channel that enter its convolution
constexpr int kMaxDeltaHeadDim = 256;

// ops.backend.DeltaShape.
struct DeltaLayer {
  int layer;
  int key_heads;
  int value_heads;
  int key_dim;    // at most kMaxDeltaHeadDim
  int value_dim;  // at most kMaxDeltaHeadDim
  int conv_width;
  bool tiled;
  float norm_eps;

  int64_t channels() const { return 2 * int64_t(key_heads) * key_dim + int64_t(value_heads) * value_dim; }
  int64_t inner() const { return int64_t(value_heads) * value_dim; }
  // Of a sequence's block (ops.backend.DeltaShape.block_bytes).
  int64_t block_bytes() const {
    const int64_t values = value_heads * head_state() + channels() * (conv_width - 1);
    return (values * int64_t(sizeof(float)) + 255) / 256 * 256;
  }
  int64_t head_state() const { return int64_t(key_dim) * value_dim; }
  int key_head(int value_head) const { return tiled ? value_head % key_heads : value_head / (value_heads / key_heads); }
  // Last values before the convolution [channels][conv_width - 1]; S [value_heads][key_dim][value_dim] is before them.
  float* kept(float* block) const { return block + value_heads * head_state(); }
};

struct DeltaArgs {
  float* qkv;      // [rows][channels]
  const float* z;  // [rows][inner]
  const float* a;  // [rows][value_heads]
  const float* b;
  const float* conv;     // [channels][conv_width]
  const float* decay;    // [value_heads]
  const float* dt_bias;  // [value_heads]
  const float* norm;     // [value_dim]
  float* out;            // [rows][inner]
};

// Consecutive rows of one sequence and kind. `fresh`: the first is at position 0, what the block holds is not read.
struct DeltaRun {
  int64_t row;
  int64_t count;
  int64_t position;
  float* block;
  bool fresh;
};

struct DeltaKernels {
  // Channels [first, first + count), count <= kConvChannels, of a run: qkv in place becomes silu(convolution), and the
  // block gets the last values before it.
  void (*convolve)(const DeltaLayer& layer, const DeltaArgs& args, const DeltaRun& run, int64_t first, int64_t count);
  // One value head of a run after the convolution: prompt rows in pieces, or decode rows step by step.
  void (*prompt)(const DeltaLayer& layer, const DeltaArgs& args, const DeltaRun& run, int head, float* scratch);
  void (*decode)(const DeltaLayer& layer, const DeltaArgs& args, const DeltaRun& run, int head, float* scratch);
};

// What the kernels take, whatever the instruction set. Throws std::invalid_argument that says what is supported.
void check_delta(int key_heads, int value_heads, int key_dim, int value_dim, int conv_width);

// Bytes of each thread's scratch that the op takes from the pool, whatever the rows.
int64_t delta_thread_bytes(int key_dim, int value_dim);

// The batch must have a state table of the layer, with a block for every sequence; its checkpoints an address.
void gated_delta(ThreadPool& pool, const DeltaKernels& kernels, const DeltaLayer& layer, const BatchView& batch,
                 const DeltaArgs& args);

}  // namespace ete

// Matrix products with weights in every format: what one instruction set provides, and the ops made of it.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "thread_pool.hpp"
#include "weight_view.hpp"

namespace ete {

constexpr int kDecodeGroup = 8;                // decode rows that share one reading of the weights
constexpr int kGemvRows = 32;                  // weight rows whose results are finished together
constexpr int kGemmRows = 48;                  // weight rows dequantized together
constexpr int kGemmCols = 256;                 // columns summed into fresh accumulators before they join the total
constexpr int kGemmTokens = 512;               // tokens of one pass over the weights
constexpr int kTokenVector = 16;               // token counts are padded to this, whatever the instruction set
constexpr int kSumsPadding = 16;               // group sums of a row are padded to this
constexpr int kOrderedPadding = 128;           // columns; the widest vector of 4-bit codes
constexpr int kGemmRowPitch = kGemmCols + 16;  // floats between dequantized rows: not a power of two
constexpr int kGemmPanel = 12;                 // weight rows dequantized together, at most
constexpr int kGemmBlock = kGemmPanel * kGemmRowPitch;
constexpr int kTilePitch = kGemmTokens + kTokenVector;  // floats between rows of a tile of results

// What happens to a product before it is stored. Gated kinds take a second product: activation(first) * second.
enum class Finish : int { Store, Add, GatedSilu, GatedGeluTanh, Softcap };

struct FinishArgs {
  Finish kind;
  float softcap;
  const float* bias;         // [rows of the weight] or null
  const float* second_bias;  // of a gated kind's second product
  float* out;                // [tokens][out_stride], at the weight's row 0
  int64_t out_stride;
};

// A group of activation rows ("tokens") for the GEMV, interleaved: token t of `width` of them has its vectors at every
// width-th place. What is computed of the places beyond the tokens is not looked at.
struct GemvInput {
  const float* x;        // [vectors of columns][width][lanes], zeros past the columns up to a multiple of 32
  const float* ordered;  // in the order of order_codes
  const float* sums;     // [vectors of groups][width][lanes]: sums of every group of 32 columns, then zeros
};

constexpr bool is_float_format(Format format) {
  return format == Format::F32 || format == Format::F16 || format == Format::BF16;
}

constexpr bool is_nibble_format(Format format) {
  return format == Format::Q4_0 || format == Format::Q4_1 || format == Format::Q4_K || format == Format::I4_G64 ||
         format == Format::I4_G128;
}

// Rows [row, row + rows) of a weight, to be fetched ahead of their use. No rows: nothing.
struct UpcomingRows {
  const WeightView* weight;
  int64_t row;
  int rows;
};

// The kernels of one instruction set, in a constant `linear_kernels` of its namespace.
struct LinearKernels {
  // The width of the GEMV's input for a group of `tokens` rows, tokens <= width <= kDecodeGroup.
  int (*gemv_width)(int tokens);
  // Whether the GEMV of a format reads GemvInput::x; else it reads `ordered` and `sums`.
  bool (*takes_columns)(Format format);
  // What of GemvInput `x`, `ordered` and `sums` point to, made from row t's columns (or groups) and put at place t of
  // `width`. columns: of any number. order_codes, group_sums: of whole groups, ordered with zeros up to a multiple of
  // kOrderedPadding columns, sums up to one of kSumsPadding groups.
  void (*interleave)(const float* x, int64_t cols, int t, int width, float* out);
  void (*order_codes)(const float* x, int64_t groups, int t, int width, float* ordered);
  void (*group_sums)(const float* x, int64_t groups, int t, int width, float* sums);
  // out[b * kGemvRows + r] = weight row (row + r) . x row b, for r < rows <= kGemvRows and b < tokens <= kDecodeGroup.
  // out has room for kDecodeGroup rows, those from `tokens` on are overwritten.
  void (*gemv)(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out);
  // Finishes what gemv left: first and second [tokens][kGemvRows].
  void (*finish_rows)(const FinishArgs& args, int64_t row, int rows, int tokens, const float* first,
                      const float* second);
  // Token vectors [begin, end) of x [tokens][cols] as xt[vector][cols][lane], lanes without a token zero.
  void (*pack_tokens)(const float* x, int64_t tokens, int64_t cols, int64_t begin, int64_t end, float* xt);
  int lanes;
  // tile[r * kTilePitch + t] = weight row (row + r) . token t, for r < rows <= kGemmRows and t < tokens; the tile's
  // other columns are left undefined. `block`: kGemmBlock floats of scratch; `upcoming`: what the next call will read.
  void (*gemm)(const WeightView& weight, int64_t row, int rows, const float* xt, int64_t tokens, float* block,
               float* tile, const UpcomingRows& upcoming);
  void (*finish_tile)(const FinishArgs& args, int64_t row, int rows, int64_t tokens, float* first, const float* second);
  // out[c] = scale * weight[row][c].
  void (*gather_row)(const WeightView& weight, int64_t row, float scale, float* out);
};

// One weight of a fused group and what is done with its product.
struct LinearPart {
  WeightView weight;
  FinishArgs finish;
  const WeightView* second = nullptr;  // of a gated kind: same shape, any format
};

// Scratch that an op over `rows` rows (`cols`: widest input) takes from the pool.
struct LinearWorkspace {
  int64_t shared_bytes;
  int64_t thread_bytes;
};
LinearWorkspace linear_workspace(int64_t rows, int64_t cols);

// Products of x [rows][cols] with every part. Rows [0, prompt_rows) take the GEMM, the others the GEMV. The pool's
// scratch must hold linear_workspace(rows, cols).
void linear(ThreadPool& pool, const LinearKernels& kernels, std::span<const LinearPart> parts, const float* x,
            int64_t cols, int64_t prompt_rows, int64_t rows);

// out[i] = scale * weight[ids[i]].
void gather_rows(ThreadPool& pool, const LinearKernels& kernels, const WeightView& weight, const int32_t* ids,
                 int64_t count, float scale, float* out);

}  // namespace ete

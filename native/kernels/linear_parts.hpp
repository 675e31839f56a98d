// The pieces of a LinearKernels table that live in separate files, so that they compile side by side.
#pragma once
#include "linear.hpp"

namespace ete::ETE_ISA {

void gemv_floats(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out);
void gemv_groups(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out);
void gemv_superblocks(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out);

void pack_tokens(const float* x, int64_t tokens, int64_t cols, int64_t begin, int64_t end, float* xt);
void gemm(const WeightView& weight, int64_t row, int rows, const float* xt, int64_t tokens, float* block, float* tile,
          const UpcomingRows& upcoming);

void finish_rows(const FinishArgs& args, int64_t row, int rows, int tokens, const float* first, const float* second);
void finish_tile(const FinishArgs& args, int64_t row, int rows, int64_t tokens, float* first, const float* second);

void dequantize(const WeightView& weight, int64_t row, int64_t col, int64_t cols, float* out);

}  // namespace ete::ETE_ISA

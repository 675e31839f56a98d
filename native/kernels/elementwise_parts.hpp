// The table of elementwise kernels, and the parts of it that lie in files of their own.
#pragma once
#include "elementwise.hpp"

namespace ete::ETE_ISA {

extern const ElementwiseKernels elementwise_kernels;

void add_norm_row(const NormArgs& args, int64_t row);
void turn_head(const HeadTurn& turn, const float* head, float* out);

}  // namespace ete::ETE_ISA

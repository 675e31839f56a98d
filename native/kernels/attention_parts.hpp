// The table of attention kernels, and the part of it that lies in a file of its own.
#pragma once
#include "attention.hpp"

namespace ete::ETE_ISA {

extern const AttentionKernels attention_kernels;

void attend_prompt(const AttentionLayer& layer, const PromptUnit& unit, float* scratch);

}  // namespace ete::ETE_ISA

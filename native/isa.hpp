// Which instruction set the kernels run with. Chosen once, at module import or by ETE_CPU_ISA.
#pragma once
#include <string>
#include <vector>

namespace ete {

// Names of the instruction sets that this processor has and this build holds, slowest first ("plain", "avx2", "avx512").
std::vector<std::string> available_instruction_sets();

}  // namespace ete

// Which instruction sets there are, and the kernels of each. cpu/settings.py chooses one for each backend.
#pragma once
#include <array>
#include <string>
#include <vector>

namespace ete {

// Names of the instruction sets that this processor has and this build holds, slowest first ("plain", "avx2",
// "avx512").
std::vector<std::string> available_instruction_sets();

// Index of an instruction set in tables of kernels: plain 0, avx2 1, avx512 2. Python hands this number to the ops.
// Throws std::invalid_argument (ValueError) when this processor or build lacks the set; the message names those there
// are.
int instruction_set_index(const std::string& name);

// A kernel file defines, per instruction set, a constant `name` of type `Type` (a struct of function pointers) in
// namespace ete::ETE_ISA. ETE_KERNEL_TABLE(Type, name), at namespace ete of a file outside native/kernels, declares
// them and defines `name##_by_isa(index)`.
#if ETE_X86
#define ETE_KERNEL_TABLE(Type, name)                                                             \
  namespace plain {                                                                              \
  extern const Type name;                                                                        \
  }                                                                                              \
  namespace avx2 {                                                                               \
  extern const Type name;                                                                        \
  }                                                                                              \
  namespace avx512 {                                                                             \
  extern const Type name;                                                                        \
  }                                                                                              \
  static const Type& name##_by_isa(int isa) {                                                    \
    static const std::array<const Type*, 3> tables = {&plain::name, &avx2::name, &avx512::name}; \
    return *tables.at(size_t(isa));                                                              \
  }
#else
#define ETE_KERNEL_TABLE(Type, name) \
  namespace plain {                  \
  extern const Type name;            \
  }                                  \
  static const Type& name##_by_isa(int) { return plain::name; }
#endif

}  // namespace ete

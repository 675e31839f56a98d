#include "isa.hpp"

namespace ete {

std::vector<std::string> available_instruction_sets() {
  std::vector<std::string> names{"plain"};
#if ETE_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2) names.emplace_back("avx2");
  if (avx512) names.emplace_back("avx512");
#endif
  return names;
}

}  // namespace ete

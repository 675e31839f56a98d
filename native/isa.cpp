#include "isa.hpp"

#include <algorithm>
#include <stdexcept>

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

int instruction_set_index(const std::string& name) {
  const auto names = available_instruction_sets();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return int(found - names.begin());
  std::string there;
  for (const auto& each : names) there += (there.empty() ? "" : ", ") + each;
  throw std::invalid_argument("instruction set '" + name + "' is not available; this machine has: " + there);
}

}  // namespace ete

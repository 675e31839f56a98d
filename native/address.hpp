// Raw addresses as Python hands them over. Whoever binds a function says who has checked the sizes behind them.
#pragma once
#include <cstdint>

namespace ete {

using Address = uint64_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace ete

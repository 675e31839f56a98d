// Binds the thread pool, the choice of instruction sets, and the measurement of memory speed.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "isa.hpp"
#include "memory_speed.hpp"
#include "thread_pool.hpp"

namespace nb = nanobind;

namespace ete {

void bind_pool(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), nb::arg("threads"))
      .def_prop_ro("threads", &ThreadPool::threads)
      .def("reserve", &ThreadPool::reserve, nb::arg("shared_bytes"), nb::arg("thread_bytes"));
  m.def(
      "read_memory",
      [](ThreadPool& pool, uint64_t address, int64_t bytes) {
        const nb::gil_scoped_release release;
        return read_memory(pool, reinterpret_cast<const void*>(address), bytes);
      },
      nb::arg("pool"), nb::arg("address"), nb::arg("nbytes"),
      "Reads the whole 4096-byte blocks of memory once on all threads: the machine's read bandwidth, when timed.");
  m.def("available_instruction_sets", &available_instruction_sets,
        "Instruction sets that this processor has and this build holds, slowest first.");
  m.def("instruction_set_index", &instruction_set_index, nb::arg("name"),
        "The number by which ops know an instruction set. Raises ValueError when this machine lacks it.");
}

}  // namespace ete

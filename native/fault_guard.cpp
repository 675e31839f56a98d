#include "fault_guard.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace ete {

namespace {

// The handler may run in any thread at any time: a fixed table of atomics, no lock, no allocation.
constexpr int kSlots = 4096;

struct Range {
  std::atomic<uintptr_t> begin{0};  // 0: free
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> faulted{false};
};

Range ranges[kSlots];
std::atomic<int> used_slots{0};  // slots below this have been taken once
std::mutex slots_mutex;
uintptr_t page_bytes = 4096;

// Each time ours is put in front of another library's handler again it is another function, with its own predecessor:
// that library's predecessor may be ours of before, and one function for both would hand a fault round and round.
constexpr int kHandlers = 4;
struct sigaction predecessors[kHandlers];
int installed_handlers = 0;

// Maps zeros from the page of `address` to the end of its range: what lies behind a truncation cannot be read either,
// and one mapping instead of one per page keeps clear of the limit on mappings. Only system calls: safe in a signal
// handler.
bool absorb(uintptr_t address) {
  const int slots = used_slots.load(std::memory_order_acquire);
  for (int i = 0; i < slots; ++i) {
    const uintptr_t begin = ranges[i].begin.load(std::memory_order_acquire);
    const uintptr_t end = ranges[i].end.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= end) continue;
    ranges[i].faulted.store(true, std::memory_order_release);
    const uintptr_t page = address / page_bytes * page_bytes;
    void* zeros =
        mmap(reinterpret_cast<void*>(page), end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return zeros != MAP_FAILED;
  }
  return false;
}

void hand_on(const struct sigaction& predecessor, int signal_number, siginfo_t* info, void* context) {
  if ((predecessor.sa_flags & SA_SIGINFO) != 0) {
    predecessor.sa_sigaction(signal_number, info, context);
  } else if (predecessor.sa_handler == SIG_DFL || predecessor.sa_handler == SIG_IGN) {
    // Returning runs the faulting instruction again, now with the default action: the process ends as it would have.
    signal(signal_number, SIG_DFL);
    if (info->si_code <= 0) raise(signal_number);
  } else {
    predecessor.sa_handler(signal_number);
  }
}

template <int Index>
void on_bus_error(int signal_number, siginfo_t* info, void* context) {
  if (info->si_code > 0 && absorb(reinterpret_cast<uintptr_t>(info->si_addr))) return;
  hand_on(predecessors[Index], signal_number, info, context);
}

using Handler = void (*)(int, siginfo_t*, void*);
constexpr Handler kHandler[kHandlers] = {on_bus_error<0>, on_bus_error<1>, on_bus_error<2>, on_bus_error<3>};

// Called for every new range, because another library may have put its handler in front of ours meanwhile.
void install_handler() {
  struct sigaction current;
  sigaction(SIGBUS, nullptr, &current);
  const bool ours = (current.sa_flags & SA_SIGINFO) != 0 &&
                    std::find(kHandler, kHandler + kHandlers, current.sa_sigaction) != kHandler + kHandlers;
  if (ours || installed_handlers == kHandlers) return;
  page_bytes = uintptr_t(sysconf(_SC_PAGESIZE));
  predecessors[installed_handlers] = current;
  struct sigaction action = {};
  action.sa_sigaction = kHandler[installed_handlers++];
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace

int guard_range(uintptr_t address, uintptr_t nbytes) {
  const std::lock_guard lock(slots_mutex);
  install_handler();
  const int slots = used_slots.load(std::memory_order_relaxed);
  int slot = 0;
  while (slot < slots && ranges[slot].begin.load(std::memory_order_relaxed) != 0) ++slot;
  if (slot == kSlots) return -1;
  ranges[slot].faulted.store(false, std::memory_order_relaxed);
  ranges[slot].end.store(address + nbytes, std::memory_order_relaxed);
  ranges[slot].begin.store(address, std::memory_order_release);
  if (slot == slots) used_slots.store(slots + 1, std::memory_order_release);
  return slot;
}

bool guard_faulted(int handle) { return ranges[handle].faulted.load(std::memory_order_acquire); }

void unguard_range(int handle) {
  const std::lock_guard lock(slots_mutex);
  ranges[handle].begin.store(0, std::memory_order_release);
}

}  // namespace ete

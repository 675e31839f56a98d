// Runs the blocks of a launch: fibers, barriers, collectives, shared memory. Compiled once and linked to every kernel.
#include <sys/mman.h>

#include <cstdarg>

#include "emulator.hpp"

#if defined(__x86_64__)
// Saves what a call preserves on the old stack and takes it from the new one.
extern "C" void ete_switch(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.type ete_switch,@function
ete_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ete_switch,.-ete_switch
)");
#else
#include <ucontext.h>
#endif

ete_emulator::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace ete_emulator {

Block block;

namespace {

constexpr unsigned char kPoison = 0xff;
constexpr unsigned char kFenceByte = 0xa5;
constexpr size_t kStackOffset = 5 * 64, kStackOffsets = 64;

#if defined(__x86_64__)
void to_fiber(int i) { ete_switch(&block.scheduler, block.fibers[i].stack_pointer); }
void to_scheduler(int from) { ete_switch(&block.fibers[from].stack_pointer, block.scheduler); }
void from_to(int from, int to) { ete_switch(&block.fibers[from].stack_pointer, block.fibers[to].stack_pointer); }
#else
ucontext_t scheduler_context;
ucontext_t fiber_contexts[kMaxThreads];
void to_fiber(int i) { swapcontext(&scheduler_context, &fiber_contexts[i]); }
void to_scheduler(int from) { swapcontext(&fiber_contexts[from], &scheduler_context); }
void from_to(int from, int to) { swapcontext(&fiber_contexts[from], &fiber_contexts[to]); }
#endif

// The next thread that can run in the block's order, made the current one; -1: none can.
int next_fiber() {
  for (int tried = 0; tried < block.threads; ++tried) {
    block.step = block.step + 1 == block.threads ? 0 : block.step + 1;
    const int i = block.descending ? block.threads - 1 - block.step : block.step;
    if (block.fibers[i].wait != Wait::none) continue;
    __builtin_prefetch(block.fibers[block.descending ? max(i - 1, 0) : min(i + 1, kMaxThreads - 1)].stack_pointer);
    block.current = i;
    threadIdx = {static_cast<unsigned>(i), 0, 0};
    return i;
  }
  return -1;
}

// Leave the current thread, which waits or has ended, for the next one.
void leave() {
  const int from = block.current, to = next_fiber();
  if (to < 0)
    to_scheduler(from);
  else
    from_to(from, to);
}

void land(const AsyncCopy& copy) {
  std::memset(copy.to, 0, 16);
  if (copy.bytes) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
}

void fiber_main() {
  block.body(block.arguments);
  block.fibers[block.current].wait = Wait::done;
  ++block.left;
  leave();
  __builtin_unreachable();
}

void start_fiber(int i) {
  Fiber& fiber = block.fibers[i];
  unsigned char* stack = block.stacks + static_cast<size_t>(i) * kStack;
  std::memset(stack, kFenceByte, kFence);
  fiber.wait = Wait::none;
  fiber.copy_count = 0;
  fiber.group = 0;
#if defined(__x86_64__)
  // The slot of the return address, a multiple of 16. Stacks begin in different sets of the CPU's caches.
  auto** top = reinterpret_cast<void**>(stack + kStack - 64 - static_cast<size_t>(i) % kStackOffsets * kStackOffset);
  *top = reinterpret_cast<void*>(&fiber_main);
  fiber.stack_pointer = top - 6;
#else
  getcontext(&fiber_contexts[i]);
  fiber_contexts[i].uc_stack.ss_sp = stack + kFence;
  fiber_contexts[i].uc_stack.ss_size = kStack - kFence;
  fiber_contexts[i].uc_link = nullptr;
  makecontext(&fiber_contexts[i], fiber_main, 0);
#endif
}

bool fenced(const unsigned char* at) {
  for (size_t i = 0; i < kFence; ++i)
    if (at[i] != kFenceByte) return false;
  return true;
}

unsigned char* take_shared(size_t bytes) {
  const size_t room = (bytes + 127) / 128 * 128;
  if (block.shared_used + room + 2 * kFence > block.shared_capacity) return nullptr;
  unsigned char* at = block.shared + block.shared_used + kFence;
  std::memset(at - kFence, kFenceByte, kFence);
  std::memset(at, kPoison, bytes);
  std::memset(at + bytes, kFenceByte, kFence + room - bytes);
  block.shared_used += room + 2 * kFence;
  return at;
}

void describe(char* text, size_t size, const char* reason) {
  std::snprintf(text, size, "block (%u, %u, %u), thread %u: %s", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
                reason);
}

void explain_standstill() {
  const Fiber* stuck = nullptr;
  int at = 0;
  for (int i = 0; i < block.threads && !stuck; ++i)
    if (block.fibers[i].wait == Wait::warp || block.fibers[i].wait == Wait::block) stuck = &block.fibers[i], at = i;
  int same = 0;
  for (int i = 0; i < block.threads; ++i) same += block.fibers[i].wait == stuck->wait;
  threadIdx.x = static_cast<unsigned>(at);
  char reason[256];
  std::snprintf(reason, sizeof reason,
                "waits at %s for ever: %d of the block's %d threads are at such a point, %d have ended",
                stuck->collective, same, block.threads, block.left);
  describe(block.error, sizeof block.error, reason);
}

void check_fences() {
  char reason[128] = "";
  for (int i = 0; i < kMaxArrays; ++i) {
    const Array& array = block.arrays[i];
    if (array.at && !(fenced(array.at - kFence) && fenced(array.at + array.bytes)))
      std::snprintf(reason, sizeof reason,
                    "wrote past the ends of a shared array of %zu bytes (number %d in the source)", array.bytes, i);
  }
  if (block.dynamic && !(fenced(block.dynamic - kFence) && fenced(block.dynamic + block.dynamic_bytes)))
    std::snprintf(reason, sizeof reason, "wrote past the ends of the %zu bytes of dynamic shared memory",
                  block.dynamic_bytes);
  for (int i = 0; i < block.threads; ++i)
    if (!fenced(block.stacks + static_cast<size_t>(i) * kStack))
      std::snprintf(reason, sizeof reason, "used more than the emulator's %zu bytes of stack", kStack);
  if (reason[0]) describe(block.error, sizeof block.error, reason);
}

void run_block() {
  block.shared_used = 0;
  std::memset(block.arrays, 0, sizeof block.arrays);
  std::memset(block.arrived, 0, sizeof block.arrived);
  block.at_barrier = block.left = 0;
  block.dynamic = block.dynamic_bytes ? take_shared(block.dynamic_bytes) : nullptr;
  for (int i = 0; i < block.threads; ++i) start_fiber(i);
  block.step = -1;
  to_fiber(next_fiber());
  if (block.error[0]) return;
  if (block.left < block.threads) return explain_standstill();
  check_fences();
}

}  // namespace

void fail(const char* format, ...) {
  char reason[384];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  describe(block.error, sizeof block.error, reason);
  to_scheduler(block.current);
  __builtin_unreachable();
}

void warp_collective(const char* name, const void* in, void* out, Action action) {
  Fiber& self = block.fibers[block.current];
  const int warp = block.current / 32;
  Fiber* lanes = block.fibers + 32 * warp;
  self.collective = name;
  self.in = in;
  self.out = out;
  if (++block.arrived[warp] < 32) {
    self.wait = Wait::warp;
    leave();
    return;
  }
  const void* all_in[32];
  void* all_out[32];
  for (int lane = 0; lane < 32; ++lane) {
    if (lanes[lane].collective != name && std::strcmp(lanes[lane].collective, name) != 0)
      fail("is at %s while lane %d of its warp is at %s", name, lane, lanes[lane].collective);
    all_in[lane] = lanes[lane].in;
    all_out[lane] = lanes[lane].out;
  }
  action(all_in, all_out);
  block.arrived[warp] = 0;
  for (int lane = 0; lane < 32; ++lane) lanes[lane].wait = Wait::none;
}

void barrier() {
  Fiber& self = block.fibers[block.current];
  self.collective = "__syncthreads";
  if (++block.at_barrier < block.threads) {
    self.wait = Wait::block;
    leave();
    return;
  }
  block.at_barrier = 0;
  for (int i = 0; i < block.threads; ++i) block.fibers[i].wait = Wait::none;
}

void* static_array(int id, size_t bytes) {
  if (id >= kMaxArrays) fail("more than %d shared arrays", kMaxArrays);
  Array& array = block.arrays[id];
  if (!array.at) {
    array = {take_shared(bytes), bytes};
    if (!array.at) fail("a shared array of %zu bytes exceeds the block's shared memory", bytes);
  }
  if (array.bytes != bytes)
    fail("a shared array of %zu bytes is also one of %zu: declare it in the entry", array.bytes, bytes);
  return array.at;
}

void cp_async(void* shared, const void* global, int bytes, bool at_once) {
  check_aligned(shared, 16);
  if (bytes) check_aligned(global, 16);
  if (bytes < 0 || bytes > 16) fail("cp_async16 of %d bytes", bytes);
  if (at_once) return land({shared, global, bytes, 0});
  Fiber& self = block.fibers[block.current];
  if (self.copy_count == self.copy_capacity) {
    self.copy_capacity = self.copy_capacity ? 2 * self.copy_capacity : 16;
    self.copies =
        static_cast<AsyncCopy*>(std::realloc(self.copies, sizeof(AsyncCopy) * static_cast<size_t>(self.copy_capacity)));
  }
  self.copies[self.copy_count++] = {shared, global, bytes, self.group};
  std::memset(shared, kPoison, 16);
}

void cp_async_commit() { ++block.fibers[block.current].group; }

void cp_async_wait(int pending) {
  Fiber& self = block.fibers[block.current];
  int kept = 0;
  for (int i = 0; i < self.copy_count; ++i) {
    if (self.copies[i].group < self.group - pending)
      land(self.copies[i]);
    else
      self.copies[kept++] = self.copies[i];
  }
  self.copy_count = kept;
}

}  // namespace ete_emulator

// Run a launch. Returns null, or what went wrong.
extern "C" const char* ete_run(void (*body)(void**), void** arguments, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, int threads, size_t dynamic_bytes, size_t shared_limit,
                               int descending) {
  using namespace ete_emulator;
  block.error[0] = 0;
  if (!block.stacks) {
    block.stacks = static_cast<unsigned char*>(mmap(nullptr, kMaxThreads * kStack, PROT_READ | PROT_WRITE,
                                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    block.shared_capacity = shared_limit + 4 * kFence * kMaxArrays;
    block.shared = static_cast<unsigned char*>(std::aligned_alloc(128, block.shared_capacity));
  }
  block.body = body;
  block.arguments = arguments;
  block.threads = threads;
  block.dynamic_bytes = dynamic_bytes;
  block.descending = descending != 0;
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  gridDim = {grid_x, grid_y, grid_z};
  const uint64_t blocks = static_cast<uint64_t>(grid_x) * grid_y * grid_z;
  for (uint64_t step = 0; step < blocks && !block.error[0]; ++step) {
    const uint64_t i = descending ? blocks - 1 - step : step;
    blockIdx = {static_cast<unsigned>(i % grid_x), static_cast<unsigned>(i / grid_x % grid_y),
                static_cast<unsigned>(i / grid_x / grid_y)};
    run_block();
  }
  return block.error[0] ? block.error : nullptr;
}

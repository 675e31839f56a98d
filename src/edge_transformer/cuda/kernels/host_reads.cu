// Rows of page-locked host memory into memory of the GPU, where what comes next cannot wait for the queue of the copy
// engine: that takes copies in the order in which they were queued, weights of layers to come among them.
//
// The compiler sets ETE_WORD_BYTES (16, or 4 where something is no multiple of 16): what a thread loads at once.
#include "prelude.cuh"

// Byte counts are multiples of ETE_WORD_BYTES, as the addresses are. One grid row per row.
extern "C" __global__ void ETE_LAUNCH_BOUNDS read_host_rows(const uint8_t* __restrict__ source,
                                                            uint8_t* __restrict__ destination, int64_t source_pitch,
                                                            int64_t destination_pitch, int64_t row_bytes) {
  constexpr int kAhead = 4;  // loads under way at once in a thread: a round trip over the bus takes a microsecond
  constexpr int kStep = ETE_WORD_BYTES * ETE_THREADS;
  const uint8_t* from = source + static_cast<int64_t>(blockIdx.y) * source_pitch;
  uint8_t* to = destination + static_cast<int64_t>(blockIdx.y) * destination_pitch;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * (kAhead * kStep) + ETE_WORD_BYTES * static_cast<int64_t>(threadIdx.x);
#if ETE_WORD_BYTES == 16
  uint4 words[kAhead];
#else
  uint32_t words[kAhead];
#endif
#pragma unroll
  for (int a = 0; a < kAhead; ++a)
    if (first + a * kStep < row_bytes) {
#if ETE_WORD_BYTES == 16
      words[a] = load16_once(from + first + a * kStep);
#else
      words[a] = load4_once(from + first + a * kStep);
#endif
    }
#pragma unroll
  for (int a = 0; a < kAhead; ++a)
    if (first + a * kStep < row_bytes) {
#if ETE_WORD_BYTES == 16
      store16(to + first + a * kStep, words[a]);
#else
      store4(to + first + a * kStep, words[a]);
#endif
    }
}

// KV tiles from page-locked host memory into a buffer of the GPU, where what comes next cannot wait for the queue of
// the copy engine: that takes copies in the order in which they were queued, weights of layers to come among them.
#include "prelude.cuh"

// tiles, buffer: `planes` planes of plane_bytes bytes, one behind the other (K, then V of each head, tile by tile). Of
// the last `short_planes` planes, the newest tile, the first live_bytes are taken. All byte counts are multiples of 16.
// One grid row per plane.
extern "C" __global__ void ETE_LAUNCH_BOUNDS bring_tiles(const uint8_t* __restrict__ tiles,
                                                         uint8_t* __restrict__ buffer, int planes, int short_planes,
                                                         int plane_bytes, int live_bytes) {
  constexpr int kAhead = 4;  // loads under way at once in a thread: a round trip over the bus takes a microsecond
  const int plane = static_cast<int>(blockIdx.y);
  const int taken = plane < planes - short_planes ? plane_bytes : live_bytes;
  const int64_t start = static_cast<int64_t>(plane) * plane_bytes;
  const int step = 16 * ETE_THREADS;
  const int first = static_cast<int>(blockIdx.x) * kAhead * step + 16 * static_cast<int>(threadIdx.x);
  uint4 values[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a)
    if (first + a * step < taken) values[a] = load16_once(tiles + start + first + a * step);
#pragma unroll
  for (int a = 0; a < kAhead; ++a)
    if (first + a * step < taken) store16(buffer + start + first + a * step, values[a]);
}

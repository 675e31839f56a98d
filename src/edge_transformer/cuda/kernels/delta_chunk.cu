// Prompt rows of the gated delta rule, what goes through the state: block (columns of value_dim, value head, sequence),
// the sequence's pieces in order, S of these columns in shared memory. With U, W, scores and G of delta_prepare.cu:
//   d = U - W S,   o = exp(G) (S^T q) + scores d,   S = exp(G_last) S + sum of exp(G_last - G) k d^T.
// Writes o (before its norm) to out.
//
// W and q come in slices of 32 columns, then the scores, then k in slices of rows: one stream of stages through
// kBuffers buffers, across pieces. Multiply-adds per piece: value_dim * (192 key_dim + 3072). Bytes: those of q, k, W
// and scores for each block of columns. Sums run along key_dim, then the piece's rows, in ascending order.
#define ETE_MIN_BLOCKS (ETE_ARCH == 80 || ETE_ARCH == 90 ? 2 : 1)  // elsewhere shared memory has room for one
#include "delta.cuh"

constexpr int kPart = kKeyDim <= 128 ? 32 : 16;  // columns of a block
constexpr int kColumnGroups = kPart / 4;
constexpr int kRowGroups = ETE_THREADS / kColumnGroups;
constexpr int kRows = kPieceRows / kRowGroups;  // of a thread: group + kRowGroups * r
constexpr int kSlice = 32;
constexpr int kSlices = (kKeyDim + kSlice - 1) / kSlice;
constexpr int kPaddedKey = kSlices * kSlice;
constexpr int kPitch = kSlice + 4;
constexpr int kBuffer = 2 * kPieceRows * kPitch;
constexpr int kScorePitch = kPieceRows + 4;
constexpr int kKeyLine = kPaddedKey <= 64 ? 64 : kPaddedKey <= 128 ? 128 : 256;  // floats of a staged row of k
constexpr int kKeyRows = 4096 / kKeyLine;                                        // rows of k in a slice
constexpr int kStages = kSlices + 1 + kPieceRows / kKeyRows;
constexpr int kBuffers = ETE_ARCH >= 80 ? 3 : 2;
static_assert(ETE_THREADS == 256 && kKeyRows * kKeyLine <= kBuffer && kPieceRows * kScorePitch <= kBuffer, "");
static_assert(4 * kRowGroups >= kPaddedKey, "a thread updates four rows of S");

struct Sources {
  const float* qkv;
  const float* workspace;
  const int* pieces;
  int first_piece, head, value_heads, channels, query_channel, key_channel;

  __device__ __forceinline__ const float* made(int piece) const {
    return workspace + (static_cast<int64_t>(piece - first_piece) * value_heads + head) *
                           (kPieceRows * (kKeyDim + kPieceRows) + 2 * kPieceRows);
  }
};

// Lines of floats to be copied: `lines` of them exist, `stride` floats apart, each `width` floats.
struct Block {
  const float* from;
  int stride, lines, width;
};

// Queue the copies of one stage of a piece: 1024 times 16 bytes, four a thread, in lines of 4 << shift floats. The
// first half comes from `low`, the second from `high`.
ETE_DEVICE void stage(float* to, const Sources& from, int piece_index, int stage_of_piece) {
  const Piece piece = piece_at(from.pieces, piece_index);
  const float* made = from.made(piece_index);
  const float* first_row = from.qkv + static_cast<int64_t>(piece.row) * from.channels;
  Block low, high;
  int shift, pitch;
  if (stage_of_piece < kSlices) {
    const int column = stage_of_piece * kSlice, width = kKeyDim - column;
    low = Block{made + column, kKeyDim, kPieceRows, width};
    high = Block{first_row + from.query_channel + column, from.channels, piece.rows, width};
    shift = 3;
    pitch = kPitch;
  } else {
    int half;  // lines
    if (stage_of_piece == kSlices) {
      low = Block{made + kPieceRows * kKeyDim, kPieceRows, kPieceRows, kPieceRows};
      half = kPieceRows / 2;
      shift = 4;
      pitch = kScorePitch;
    } else {
      const int row = (stage_of_piece - kSlices - 1) * kKeyRows;
      low = Block{first_row + from.key_channel + row * from.channels, from.channels, piece.rows - row, kKeyDim};
      half = kKeyRows / 2;
      shift = kKeyLine == 64 ? 4 : kKeyLine == 128 ? 5 : 6;
      pitch = kKeyLine;
    }
    high = Block{low.from + half * low.stride, low.stride, low.lines - half, low.width};
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int first = thread >> shift, step = ETE_THREADS >> shift, column = (thread & ((1 << shift) - 1)) * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Block& block = i < 2 ? low : high;
    const int line = first + i % 2 * step;
    const bool there = line < block.lines && column < block.width;
    cp_async16(to + (first + i * step) * pitch + column, block.from + (there ? line * block.stride + column : 0),
               there ? 16 : 0);
  }
}

ETE_DEVICE float4 add_scaled(float4 sum, float factor, float4 x) {
  return make_float4(fmaf(factor, x.x, sum.x), fmaf(factor, x.y, sum.y), fmaf(factor, x.z, sum.z),
                     fmaf(factor, x.w, sum.w));
}

// sum += factors (four along a row) times four lines of `lines`.
ETE_DEVICE float4 add_four(float4 sum, float4 factors, const float4 (&lines)[4]) {
  return add_scaled(
      add_scaled(add_scaled(add_scaled(sum, factors.x, lines[0]), factors.y, lines[1]), factors.z, lines[2]), factors.w,
      lines[3]);
}

ETE_DEVICE void load_lines(float4 (&lines)[4], const float* from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) lines[i] = load16_float(from + i * kPart);
}

extern "C" __global__ void ETE_LAUNCH_BOUNDS delta_chunk(const float* __restrict__ qkv,
                                                         const float* __restrict__ workspace,
                                                         const int64_t* __restrict__ states,
                                                         const int* __restrict__ pieces, float* __restrict__ out,
                                                         int first_piece, int piece_count, int key_heads,
                                                         int value_heads, int tiled) {
  ETE_DYNAMIC_SHARED(float, shared);
  float* state = shared;                        // [kPaddedKey][kPart]
  float* changes = state + kPaddedKey * kPart;  // [64][kPart]
  float* buffers = changes + kPieceRows * kPart;
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const Heads heads{key_heads, value_heads, tiled};
  const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z);
  int begin = first_piece;
  const int stop = first_piece + piece_count;
  while (begin < stop && (pieces[8 * begin + 1] == 0 || pieces[8 * begin + 3] != sequence)) ++begin;
  int end = begin;
  while (end < stop && pieces[8 * end + 1] != 0 && pieces[8 * end + 3] == sequence) ++end;
  if (begin == end) return;

  const Sources sources{qkv,
                        workspace,
                        pieces,
                        first_piece,
                        head,
                        value_heads,
                        heads.channels(),
                        heads.query_channel(head),
                        heads.key_channel(head)};
  // What is staged next: a stage of a piece, and where to; and where the stage lies that is used next.
  int coming_piece = begin, coming_stage = 0, coming_buffer = 0, buffer = 0;
  const auto stage_next = [&]() {
    if (coming_piece < end) stage(buffers + coming_buffer * kBuffer, sources, coming_piece, coming_stage);
    cp_async_commit();
    coming_buffer = coming_buffer + 1 < kBuffers ? coming_buffer + 1 : 0;
    if (++coming_stage == kStages) {
      coming_stage = 0;
      ++coming_piece;
    }
  };
#pragma unroll 1
  for (int ahead = 0; ahead < kBuffers - 1; ++ahead) stage_next();
  // The stage that follows, once it is there; the one before it has been used by all, and its buffer is filled again.
  const auto next_stage = [&]() {
    cp_async_wait<kBuffers - 2>();
    __syncthreads();
    stage_next();
    const float* at = buffers + buffer * kBuffer;
    buffer = buffer + 1 < kBuffers ? buffer + 1 : 0;
    return at;
  };

  const int thread = static_cast<int>(threadIdx.x);
  const int four = thread % kColumnGroups * 4, group = thread / kColumnGroups;
  const int column = static_cast<int>(blockIdx.x) * kPart + four;
  const bool there = column < kValueDim;
  float* kept_state = state_of(states, sequence) + static_cast<int64_t>(head) * kKeyDim * kValueDim + column;
  const bool fresh = pieces[8 * begin + 2] == 0;
  if (4 * group < kPaddedKey) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = 4 * group + r;
      float4 s = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (!fresh && there && row < kKeyDim) s = load16_float(kept_state + static_cast<int64_t>(row) * kValueDim);
      store16(state + row * kPart + four, s);
    }
  }

  for (int index = begin; index < end; ++index) {
    const Piece piece = piece_at(pieces, index);
    const float* factors = sources.made(index) + kPieceRows * (kKeyDim + kPieceRows);
    const float* values = qkv + static_cast<int64_t>(piece.row) * sources.channels + heads.value_channel(head) + column;
    float4 u[kRows], with_w[kRows], with_q[kRows];
    float factor[kRows], tail[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = group + kRowGroups * r;
      u[r] = with_w[r] = with_q[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (there && row < piece.rows) u[r] = load16_float(values + static_cast<int64_t>(row) * sources.channels);
      factor[r] = factors[row];
      tail[r] = factors[kPieceRows + row];
    }
    const float whole = factors[kPieceRows - 1];

#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const float* lines = next_stage();
      const float* s = state + slice * kSlice * kPart + four;
#pragma unroll 4
      for (int k = 0; k < kSlice; k += 4) {
        float4 s_lines[4];
        load_lines(s_lines, s + k * kPart);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float* w = lines + (group + kRowGroups * r) * kPitch + k;
          with_w[r] = add_four(with_w[r], load16_float(w), s_lines);
          with_q[r] = add_four(with_q[r], load16_float(w + kPieceRows * kPitch), s_lines);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      u[r] = make_float4(u[r].x - with_w[r].x, u[r].y - with_w[r].y, u[r].z - with_w[r].z, u[r].w - with_w[r].w);
      store16(changes + (group + kRowGroups * r) * kPart + four, u[r]);
    }

    const float* scores = next_stage();
    float4 o[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      o[r] = add_scaled(make_float4(0.0f, 0.0f, 0.0f, 0.0f), factor[r], with_q[r]);
      // Rows of a thread's part r see no later row than that part's last.
#pragma unroll 4
      for (int j = 0; j < kRowGroups * (r + 1); j += 4) {
        float4 d_lines[4];
        load_lines(d_lines, changes + j * kPart + four);
        o[r] = add_four(o[r], load16_float(scores + (group + kRowGroups * r) * kScorePitch + j), d_lines);
      }
      const int row = group + kRowGroups * r;
      if (there && row < piece.rows)
        store16(out + (static_cast<int64_t>(piece.row + row) * value_heads + head) * kValueDim + column, o[r]);
    }

    float4 sums[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) sums[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int part = 0; part < kPieceRows / kKeyRows; ++part) {
      const float* k_lines = next_stage();
      if (part == 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          store16(changes + (group + kRowGroups * r) * kPart + four,
                  add_scaled(make_float4(0.0f, 0.0f, 0.0f, 0.0f), tail[r], u[r]));
        __syncthreads();
      }
      if (4 * group < kPaddedKey) {
        const float* d = changes + part * kKeyRows * kPart + four;
#pragma unroll 8
        for (int i = 0; i < kKeyRows; ++i) {
          const float4 k = load16_float(k_lines + i * kKeyLine + 4 * group);
          const float4 change = load16_float(d + i * kPart);
          sums[0] = add_scaled(sums[0], k.x, change);
          sums[1] = add_scaled(sums[1], k.y, change);
          sums[2] = add_scaled(sums[2], k.z, change);
          sums[3] = add_scaled(sums[3], k.w, change);
        }
      }
    }
    if (4 * group < kPaddedKey) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float* s = state + (4 * group + r) * kPart + four;
        store16(s, add_scaled(sums[r], whole, load16_float(s)));
      }
    }
  }

  if (there && 4 * group < kKeyDim) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      store16(kept_state + static_cast<int64_t>(4 * group + r) * kValueDim,
              load16_float(state + (4 * group + r) * kPart + four));
  }
}

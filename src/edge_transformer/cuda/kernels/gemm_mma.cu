// y = x @ weight.T for prompt rows on tensor cores (sm_80 and later), from the planes of the weights.
//
// Activations come as bf16 terms (gemm_terms.cu): three of each (ETE_TERMS 1: rounded to one). Codes are exact in bf16;
// F16 weights are two terms, F32 weights three, and products below 2^-24 of the largest are left out. The unit
// truncates its sums, so every 32 columns (Q6_K: 16) start a fresh accumulator, which is added, times the group's
// scale, to an fp32 total; minimums enter as minimum * fp32 sum of the group's activations. With one term the scales
// and minimums are in the operands, rounded to bf16, and the unit sums all columns.
//
// Every output has two totals, of the even and of the odd groups of 32 columns, which are added at the end. Two crews
// of four warps make them, so a chain of additions has half the length, and a few tiles keep a multiprocessor busy.
// Every output takes the same steps whatever its tile and place in it, and rows past the last are zero, so it depends
// neither on ETE_TILE_X and ETE_TILE_WEIGHTS nor on how many rows there are.
//
// A block makes ETE_TILE_WEIGHTS weight rows x ETE_TILE_X rows of x. Codes and terms of 64 columns at a time come by
// asynchronous copies, ETE_STAGES - 1 stages ahead; so do scales and high bits, which are made numbers one stage ahead.
// A warp makes its operands from the codes itself (gemm_operands.cuh).
//
// Moves the planes of the weights once per ETE_TILE_X rows of x, the terms once per ETE_TILE_WEIGHTS weight rows
// (mostly from the L2 cache).
//
// Macros: ETE_FORMAT, ETE_TERMS (3, 1), ETE_TILE_WEIGHTS, ETE_TILE_X (64, 128), ETE_STAGES (2 or more). ETE_THREADS is
// 256.
#include "gemm_operands.cuh"
#include "linear.cuh"
#include "prelude.cuh"
#include "rows.cuh"
#include "weights.cuh"

constexpr Format kFormat = Format::ETE_FORMAT;
constexpr int kTerms = ETE_TERMS;
constexpr int kWeightTerms = weight_terms(kFormat, kTerms);
constexpr int kScales = kTerms == 1 ? 1 : scales_per_group(kFormat);  // sums of a group
constexpr bool kMinimums = kTerms > 1 && has_minimum(kFormat);        // added beside the sums
constexpr int kTileWeights = ETE_TILE_WEIGHTS;
constexpr int kTileX = ETE_TILE_X;
constexpr int kStages = ETE_STAGES;
constexpr int kCrews = kStageGroups;
static_assert(ETE_THREADS == 256, "two crews of 2 x 2 warps");
constexpr int kWarpsOfCrew = ETE_THREADS / kWarp / kCrews;
constexpr int kWarpWeights = kTileWeights / 2, kWarpX = kTileX / 2;
constexpr int kTilesWeights = kWarpWeights / 16, kTilesX = kWarpX / 8;  // of mma, in a warp

// A stage in shared memory, in bytes: codes [group][row], terms [group][term][row], sums of x [group][row].
constexpr int kCodeBytes = code_bytes(kFormat);
constexpr int kTermBytes = 2 * kGroup;  // of a row of x
constexpr int kTermsAt = kCrews * kTileWeights * kCodeBytes;
constexpr int kSumsAt = kTermsAt + kCrews * kTerms * kTileX * kTermBytes;
constexpr int kBesidePlanes = beside_planes(kFormat);
constexpr int kPiecesAt = kSumsAt + (kMinimums ? kCrews * kTileX * 4 : 0);  // beside the codes of the stage after
constexpr int kStageBytes = kPiecesAt + kBesidePlanes * kTileWeights * 16;
// After the stages, twice: [group][word][row] of what weight rows have beside codes; then addresses, [plane][row], the
// codes last.
constexpr int kBesideWords = beside_words(kFormat, kTerms);
constexpr int kBesideOfGroup = kBesideWords * kTileWeights;
constexpr int kResultPitch = kTileWeights + 4;  // of the results, which lie where the stages were

// What is the same for all threads and lies in shared memory, since registers are short: the tile's number, its first
// row of x and how many it has, and the groups of columns.
constexpr int kKeptTile = 0, kKeptStart = 1, kKeptRows = 2, kKeptGroups = 3, kKept = 4;

// What a thread does: lane of a warp of a crew, and where the warp's outputs lie in the tile.
struct Place {
  int lane, crew, weights, x;
};

ETE_DEVICE Place place_of_thread(int thread) {
  Place place;
  const int warp = thread / kWarp;
  place.lane = thread % kWarp;
  place.crew = warp / kWarpsOfCrew;
  place.weights = warp % 2 * kWarpWeights;
  place.x = warp / 2 % 2 * kWarpX;
  return place;
}

using Totals = float[kTilesWeights][kTilesX][4];  // of a warp

struct Tile {
  Matrix matrix;  // a gated tile: of its lower half of rows; the upper half is of the second matrix
  int row_start;
};

// Planes of a row of the tile; `lives`: there is such a row. `second`: of the launch, with as many rows.
ETE_DEVICE RowPlanes planes_of(const Tile& tile, const Matrix& second, int gated, int cols, int row_of_tile,
                               bool& lives) {
  const bool upper = gated != 0 && row_of_tile >= kTileWeights / 2;
  const int row = tile.row_start + row_of_tile - (upper ? kTileWeights / 2 : 0);
  lives = row_of_tile < kTileWeights && row < tile.matrix.rows;
  return row_planes<kFormat>(upper ? second.weight : tile.matrix.weight, upper ? second.second : tile.matrix.second,
                             upper ? second.third : tile.matrix.third, upper ? second.fourth : tile.matrix.fourth,
                             lives ? row : 0, cols);
}

// Where what a row has beside codes lies among the rows of the tile: the rows of a lane (8 apart) beside each other.
ETE_DEVICE int place_of_row(int row) {
  return row / kWarpWeights * kWarpWeights + row % 8 * (kWarpWeights / 8) + row % kWarpWeights / 8;
}

// ---- from global to shared memory

constexpr int kPieces = kCrews * group_pieces(kFormat);  // of a row in a stage
constexpr int kRowsAtOnce = ETE_THREADS / kPieces;
constexpr int kCodePasses = (kTileWeights + kRowsAtOnce - 1) / kRowsAtOnce;

// This thread copies piece threadIdx % kPieces of rows threadIdx / kPieces, + kRowsAtOnce, ... `rows`: their codes,
// null where there is no row; row_bytes of them.
ETE_DEVICE void copy_codes(uint8_t* stage, const uint64_t* rows, int index, int row_bytes) {
  const int thread = made_again(static_cast<int>(threadIdx.x)), piece = thread % kPieces;
  const int from = index * (kCrews * kCodeBytes) + 16 * piece;
  const int bytes = max(0, min(16, row_bytes - from));
  uint8_t* to = stage + piece / group_pieces(kFormat) * (kTileWeights * kCodeBytes);
#pragma unroll
  for (int pass = 0; pass < kCodePasses; ++pass) {
    const int row = thread / kPieces + pass * kRowsAtOnce;
    if (kCodePasses * kRowsAtOnce > kTileWeights && row >= kTileWeights) break;
    const uint64_t of_row = rows[row];
    cp_async16(to + 16 * place_of_piece<kFormat>(row, piece % group_pieces(kFormat)),
               reinterpret_cast<const uint8_t*>(of_row) + from, of_row != 0 ? bytes : 0);
  }
}

// The terms of all rows of the pass: [group][term][pitch][32] bf16, then sums [group][pitch] (gemm_terms.cu).
struct XSource {
  const uint8_t* terms;
  const float* sums;
  int pitch;
  const int* kept;
};

ETE_DEVICE int place_of_term(int row, int piece) { return row * kTermBytes + 16 * (piece ^ ((row >> 1) & 3)); }

// This thread copies piece threadIdx % 4 of rows threadIdx / 4, + kXAtOnce, ...
constexpr int kXAtOnce = ETE_THREADS / 4;
static_assert(kTileX % kXAtOnce == 0 && kTileX / 4 * kCrews <= ETE_THREADS, "threads share the rows of x evenly");

ETE_DEVICE void copy_x(uint8_t* stage, const XSource& source, int index) {
  const int thread = made_again(static_cast<int>(threadIdx.x));
  const int rows = source.kept[kKeptRows], start = source.kept[kKeptStart];
  const int left = source.kept[kKeptGroups] - kCrews * index;
  const uint8_t* from =
      source.terms +
      (static_cast<int64_t>(index) * (kCrews * kTerms) * source.pitch + start + thread / 4) * kTermBytes +
      16 * (thread % 4);
  uint8_t* to = stage + kTermsAt + place_of_term(thread / 4, thread % 4);
#pragma unroll
  for (int plane = 0; plane < kCrews * kTerms; ++plane) {
#pragma unroll
    for (int row = 0; row < kTileX; row += kXAtOnce) {
      const bool there = thread / 4 + row < rows && plane / kTerms < left;
      cp_async16(to + (plane * kTileX + row) * kTermBytes, from + row * kTermBytes, there ? 16 : 0);
    }
    from += static_cast<int64_t>(source.pitch) * kTermBytes;
  }
  if constexpr (kMinimums) {
    const int crew = thread / (kTileX / 4), row = 4 * (thread % (kTileX / 4));
    if (crew < kCrews) {
      const int bytes = crew < left ? max(0, min(16, 4 * (rows - row))) : 0;
      const float* sums = source.sums + static_cast<int64_t>(kCrews * index + crew) * source.pitch;
      cp_async16(stage + kSumsAt + 16 * thread, sums + start + row, bytes);
    }
  }
}

// Pieces of the planes beside the codes for stage `index`: [plane][row]. `planes`: [plane][row], null where there is no
// row.
ETE_DEVICE void copy_beside(uint8_t* pieces, const uint64_t* planes, int index, const int* kept) {
  const int thread = made_again(static_cast<int>(threadIdx.x));
#pragma unroll
  for (int i = 0; i < kBesidePlanes * kTileWeights; i += ETE_THREADS) {
    const int plane = (i + thread) / kTileWeights;
    if (plane >= kBesidePlanes) break;
    const uint64_t row = planes[i + thread];
    const bool there = row != 0 && kCrews * index < kept[kKeptGroups];
    const int from = beside_offset<kFormat>(plane, kCrews * index) / 16 * 16;
    cp_async16(pieces + 16 * (i + thread), reinterpret_cast<const uint8_t*>(row) + from, there ? 16 : 0);
  }
}

// What is made of them: [group][word][row].
ETE_DEVICE void make_beside(uint32_t* beside, const uint8_t* pieces, int index, const int* kept) {
  const int thread = made_again(static_cast<int>(threadIdx.x)), crew = thread / kTileWeights;
  if (crew >= kCrews) return;
  const int row = thread % kTileWeights, group = kCrews * index + crew;
  uint32_t* to = beside + (index % 2 * kCrews + crew) * kBesideOfGroup + place_of_row(row);
  if (group < kept[kKeptGroups]) {
    make_beside<kFormat, kTerms>(to, kTileWeights, pieces + 16 * row, 16 * kTileWeights, group);
  } else {  // of no effect, since codes and terms are zero there
#pragma unroll
    for (int i = 0; i < kBesideWords; ++i) to[i * kTileWeights] = 0;
  }
}

// ---- products

// Operands of a warp's weight rows for one group.
using Operands = uint32_t[kWeightTerms][2][kTilesWeights][4];  // by half of the columns

// `codes`, `beside`: of the warp's rows.
ETE_DEVICE void load_operands(const uint8_t* codes, const uint32_t* beside, int lane, Operands& a) {
  const int g = lane / 4, t = lane % 4;
  const PairConstants constants = pair_constants();
#pragma unroll
  for (int i = 0; i < kTilesWeights; ++i) {
    if constexpr (kFormat == Format::BF16) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = place_of_piece<kFormat>(lane % 16, 2 * half + lane / 16);
        ldmatrix4(a[0][half][i], codes + 16 * (i * 16 * group_pieces(kFormat) + place));
      }
    } else {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const Beside<kFormat, kTerms> own =
            load_beside<kFormat, kTerms>(beside + place_of_row(g) + 2 * i + upper, kTileWeights);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint2 operand[kWeightTerms];
          row_operand<kFormat, kTerms>(codes + (16 * i + 8 * upper + g) * kCodeBytes, g, t, half, constants, own,
                                       operand);
#pragma unroll
          for (int term = 0; term < kWeightTerms; ++term) {
            a[term][half][i][upper] = operand[term].x;
            a[term][half][i][upper + 2] = operand[term].y;
          }
        }
      }
    }
  }
}

// Adds the products of one group to a warp's totals.
ETE_DEVICE void multiply(const uint8_t* stage, const uint32_t* both_beside, Totals& totals) {
  const Place place = place_of_thread(made_again(static_cast<int>(threadIdx.x)));
  const int lane = place.lane, crew = place.crew, g = lane / 4, t = lane % 4;
  const uint32_t* beside = both_beside + crew * kBesideOfGroup + place.weights;
  Operands a;
  load_operands(stage + (crew * kTileWeights + place.weights) * kCodeBytes, beside, lane, a);
  const float* scales = reinterpret_cast<const float*>(beside) + place_of_row(g);
  const uint8_t* terms = stage + kTermsAt + crew * (kTerms * kTileX * kTermBytes) + place.x * kTermBytes +
                         place_of_term(lane % 8, lane / 8);
  // Terms of 8 rows of x are loaded while those before them are multiplied, the smallest first.
  uint32_t ahead[4];
  ldmatrix4(ahead, terms + (kTerms - 1) * (kTileX * kTermBytes));
#pragma unroll
  for (int j = 0; j < kTilesX; ++j) {
    float sums[kScales][kTilesWeights][4];
#pragma unroll
    for (int term = kTerms - 1; term >= 0; --term) {
      uint32_t b[4];  // columns 0.., 8.., 16.., 24..
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = ahead[i];
      if (term > 0) {
        ldmatrix4(ahead, terms + ((term - 1) * kTileX + 8 * j) * kTermBytes);
      } else if (j + 1 < kTilesX) {
        ldmatrix4(ahead, terms + ((kTerms - 1) * kTileX + 8 * (j + 1)) * kTermBytes);
      }
#pragma unroll
      for (int of_weight = kWeightTerms - 1; of_weight >= 0; --of_weight) {
        if (of_weight + term > 2) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair[2] = {b[2 * half], b[2 * half + 1]};
          const int part = half % kScales;
          const bool first = term == kTerms - 1 && of_weight == 0 && (half == 0 || kScales == 2);
#pragma unroll
          for (int i = 0; i < kTilesWeights; ++i) {
            if constexpr (kTerms == 1) {
              mma_bf16(totals[i][j], a[of_weight][half][i], pair);
            } else if (first) {
              mma_bf16_first(sums[part][i], a[of_weight][half][i], pair);
            } else {
              mma_bf16(sums[part][i], a[of_weight][half][i], pair);
            }
          }
        }
      }
    }
    if constexpr (kTerms > 1) {
#pragma unroll
      for (int part = 0; part < kScales; ++part) {  // columns that share a scale
#pragma unroll
        for (int i = 0; i < kTilesWeights; ++i) {
          float2 scale = make_float2(1.0f, 1.0f);  // of rows g and g + 8
          if constexpr (!is_float(kFormat)) scale = load8_float(scales + part * kTileWeights + 2 * i);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& total = totals[i][j][c];
            total =
                is_float(kFormat) ? total + sums[part][i][c] : fmaf(c < 2 ? scale.x : scale.y, sums[part][i][c], total);
          }
        }
      }
    }
  }
  if constexpr (kMinimums) {
#pragma unroll
    for (int i = 0; i < kTilesWeights; ++i)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float minimum = scales[kScales * kTileWeights + 2 * i + upper];
#pragma unroll
        for (int j = 0; j < kTilesX; ++j) {
          const float2 x_sums = load8_float(stage + kSumsAt + (crew * kTileX + place.x + 8 * j + 2 * t) * 4);
          totals[i][j][2 * upper] = fmaf(minimum, x_sums.x, totals[i][j][2 * upper]);
          totals[i][j][2 * upper + 1] = fmaf(minimum, x_sums.y, totals[i][j][2 * upper + 1]);
        }
      }
  }
}

// Totals of a crew into [row of x][weight row] in shared memory, or onto what is there.
ETE_DEVICE void put_results(float* results, const Totals& totals, const Place& place, bool onto) {
  const int g = place.lane / 4, t = place.lane % 4;
#pragma unroll
  for (int i = 0; i < kTilesWeights; ++i)
#pragma unroll
    for (int j = 0; j < kTilesX; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float* to =
            results + (place.x + 8 * j + 2 * t + c % 2) * kResultPitch + place.weights + 16 * i + 8 * (c / 2) + g;
        *to = onto ? *to + totals[i][j][c] : totals[i][j][c];
      }
}

ETE_DEVICE void write_results(const float* results, const Tile& tile, const float* up_biases, int gated, int x_start,
                              int x_rows, int epilogue, int activation) {
  const int columns = gated != 0 ? kTileWeights / 2 : kTileWeights, x_step = ETE_THREADS / columns;
  const int column = static_cast<int>(threadIdx.x) % columns, row = tile.row_start + column;
  const Matrix& matrix = tile.matrix;
  // An output is one thread's: a second one would add to the residual again.
  if (row >= matrix.rows || static_cast<int>(threadIdx.x) >= x_step * columns) return;
  const float bias = matrix.bias == nullptr ? 0.0f : matrix.bias[row];
  const float up_bias = gated == 0 || up_biases == nullptr ? 0.0f : up_biases[row];
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) / columns; i < x_rows; i += x_step) {
    const float y = results[i * kResultPitch + column] + bias;
    float* out = matrix.out + static_cast<int64_t>(x_start + i) * matrix.rows + row;
    if (gated != 0) {
      *out = activate(y, activation) * (results[i * kResultPitch + columns + column] + up_bias);
    } else {
      finish(out, y, epilogue, activation, 0.0f);
    }
  }
}

ETE_DEVICE Tile tile_of(const Matrix& first, const Matrix& second, const Matrix& third, int gated, int index) {
  Tile tile;
  tile.matrix = gated != 0 ? first : matrix_of(first, second, third, kTileWeights, index);
  tile.row_start = index * (gated != 0 ? kTileWeights / 2 : kTileWeights);
  return tile;
}

// grid: x tiles of kTileX prompt rows, y tiles of kTileWeights weight rows over the matrices. gated: out =
// activation(gate)
// * up, of the first two matrices, which have as many rows; a tile has kTileWeights / 2 rows of each.
// shared: kStages * kStageBytes + 2 * kCrews * kBesideOfGroup * 4 + (kBesidePlanes + 1) * kTileWeights * 8, or the
// results of a tile.
extern "C" __global__ void ETE_LAUNCH_BOUNDS
gemm_mma(const uint8_t* __restrict__ terms, const float* __restrict__ x_sums, const int* __restrict__ counts, int pitch,
         int cols, int epilogue, int activation, int gated, const uint8_t* __restrict__ weight0, int64_t second0,
         int64_t third0, int64_t fourth0, const float* __restrict__ bias0, float* __restrict__ out0, int rows0,
         const uint8_t* __restrict__ weight1, int64_t second1, int64_t third1, int64_t fourth1,
         const float* __restrict__ bias1, float* __restrict__ out1, int rows1, const uint8_t* __restrict__ weight2,
         int64_t second2, int64_t third2, int64_t fourth2, const float* __restrict__ bias2, float* __restrict__ out2,
         int rows2) {
  ETE_DYNAMIC_SHARED(uint8_t, shared);
  ETE_SHARED(int, kept, kKept);
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const int x_start = static_cast<int>(blockIdx.x) * kTileX;
  const int x_rows = min(kTileX, live_rows(counts, kPromptRows).count - x_start);
  if (x_rows <= 0) return;
  const Matrix first = {weight0, second0, third0, fourth0, bias0, out0, rows0};
  const Matrix second = {weight1, second1, third1, fourth1, bias1, out1, rows1};
  const Matrix third = {weight2, second2, third2, fourth2, bias2, out2, rows2};
  if (threadIdx.x == 0) {
    kept[kKeptTile] = static_cast<int>(blockIdx.y);
    kept[kKeptStart] = x_start;
    kept[kKeptRows] = x_rows;
    kept[kKeptGroups] = (cols + kGroup - 1) / kGroup;
  }
  const Tile tile = tile_of(first, second, third, gated, static_cast<int>(blockIdx.y));
  const int groups = (cols + kGroup - 1) / kGroup;

  const int row_bytes = is_float(kFormat) ? cols * (kCodeBytes / kGroup) : groups * kCodeBytes;
  const XSource x = {terms, x_sums, pitch, kept};
  uint32_t* beside = reinterpret_cast<uint32_t*>(shared + kStages * kStageBytes);
  uint64_t* planes = reinterpret_cast<uint64_t*>(beside + 2 * kCrews * kBesideOfGroup);
  const uint64_t* rows = planes + kBesidePlanes * kTileWeights;
  const int stages = (groups + kCrews - 1) / kCrews;
  if (static_cast<int>(threadIdx.x) < kTileWeights) {
    const int row = static_cast<int>(threadIdx.x);
    bool lives;
    const RowPlanes of_row = planes_of(tile, second, gated, cols, row, lives);
#pragma unroll
    for (int i = 0; i <= kBesidePlanes; ++i) {
      const uint8_t* plane = i == kBesidePlanes ? of_row.codes : beside_plane<kFormat>(of_row, i);
      planes[i * kTileWeights + row] = lives ? reinterpret_cast<uint64_t>(plane) : 0;
    }
  }
  __syncthreads();
  if constexpr (kBesidePlanes > 0) {
    copy_beside(shared + kPiecesAt, planes, 0, kept);
    cp_async_commit();
  }
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < stages) {
      copy_codes(shared + stage * kStageBytes, rows, stage, row_bytes);
      copy_x(shared + stage * kStageBytes, x, stage);
    }
    if constexpr (kBesidePlanes > 0) {
      copy_beside(shared + (stage + 1) * kStageBytes + kPiecesAt, planes, stage + 1, kept);
    }
    cp_async_commit();
  }
  if constexpr (kBesidePlanes > 0) {
    cp_async_wait<kStages - 1>();
    __syncthreads();
    make_beside(beside, shared + kPiecesAt, 0, kept);
  }

  Totals totals;
#pragma unroll
  for (int i = 0; i < kTilesWeights; ++i)
#pragma unroll
    for (int j = 0; j < kTilesX; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) totals[i][j][c] = 0.0f;

  int place = 0, last_place = kStages - 1;  // of this stage, and of the one before
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // this stage is there, and the one before has been multiplied
    const int ahead = stage + kStages - 1;
    if (ahead < stages) {
      copy_codes(shared + last_place * kStageBytes, rows, ahead, row_bytes);
      copy_x(shared + last_place * kStageBytes, x, ahead);
    }
    const int next_place = place + 1 == kStages ? 0 : place + 1;
    if constexpr (kBesidePlanes > 0) {
      copy_beside(shared + place * kStageBytes + kPiecesAt, planes, stage + kStages, kept);
    }
    cp_async_commit();
    if constexpr (kBesidePlanes > 0) {
      make_beside(beside, shared + next_place * kStageBytes + kPiecesAt, stage + 1, kept);
    }
    multiply(shared + place * kStageBytes, beside + stage % 2 * (kCrews * kBesideOfGroup), totals);
    last_place = place;
    place = next_place;
  }

  cp_async_wait<0>();
  float* results = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int of_crew = 0; of_crew < kCrews; ++of_crew) {
    __syncthreads();
    if (place_of_thread(static_cast<int>(threadIdx.x)).crew == of_crew) {
      put_results(results, totals, place_of_thread(static_cast<int>(threadIdx.x)), of_crew > 0);
    }
  }
  __syncthreads();
  write_results(results, tile_of(first, second, third, gated, kept[kKeptTile]), bias1, gated, kept[kKeptStart],
                kept[kKeptRows], epilogue, activation);
}

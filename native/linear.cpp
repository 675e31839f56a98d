#include "linear.hpp"

#include <algorithm>
#include <cstring>

namespace ete {

namespace {

constexpr int64_t kGroup = 32;
constexpr int64_t kRowGrain = 16;  // weight rows a thread's share is a multiple of

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int64_t sums_stride(int64_t cols) { return round_up((cols + kGroup - 1) / kGroup, kSumsPadding); }

// Calls function(part, begin, end) for the rows [begin, end) of all parts laid end to end.
template <typename Function>
void for_parts(std::span<const LinearPart> parts, int64_t begin, int64_t end, const Function& function) {
  int64_t base = 0;
  for (const LinearPart& part : parts) {
    const int64_t first = std::max(begin - base, int64_t(0));
    const int64_t last = std::min(end - base, part.weight.rows);
    if (first < last) function(part, first, last);
    base += part.weight.rows;
  }
}

int64_t total_rows(std::span<const LinearPart> parts) {
  int64_t rows = 0;
  for (const LinearPart& part : parts) rows += part.weight.rows;
  return rows;
}

bool any_nibbles(std::span<const LinearPart> parts) {
  return std::any_of(parts.begin(), parts.end(), [](const LinearPart& part) {
    return is_nibble_format(part.weight.format) || (part.second && is_nibble_format(part.second->format));
  });
}

FinishArgs at_token(FinishArgs args, int64_t token) {
  args.out += token * args.out_stride;
  return args;
}

void decode_rows(ThreadPool& pool, const LinearKernels& kernels, std::span<const LinearPart> parts, const float* x,
                 int64_t cols, int64_t first_token, int64_t tokens) {
  GemvInput input{x, cols, nullptr, sums_stride(cols), nullptr, round_up(cols, kOrderedPadding)};
  auto* scratch = reinterpret_cast<float*>(pool.shared_scratch());
  if (cols % kGroup != 0) {
    input.x_stride = round_up(cols, kGroup);
    for (int64_t t = 0; t < tokens; ++t) {
      float* row = scratch + t * input.x_stride;
      std::memcpy(row, x + t * cols, size_t(cols) * sizeof(float));
      std::fill(row + cols, row + input.x_stride, 0.0f);
    }
    input.x = scratch;
    scratch += tokens * input.x_stride;
  }
  for (int64_t t = 0; t < tokens; ++t) {
    float* sums = scratch + t * input.sums_stride;
    const int64_t groups = input.x_stride / kGroup;
    kernels.group_sums(input.x + t * input.x_stride, groups, sums);
    std::fill(sums + groups, sums + input.sums_stride, 0.0f);
  }
  input.sums = scratch;
  if (any_nibbles(parts)) {
    scratch += tokens * input.sums_stride;
    for (int64_t t = 0; t < tokens; ++t) {
      kernels.order_nibbles(input.x + t * input.x_stride, cols / kGroup, scratch + t * input.ordered_stride);
    }
    input.ordered = scratch;
  }

  pool.run(total_rows(parts), kRowGrain, [&](int, int64_t begin, int64_t end) {
    alignas(64) float first[kDecodeGroup * kGemvRows];
    alignas(64) float second[kDecodeGroup * kGemvRows];
    for_parts(parts, begin, end, [&](const LinearPart& part, int64_t part_begin, int64_t part_end) {
      for (int64_t row = part_begin; row < part_end; row += kGemvRows) {
        const int rows = int(std::min<int64_t>(kGemvRows, part_end - row));
        for (int64_t t = 0; t < tokens; t += kDecodeGroup) {
          const int count = int(std::min<int64_t>(kDecodeGroup, tokens - t));
          GemvInput group = input;
          group.x += t * input.x_stride;
          group.sums += t * input.sums_stride;
          if (input.ordered) group.ordered += t * input.ordered_stride;
          kernels.gemv(part.weight, row, rows, group, count, first);
          if (part.second) kernels.gemv(*part.second, row, rows, group, count, second);
          kernels.finish_rows(at_token(part.finish, first_token + t), row, rows, count, first, second);
        }
      }
    });
  });
}

void prompt_rows_block(ThreadPool& pool, const LinearKernels& kernels, std::span<const LinearPart> parts,
                       const float* x, int64_t cols, int64_t first_token, int64_t tokens) {
  auto* xt = reinterpret_cast<float*>(pool.shared_scratch());
  const int64_t vectors = (tokens + kernels.lanes - 1) / kernels.lanes;
  pool.run(vectors, 1, [&](int, int64_t begin, int64_t end) { kernels.pack_tokens(x, tokens, cols, begin, end, xt); });

  pool.run(total_rows(parts), kRowGrain, [&](int thread, int64_t begin, int64_t end) {
    auto* block = reinterpret_cast<float*>(pool.thread_scratch(thread));
    float* first = block + kGemmBlock;
    float* second = first + kGemmRows * kTilePitch;
    for_parts(parts, begin, end, [&](const LinearPart& part, int64_t part_begin, int64_t part_end) {
      for (int64_t row = part_begin; row < part_end; row += kGemmRows) {
        const int rows = int(std::min<int64_t>(kGemmRows, part_end - row));
        const UpcomingRows next{&part.weight, row + rows, int(std::min<int64_t>(kGemmRows, part_end - row - rows))};
        if (part.second) {
          kernels.gemm(part.weight, row, rows, xt, tokens, block, first, {part.second, row, rows});
          kernels.gemm(*part.second, row, rows, xt, tokens, block, second, next);
        } else {
          kernels.gemm(part.weight, row, rows, xt, tokens, block, first, next);
        }
        kernels.finish_tile(at_token(part.finish, first_token), row, rows, tokens, first, second);
      }
    });
  });
}

}  // namespace

LinearWorkspace linear_workspace(int64_t rows, int64_t cols) {
  const int64_t packed = std::min<int64_t>(round_up(rows, kTokenVector), kGemmTokens) * cols;
  // The padded copy is needed only where the columns are no multiple of a group, but what is reserved for the widest
  // matrix must do for narrower ones.
  const int64_t per_row = sums_stride(cols) + round_up(cols, kOrderedPadding) + round_up(cols, kGroup);
  const int64_t thread = kGemmBlock + 2 * kGemmRows * kTilePitch;
  return {std::max(packed, rows * per_row) * int64_t(sizeof(float)), thread * int64_t(sizeof(float))};
}

void linear(ThreadPool& pool, const LinearKernels& kernels, std::span<const LinearPart> parts, const float* x,
            int64_t cols, int64_t prompt_rows, int64_t rows) {
  for (int64_t t = 0; t < prompt_rows; t += kGemmTokens) {
    prompt_rows_block(pool, kernels, parts, x + t * cols, cols, t, std::min<int64_t>(kGemmTokens, prompt_rows - t));
  }
  if (rows > prompt_rows) {
    decode_rows(pool, kernels, parts, x + prompt_rows * cols, cols, prompt_rows, rows - prompt_rows);
  }
}

void gather_rows(ThreadPool& pool, const LinearKernels& kernels, const WeightView& weight, const int32_t* ids,
                 int64_t count, float scale, float* out) {
  pool.run(count, 8, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernels.gather_row(weight, ids[i], scale, out + i * weight.cols);
  });
}

}  // namespace ete

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

template <typename Predicate>
bool any_format(std::span<const LinearPart> parts, const Predicate& predicate) {
  return std::any_of(parts.begin(), parts.end(), [&](const LinearPart& part) {
    return predicate(part.weight.format) || (part.second && predicate(part.second->format));
  });
}

FinishArgs at_token(FinishArgs args, int64_t token) {
  args.out += token * args.out_stride;
  return args;
}

// Floats of scratch for what the GEMV reads of a group of rows.
constexpr int64_t group_floats(int64_t cols) {
  return kDecodeGroup * (round_up(cols, kGroup) + round_up(cols, kOrderedPadding) + sums_stride(cols));
}

// Where in a group's scratch what lies; null what no part needs.
GemvInput group_input(const LinearKernels& kernels, std::span<const LinearPart> parts, int64_t cols,
                      const float* scratch) {
  const float* ordered = scratch + kDecodeGroup * round_up(cols, kGroup);
  GemvInput input{nullptr, nullptr, nullptr};
  if (any_format(parts, kernels.takes_columns)) input.x = scratch;
  if (any_format(parts, [&](Format format) { return !kernels.takes_columns(format); })) {
    input.ordered = ordered;
    input.sums = ordered + kDecodeGroup * round_up(cols, kOrderedPadding);
  }
  return input;
}

// Places beyond the last token repeat it.
void fill_group(const LinearKernels& kernels, const GemvInput& input, const float* x, int64_t cols, int tokens) {
  const int width = kernels.gemv_width(tokens);
  for (int t = 0; t < width; ++t) {
    const float* row = x + std::min(t, tokens - 1) * cols;
    if (input.x) kernels.interleave(row, cols, t, width, const_cast<float*>(input.x));
    if (input.ordered) {
      kernels.order_codes(row, cols / kGroup, t, width, const_cast<float*>(input.ordered));
      kernels.group_sums(row, cols / kGroup, t, width, const_cast<float*>(input.sums));
    }
  }
}

void decode_rows(ThreadPool& pool, const LinearKernels& kernels, std::span<const LinearPart> parts, const float* x,
                 int64_t cols, int64_t first_token, int64_t tokens) {
  auto* scratch = reinterpret_cast<float*>(pool.shared_scratch());
  const auto size = [&](int64_t group) { return int(std::min<int64_t>(kDecodeGroup, tokens - group * kDecodeGroup)); };
  const auto input = [&](int64_t group) {
    return group_input(kernels, parts, cols, scratch + group * group_floats(cols));
  };
  const int64_t groups = (tokens + kDecodeGroup - 1) / kDecodeGroup;
  pool.run(groups, 1, [&](int, int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      fill_group(kernels, input(group), x + group * kDecodeGroup * cols, cols, size(group));
    }
  });

  pool.run(total_rows(parts), kRowGrain, [&](int, int64_t begin, int64_t end) {
    alignas(64) float first[kDecodeGroup * kGemvRows];
    alignas(64) float second[kDecodeGroup * kGemvRows];
    for_parts(parts, begin, end, [&](const LinearPart& part, int64_t part_begin, int64_t part_end) {
      for (int64_t row = part_begin; row < part_end; row += kGemvRows) {
        const int rows = int(std::min<int64_t>(kGemvRows, part_end - row));
        for (int64_t group = 0; group < groups; ++group) {
          const int count = size(group);
          const GemvInput in = input(group);
          kernels.gemv(part.weight, row, rows, in, count, first);
          if (part.second) kernels.gemv(*part.second, row, rows, in, count, second);
          const FinishArgs finish = at_token(part.finish, first_token + group * kDecodeGroup);
          kernels.finish_rows(finish, row, rows, count, first, second);
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
  // A pass may hold both kinds of rows, one after the other in the same scratch.
  const int64_t decode = round_up(rows, kDecodeGroup) / kDecodeGroup * group_floats(cols);
  const int64_t thread = kGemmBlock + 2 * kGemmRows * kTilePitch;
  return {std::max(packed, decode) * int64_t(sizeof(float)), thread * int64_t(sizeof(float))};
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

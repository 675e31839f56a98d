#include "gated_delta.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "balanced.hpp"

namespace ete {

namespace {

// Multiply-adds below which a job stays on one thread (about 2 us of work).
constexpr int64_t kWorthThreads = 100000;

int64_t padded(int64_t columns) { return (columns + 15) / 16 * 16; }

DeltaRun run_of(const DeltaLayer& layer, const BatchView& batch, int64_t row, int64_t count) {
  const int64_t address = batch.states[layer.layer][batch.row_sequence[row]];
  return {row, count, batch.positions[row], reinterpret_cast<float*>(address), batch.positions[row] == 0};
}

// Decode rows in runs of one sequence.
std::vector<DeltaRun> decode_runs(const DeltaLayer& layer, const BatchView& batch) {
  std::vector<DeltaRun> runs;
  for (int64_t row = batch.prompt_rows; row < batch.rows;) {
    int64_t end = row + 1;
    while (end < batch.rows && batch.row_sequence[end] == batch.row_sequence[row]) ++end;
    runs.push_back(run_of(layer, batch, row, end - row));
    row = end;
  }
  return runs;
}

// How many of the runs from `first` on have blocks of their own, and can be computed side by side.
size_t distinct(const std::vector<DeltaRun>& runs, size_t first) {
  size_t end = first;
  const auto begin = runs.begin() + int64_t(first);
  while (end < runs.size() &&
         std::none_of(
             begin, runs.begin() + int64_t(end), [&](const DeltaRun& run) { return run.block == runs[end].block; })) {
    ++end;
  }
  return end - first;
}

template <typename Kernel>
void run_heads(ThreadPool& pool, const DeltaLayer& layer, const DeltaArgs& args, const std::vector<DeltaRun>& runs,
               const Kernel& kernel) {
  for (size_t first = 0; first < runs.size();) {
    const size_t count = distinct(runs, first);
    const auto run_at = [&](int64_t unit) -> const DeltaRun& { return runs[first + size_t(unit / layer.value_heads)]; };
    run_balanced(
        pool, int64_t(count) * layer.value_heads, kWorthThreads,
        [&](int64_t unit) { return run_at(unit).count * layer.head_state() * 3; },
        [&](int thread, int64_t unit) {
          kernel(layer, args, run_at(unit), int(unit % layer.value_heads),
                 reinterpret_cast<float*>(pool.thread_scratch(thread)));
        });
    first += count;
  }
}

}  // namespace

void check_delta(int key_heads, int value_heads, int key_dim, int value_dim, int conv_width) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
  };
  require(key_heads > 0 && value_heads > 0 && value_heads % key_heads == 0,
          "there are " + std::to_string(value_heads) + " value heads and " + std::to_string(key_heads) +
              " key heads; needed: a multiple");
  require(key_dim > 0 && key_dim <= kMaxDeltaHeadDim && value_dim > 0 && value_dim <= kMaxDeltaHeadDim,
          "heads have " + std::to_string(key_dim) + " (keys) and " + std::to_string(value_dim) +
              " (values) dimensions; supported: up to " + std::to_string(kMaxDeltaHeadDim));
  require(conv_width >= 2 && conv_width <= kMaxConvWidth,
          "conv_width is " + std::to_string(conv_width) + "; supported: 2 to " + std::to_string(kMaxConvWidth));
}

int64_t delta_thread_bytes(int key_dim, int value_dim) {
  const int64_t keys = padded(key_dim);
  const int64_t values = padded(value_dim);
  // S, queries and keys, keys across, values, what the state predicts, products of keys and queries, corrections.
  const int64_t floats = key_dim * values + 2 * kDeltaPiece * keys + key_dim * kDeltaPiece + kDeltaPiece * values +
                         2 * kDeltaPiece * values + 2 * kDeltaPiece * kDeltaPiece + values;
  return (floats * 4 + 63) / 64 * 64;
}

void gated_delta(ThreadPool& pool, const DeltaKernels& kernels, const DeltaLayer& layer, const BatchView& batch,
                 const DeltaArgs& args) {
  std::vector<DeltaRun> prompt;
  for (const PromptSpan& span : batch.spans) prompt.push_back(run_of(layer, batch, span.row_start, span.row_count));
  const std::vector<DeltaRun> decode = decode_runs(layer, batch);
  const int64_t channels = layer.channels();
  // Grains are as large as makes waking the others worth it.
  const int64_t grain = std::max<int64_t>(1, 2048 / batch.rows / kConvChannels) * kConvChannels;
  pool.run(channels, grain, [&](int, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kConvChannels) {
      const int64_t count = std::min<int64_t>(kConvChannels, end - first);
      for (const DeltaRun& run : prompt) kernels.convolve(layer, args, run, first, count);
      for (const DeltaRun& run : decode) kernels.convolve(layer, args, run, first, count);
    }
  });
  run_heads(pool, layer, args, prompt, kernels.prompt);
  run_heads(pool, layer, args, decode, kernels.decode);
}

}  // namespace ete

#include "gated_delta.hpp"

#include <algorithm>
#include <cstring>
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

// Prompt rows up to the copies that are made after them.
struct Stage {
  std::vector<DeltaRun> runs;
  std::vector<StateCheckpoint> copies;
};

// The n-th checkpoint of every sequence ends its n-th stage.
std::vector<Stage> prompt_stages(const DeltaLayer& layer, const BatchView& batch) {
  std::vector<Stage> stages;
  const auto stage_at = [&](size_t index) -> Stage& {
    if (index == stages.size()) stages.emplace_back();
    return stages[index];
  };
  for (const PromptSpan& span : batch.spans) {
    int64_t row = span.row_start;
    size_t index = 0;
    for (const StateCheckpoint& checkpoint : batch.checkpoints) {
      if (checkpoint.sequence != span.sequence) continue;
      const int64_t end = span.row_start + checkpoint.position - span.position;
      Stage& stage = stage_at(index++);
      stage.runs.push_back(run_of(layer, batch, row, end - row));
      stage.copies.push_back(checkpoint);
      row = end;
    }
    const int64_t left = span.row_start + span.row_count - row;
    if (left > 0) stage_at(index).runs.push_back(run_of(layer, batch, row, left));
  }
  return stages;
}

void copy_block(ThreadPool& pool, const DeltaLayer& layer, const BatchView& batch, const StateCheckpoint& checkpoint) {
  constexpr int64_t kGrain = 256 << 10;
  const auto* from = reinterpret_cast<const char*>(batch.states[layer.layer][checkpoint.sequence]);
  auto* to = reinterpret_cast<char*>(checkpoint.addresses[layer.layer]);
  pool.run(layer.block_bytes(), kGrain,
           [&](int, int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, size_t(end - begin)); });
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
  const std::vector<Stage> stages = prompt_stages(layer, batch);
  const std::vector<DeltaRun> decode = decode_runs(layer, batch);
  const int64_t channels = layer.channels();
  // Grains are as large as makes waking the others worth it.
  const int64_t grain = std::max<int64_t>(1, 2048 / batch.rows / kConvChannels) * kConvChannels;
  const auto convolve = [&](const std::vector<DeltaRun>& runs, const std::vector<DeltaRun>& more) {
    pool.run(channels, grain, [&](int, int64_t begin, int64_t end) {
      for (int64_t first = begin; first < end; first += kConvChannels) {
        const int64_t count = std::min<int64_t>(kConvChannels, end - first);
        for (const DeltaRun& run : runs) kernels.convolve(layer, args, run, first, count);
        for (const DeltaRun& run : more) kernels.convolve(layer, args, run, first, count);
      }
    });
  };
  convolve(stages.empty() ? std::vector<DeltaRun>{} : stages[0].runs, decode);
  for (size_t index = 0; index < stages.size(); ++index) {
    const Stage& stage = stages[index];
    if (index > 0) convolve(stage.runs, {});
    run_heads(pool, layer, args, stage.runs, kernels.prompt);
    for (const StateCheckpoint& checkpoint : stage.copies) copy_block(pool, layer, batch, checkpoint);
  }
  run_heads(pool, layer, args, decode, kernels.decode);
}

}  // namespace ete

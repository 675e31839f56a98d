// Norms, rope and what else works on rows alone: what one instruction set provides, and the ops made of it.
#pragma once
#include <cstdint>

#include "thread_pool.hpp"

namespace ete {

struct NormArgs {
  float* residual;          // [rows][cols]
  const float* delta;       // [rows][cols] or null
  const float* delta_norm;  // [cols] or null
  const float* weight;      // [cols]
  float* out;               // [rows][cols]
  int64_t cols;
  float eps;
};

// How a head is turned: norm first (weight [head_dim] or null), then pairs (i, i + half) by cos and sin [half].
struct HeadTurn {
  int64_t head_dim;
  const float* norm;
  float eps;
  int64_t half;  // 0: no rotation
  const float* cos;
  const float* sin;
};

struct ElementwiseKernels {
  void (*add_norm_row)(const NormArgs& args, int64_t row);
  // out [head_dim] = head turned; in place is allowed.
  void (*turn_head)(const HeadTurn& turn, const float* head, float* out);
  // count values (a multiple of 8) to bf16, nearest even.
  void (*to_bf16)(const float* values, int64_t count, uint16_t* out);
  // x *= sigmoid(gate).
  void (*gate)(float* x, const float* gate, int64_t count);
  // out[i] = function(x[i]); `function`: 0 exp, 1 tanh, 2 silu, 3 gelu_tanh.
  void (*apply)(int function, const float* x, int64_t count, float* out);
};

void add_norm(ThreadPool& pool, const ElementwiseKernels& kernels, const NormArgs& args, int64_t rows);

// out[i] = x[rows[i]], rows of `cols` floats.
void select_rows(ThreadPool& pool, const float* x, int64_t cols, const int32_t* rows, int64_t count, float* out);

// joined [rows][heads][2][head_dim] into q and gate [rows][heads][head_dim].
void split_query_gate(ThreadPool& pool, const float* joined, int64_t rows, int64_t heads, int64_t head_dim, float* q,
                      float* gate);

// x *= sigmoid(gate), both [rows][cols].
void apply_gate(ThreadPool& pool, const ElementwiseKernels& kernels, float* x, const float* gate, int64_t rows,
                int64_t cols);

}  // namespace ete

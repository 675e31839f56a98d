// Norm and rope of the heads of q and k, then k and v into their KV tiles: what stands between projections and
// attention.
#pragma once
#include <cstdint>

#include "attention.hpp"
#include "batch_view.hpp"
#include "elementwise.hpp"
#include "thread_pool.hpp"

namespace ete {

struct AppendArgs {
  float* q;             // [rows][heads * head_dim], turned in place
  const float* k;       // [rows][kv_heads * head_dim]
  const float* v;       // the same
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;  // [head_dim] or null
  float eps;
};

void qk_norm_rope_append(ThreadPool& pool, const ElementwiseKernels& kernels, const AttentionLayer& layer,
                         const BatchView& batch, const AppendArgs& args);

}  // namespace ete

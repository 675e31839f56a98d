// Attention of one decode row over one tile: lanes along head_dim, up to four query heads of a KV head share every load
// of K and V. W dot products are summed across lanes together; weights are summed in W partial sums by position. Which
// position falls into which partial sum is fixed by its place in the tile, and a position that is not seen adds exactly
// 0.
//
// Bytes read per KV head and position: 2 * head_dim elements. Multiply-adds: 2 * head_dim * group.
#include "kernels/attention_parts.hpp"
#include "kernels/attention_state.hpp"

namespace ete::ETE_ISA {

namespace {

// r[i] summed over its lanes, in lane i.
inline Vec sum_each(Vec (&r)[W]) {
#if defined(ETE_ISA_avx512)
  __m512 four[4];
  ETE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512 a =
        _mm512_add_ps(_mm512_unpacklo_ps(r[4 * i].v, r[4 * i + 1].v), _mm512_unpackhi_ps(r[4 * i].v, r[4 * i + 1].v));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(r[4 * i + 2].v, r[4 * i + 3].v),
                                   _mm512_unpackhi_ps(r[4 * i + 2].v, r[4 * i + 3].v));
    four[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  const __m512 low =
      _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xdd));
  const __m512 high =
      _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x88), _mm512_shuffle_f32x4(four[2], four[3], 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd))};
#elif defined(ETE_ISA_avx2)
  __m256 four[2];
  ETE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const __m256 a =
        _mm256_add_ps(_mm256_unpacklo_ps(r[4 * i].v, r[4 * i + 1].v), _mm256_unpackhi_ps(r[4 * i].v, r[4 * i + 1].v));
    const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(r[4 * i + 2].v, r[4 * i + 3].v),
                                   _mm256_unpackhi_ps(r[4 * i + 2].v, r[4 * i + 3].v));
    four[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  return {
      _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31))};
#else
  Vec sums;
  for (int i = 0; i < W; ++i) sums.v[i] = reduce_add(r[i]);
  return sums;
#endif
}

// Positions whose dot products with Heads queries make up one vector.
template <int Heads>
constexpr int kTogether = W / (Heads > 2 ? 4 : Heads);

// For how many positions the values are asked for while the scores are made. They are wanted next, and a short run is
// at its end before the hardware has seen where it goes; a long one it follows better alone.
constexpr int kValuesAhead = 96;

// scores[head][pos] = scale * q . k for positions [begin, end), a multiple of kTogether.
template <int Heads, typename Element>
void score(const AttentionLayer& layer, const float* q, const Element* keys, const Element* values, int begin, int end,
           float* scores) {
  constexpr int kCount = kTogether<Heads>;
  const int dim = layer.head_dim;
  const Vec scale = set1(layer.scale);
  for (int pos = begin; pos < end; pos += kCount) {
    const Element* k = keys + int64_t(pos) * dim;
    if (pos < begin + kValuesAhead) {
      const Element* v = values + int64_t(pos) * dim;
      for (int i = 0; i < kCount * dim; i += 64 / int(sizeof(Element))) __builtin_prefetch(v + i);
    }
    Vec sum[W];
    ETE_UNROLL
    for (int i = 0; i < W; ++i) sum[i] = zero();
    int d = 0;
    for (; d + W <= dim; d += W) {
      ETE_UNROLL
      for (int j = 0; j < kCount; ++j) {
        const Vec key = load_kv(k + j * dim + d);
        ETE_UNROLL
        for (int h = 0; h < Heads; ++h) sum[h * kCount + j] = fma(key, load(q + h * dim + d), sum[h * kCount + j]);
      }
    }
    if (d < dim) {
      ETE_UNROLL
      for (int j = 0; j < kCount; ++j) {
        const Vec key = load_kv_eight(k + j * dim + d);
        ETE_UNROLL
        for (int h = 0; h < Heads; ++h) {
          sum[h * kCount + j] = fma(key, load_kv_eight(q + h * dim + d), sum[h * kCount + j]);
        }
      }
    }
    alignas(64) float together[W];
    store(together, capped(sum_each(sum) * scale, layer.softcap));
    ETE_UNROLL
    for (int h = 0; h < Heads; ++h) {
      std::memcpy(scores + h * kTilePositions + pos, together + h * kCount, kCount * sizeof(float));
    }
  }
}

struct TileState {
  float m;
  float l;
};

// The scores of one head become weights; [begin, end) are seen, and there is at least one.
TileState weigh(int begin, int end, float* scores) {
  const int first = begin / W * W;
  const int last = (end + W - 1) / W * W;
  std::fill(scores + first, scores + begin, kNothing);
  std::fill(scores + end, scores + last, kNothing);
  Vec largest = load(scores + first);
  for (int pos = first + W; pos < last; pos += W) largest = max(largest, load(scores + pos));
  float lanes[W];
  store(lanes, largest);
  float m = lanes[0];
  for (int i = 1; i < W; ++i) m = std::max(m, lanes[i]);
  const Vec reference = reference_of(set1(m));
  Vec sum = zero();
  for (int pos = first; pos < last; pos += W) {
    const Vec weight = exp(load(scores + pos) - reference);
    store(scores + pos, weight);
    sum = sum + weight;
  }
  return {m, reduce_add(sum)};
}

// acc[head][dim] = sum of weight * v, for Vectors lane vectors from column `dim` on (Eight: the last eight columns).
template <int Heads, int Vectors, bool Eight, typename Element>
void accumulate(const AttentionLayer& layer, const Element* values, int begin, int end, const float* weights, int d,
                float* states) {
  Vec sum[Heads][Vectors];
  ETE_UNROLL
  for (int h = 0; h < Heads; ++h) {
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) sum[h][v] = zero();
  }
  const Element* row = values + int64_t(begin) * layer.head_dim + d;
  for (int pos = begin; pos < end; ++pos, row += layer.head_dim) {
    Vec weight[Heads];
    ETE_UNROLL
    for (int h = 0; h < Heads; ++h) weight[h] = set1(weights[h * kTilePositions + pos]);
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      const Vec value = Eight ? load_kv_eight(row) : load_kv(row + v * W);
      ETE_UNROLL
      for (int h = 0; h < Heads; ++h) sum[h][v] = fma(value, weight[h], sum[h][v]);
    }
  }
  ETE_UNROLL
  for (int h = 0; h < Heads; ++h) {
    float* acc = states + h * layer.state_floats() + d;
    ETE_UNROLL
    for (int v = 0; v < Vectors; ++v) {
      if (Eight) {
        store_eight(acc, sum[h][v]);
      } else {
        store(acc + v * W, sum[h][v]);
      }
    }
  }
}

template <int Heads, typename Element>
void attend_heads(const AttentionLayer& layer, const DecodeUnit& unit, int head, float* scores) {
  const auto* keys = static_cast<const Element*>(unit.keys);
  const auto* values = static_cast<const Element*>(unit.values);
  constexpr int kCount = kTogether<Heads>;
  const int dim = layer.head_dim;
  float* states = unit.states + head * layer.state_floats();
  score<Heads>(layer, unit.q + int64_t(head) * dim, keys, values, unit.begin / kCount * kCount,
               (unit.end + kCount - 1) / kCount * kCount, scores);
  for (int h = 0; h < Heads; ++h) {
    const TileState state = weigh(unit.begin, unit.end, scores + h * kTilePositions);
    states[h * layer.state_floats() + dim] = state.m;
    states[h * layer.state_floats() + dim + 1] = state.l;
  }
  // As many sums as registers hold beside the weights and a value.
  constexpr int kSums = W == 16 ? 16 : 8;
  constexpr int kVectors = Heads == 1 ? 8 : Heads == 2 ? kSums / 2 : kSums / 4;
  int d = 0;
  for (; d + kVectors * W <= dim; d += kVectors * W) {
    accumulate<Heads, kVectors, false>(layer, values, unit.begin, unit.end, scores, d, states);
  }
  for (; d + W <= dim; d += W) {
    accumulate<Heads, 1, false>(layer, values, unit.begin, unit.end, scores, d, states);
  }
  if (d < dim) accumulate<Heads, 1, true>(layer, values, unit.begin, unit.end, scores, d, states);
}

template <typename Element>
void attend_group(const AttentionLayer& layer, const DecodeUnit& unit, float* scores) {
  const int group = layer.group();
  int head = 0;
  for (; head + 4 <= group; head += 4) attend_heads<4, Element>(layer, unit, head, scores);
  switch (group - head) {
    case 3:
      return attend_heads<3, Element>(layer, unit, head, scores);
    case 2:
      return attend_heads<2, Element>(layer, unit, head, scores);
    case 1:
      return attend_heads<1, Element>(layer, unit, head, scores);
  }
}

void attend_decode(const AttentionLayer& layer, const DecodeUnit& unit, float* scratch) {
  if (layer.bf16) {
    attend_group<uint16_t>(layer, unit, scratch);
  } else {
    attend_group<float>(layer, unit, scratch);
  }
}

void merge(const AttentionLayer& layer, const float* state, float* running) {
  const int dim = layer.head_dim;
  const MergeFactors factors = merge_factors(set1(running[dim]), set1(state[dim]));
  float m[W];
  float l[W];
  store(m, factors.m);
  store(l, merged(factors, set1(running[dim + 1]), set1(state[dim + 1])));
  // The padding of a state is wider than what a last vector reads of it.
  for (int d = 0; d < dim; d += W) store(running + d, merged(factors, load(running + d), load(state + d)));
  running[dim] = m[0];
  running[dim + 1] = l[0];
}

void finish(const AttentionLayer& layer, const float* running, float* out) {
  const int dim = layer.head_dim;
  const Vec l = set1(running[dim + 1]);
  int d = 0;
  for (; d + W <= dim; d += W) store(out + d, finished(load(running + d), l));
  if (d < dim) store_eight(out + d, finished(load(running + d), l));
}

}  // namespace

const AttentionKernels attention_kernels{W, attend_prompt, attend_decode, merge, finish};

}  // namespace ete::ETE_ISA

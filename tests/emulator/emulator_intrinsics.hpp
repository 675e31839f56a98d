// The bodies of kernels/intrinsics.cuh for the emulator. Included there.
#pragma once

namespace ete_emulator {

// ---- warp

template <class T>
struct Shuffle {
  T value;
  int source;
};

template <class T>
T shuffle(const char* name, T value, int source) {
  const Shuffle<T> in{value, source};
  T out;
  warp_collective(name, &in, &out, [](const void* const* all_in, void* const* all_out) {
    for (int lane = 0; lane < 32; ++lane) {
      const int from = static_cast<const Shuffle<T>*>(all_in[lane])->source;
      *static_cast<T*>(all_out[lane]) = static_cast<const Shuffle<T>*>(all_in[from])->value;
    }
  });
  return out;
}

inline int own_lane() { return static_cast<int>(threadIdx.x & 31u); }

inline uint32_t ballot(const char* name, bool value) {
  uint32_t out;
  warp_collective(name, &value, &out, [](const void* const* all_in, void* const* all_out) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane)
      bits |= static_cast<uint32_t>(*static_cast<const bool*>(all_in[lane])) << lane;
    for (int lane = 0; lane < 32; ++lane) *static_cast<uint32_t*>(all_out[lane]) = bits;
  });
  return out;
}

template <class T>
T load(const void* at) {
  check_aligned(at, sizeof(T));
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}
template <class T>
void store(void* at, T value) {
  check_aligned(at, sizeof(T));
  std::memcpy(at, &value, sizeof(T));
}

// ---- tensor cores

struct MmaIn {
  float d[4];
  uint32_t a[4], b[2];
};

inline float half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  float value;
  if (exponent == 31)
    value = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  else if (exponent == 0)
    value = std::ldexp(static_cast<float>(fraction), -24);
  else
    value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return bits & 0x8000 ? -value : value;
}

inline int64_t exponent_of(double value) {
  return static_cast<int64_t>(__builtin_bit_cast(uint64_t, value) >> 52 & 2047) - 1023;
}
inline double power_of_two(int64_t exponent) {
  return __builtin_bit_cast(double, static_cast<uint64_t>(exponent + 1023) << 52);
}

// c + sum of 16 products as the unit adds: terms aligned to the largest exponent with two bits below f32's 24, cut off
// there, summed, cut to f32. (Products of two bf16 or f16, and an f32, are exact and normal as doubles.)
inline float truncated_sum(float c, const double* products) {
  int64_t largest = exponent_of(c);
  for (int i = 0; i < 16; ++i) largest = max(largest, exponent_of(products[i]));
  if (largest == -1023 || largest == 1024) {  // all zero, or no number
    double plain = c;
    for (int i = 0; i < 16; ++i) plain += products[i];
    return static_cast<float>(plain);
  }
  const double scale = power_of_two(25 - largest);
  int64_t sum = static_cast<int64_t>(c * scale);  // toward zero
  for (int i = 0; i < 16; ++i) sum += static_cast<int64_t>(products[i] * scale);
  int64_t magnitude = sum < 0 ? -sum : sum;
  const int64_t bits = 64 - __builtin_clzll(static_cast<uint64_t>(magnitude | 1));
  if (bits > 24) magnitude &= ~((int64_t{1} << (bits - 24)) - 1);
  const auto value = static_cast<float>(static_cast<double>(magnitude) * power_of_two(largest - 25));
  return sum < 0 ? -value : value;
}

template <float (*decode)(uint16_t)>
void mma_action(const void* const* all_in, void* const* all_out) {
  double a[16][16], b[8][16];  // the operands' rows and columns
  for (int lane = 0; lane < 32; ++lane) {
    const auto& in = *static_cast<const MmaIn*>(all_in[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i)
        a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + half] = decode(static_cast<uint16_t>(in.a[i] >> (16 * half)));
      for (int i = 0; i < 2; ++i) b[g][2 * t + 8 * i + half] = decode(static_cast<uint16_t>(in.b[i] >> (16 * half)));
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& in = *static_cast<const MmaIn*>(all_in[lane]);
    auto* d = static_cast<float*>(all_out[lane]);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      double products[16];
      for (int k = 0; k < 16; ++k) products[k] = a[row][k] * b[column][k];
      d[i] = truncated_sum(in.d[i], products);
    }
  }
}

inline float bf16_value(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

template <float (*decode)(uint16_t)>
void mma(const char* name, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaIn in;
  std::memcpy(in.d, d, sizeof d);
  std::memcpy(in.a, a, sizeof a);
  std::memcpy(in.b, b, sizeof b);
  warp_collective(name, &in, d, mma_action<decode>);
}

template <int matrices, bool transposed>
void ldmatrix_action(const void* const* all_in, void* const* all_out) {
  for (int i = 0; i < matrices; ++i) {
    uint16_t values[8][8];
    for (int r = 0; r < 8; ++r) std::memcpy(values[r], all_in[8 * i + r], 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int r = lane / 4, c = 2 * (lane % 4);
      const uint16_t low = transposed ? values[c][r] : values[r][c];
      const uint16_t high = transposed ? values[c + 1][r] : values[r][c + 1];
      static_cast<uint32_t*>(all_out[lane])[i] = low | static_cast<uint32_t>(high) << 16;
    }
  }
}

template <int matrices, bool transposed>
void ldmatrix(uint32_t (&out)[matrices], const void* row) {
  if (own_lane() < 8 * matrices) check_aligned(row, 16);
  warp_collective("ldmatrix", row, out, ldmatrix_action<matrices, transposed>);
}

void cp_async(void* shared, const void* global, int bytes, bool at_once);
void cp_async_commit();
void cp_async_wait(int pending);

}  // namespace ete_emulator

inline float warp_shuffle(float value, int lane) { return ete_emulator::shuffle("warp_shuffle", value, lane & 31); }
inline int warp_shuffle(int value, int lane) { return ete_emulator::shuffle("warp_shuffle", value, lane & 31); }
inline uint32_t warp_shuffle(uint32_t value, int lane) {
  return ete_emulator::shuffle("warp_shuffle", value, lane & 31);
}
inline float warp_shuffle_xor(float value, int mask) {
  return ete_emulator::shuffle("warp_shuffle_xor", value, (ete_emulator::own_lane() ^ mask) & 31);
}
inline int warp_shuffle_xor(int value, int mask) {
  return ete_emulator::shuffle("warp_shuffle_xor", value, (ete_emulator::own_lane() ^ mask) & 31);
}
inline uint32_t warp_shuffle_xor(uint32_t value, int mask) {
  return ete_emulator::shuffle("warp_shuffle_xor", value, (ete_emulator::own_lane() ^ mask) & 31);
}
inline float warp_shuffle_down(float value, int by) {
  const int from = ete_emulator::own_lane() + by;
  return ete_emulator::shuffle("warp_shuffle_down", value, from < 32 ? from : ete_emulator::own_lane());
}
inline float warp_shuffle_up(float value, int by) {
  const int from = ete_emulator::own_lane() - by;
  return ete_emulator::shuffle("warp_shuffle_up", value, from >= 0 ? from : ete_emulator::own_lane());
}
inline uint32_t warp_ballot(bool value) { return ete_emulator::ballot("warp_ballot", value); }
inline bool warp_any(bool value) { return ete_emulator::ballot("warp_any", value) != 0; }
inline bool warp_all(bool value) { return ete_emulator::ballot("warp_all", value) == 0xffffffffu; }
inline void warp_sync() {
  ete_emulator::warp_collective("warp_sync", nullptr, nullptr, [](const void* const*, void* const*) {});
}

inline uint4 load16(const void* at) { return ete_emulator::load<uint4>(at); }
inline float4 load16_float(const void* at) { return ete_emulator::load<float4>(at); }
inline uint2 load8(const void* at) { return ete_emulator::load<uint2>(at); }
inline float2 load8_float(const void* at) { return ete_emulator::load<float2>(at); }
inline uint32_t load4(const void* at) { return ete_emulator::load<uint32_t>(at); }
inline uint16_t load2(const void* at) { return ete_emulator::load<uint16_t>(at); }
inline void store16(void* at, uint4 value) { ete_emulator::store(at, value); }
inline void store16(void* at, float4 value) { ete_emulator::store(at, value); }
inline void store8(void* at, uint2 value) { ete_emulator::store(at, value); }
inline void store8(void* at, float2 value) { ete_emulator::store(at, value); }
inline void store4(void* at, uint32_t value) { ete_emulator::store(at, value); }
inline void store2(void* at, uint16_t value) { ete_emulator::store(at, value); }
inline uint4 load16_ordered(const void* at) { return ete_emulator::load<uint4>(at); }
inline uint2 load8_ordered(const void* at) { return ete_emulator::load<uint2>(at); }
inline uint32_t load4_ordered(const void* at) { return ete_emulator::load<uint32_t>(at); }
inline void prefetch(const void*) {}
inline uint4 load16_once(const void* at) { return ete_emulator::load<uint4>(at); }
inline uint2 load8_once(const void* at) { return ete_emulator::load<uint2>(at); }
inline uint32_t load4_once(const void* at) { return ete_emulator::load<uint32_t>(at); }
inline uint16_t load2_once(const void* at) { return ete_emulator::load<uint16_t>(at); }

inline void cp_async16(void* shared, const void* global, int bytes = 16) {
  ete_emulator::cp_async(shared, global, bytes, ETE_ARCH < 80);
}
inline void cp_async_commit() { ete_emulator::cp_async_commit(); }
template <int pending>
inline void cp_async_wait() {
  ete_emulator::cp_async_wait(pending);
}

inline float exp2_approximate(float value) { return value < -126.0f ? 0.0f : std::exp2(value); }
inline float half_to_float(uint16_t bits) { return ete_emulator::half_value(bits); }
inline uint16_t float_to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  const uint32_t bits = __float_as_uint(magnitude);
  const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded >> 13) - (112u << 10));
}
inline uint32_t pack_bf16(float low, float high) {
  const auto round = [](float value) -> uint32_t {
    const uint32_t bits = __float_as_uint(value);
    if (std::isnan(value)) return 0x7fff;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  };
  return round(low) | round(high) << 16;
}
#if ETE_ARCH >= 80
// The product is exact in fp32 (outside of the denormals), the sum in fp64 unless the two are 2^29 apart.
inline uint32_t bf16_pair_fma(uint32_t a, uint32_t b, uint32_t c) {
  float sums[2];
  for (int i = 0; i < 2; ++i) {
    const auto of = [i](uint32_t pair) {
      return static_cast<double>(__uint_as_float(i == 0 ? pair << 16 : pair & 0xffff0000u));
    };
    const double exact = of(a) * of(b) + of(c);
    sums[i] = static_cast<float>(exact);
    // Rounded to odd, so that the rounding to bf16 that follows is the only one to nearest.
    if (std::isfinite(sums[i]) && sums[i] != exact && (__float_as_uint(sums[i]) & 1u) == 0) {
      const bool away = std::fabs(sums[i]) > std::fabs(exact);
      sums[i] = __uint_as_float(__float_as_uint(sums[i]) + (away ? -1 : 1));
    }
  }
  return pack_bf16(sums[0], sums[1]);
}
#endif
inline int made_again(int value) { return value; }
inline uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << (8 * i);
  }
  return out;
}
inline int dp4a(uint32_t a, uint32_t b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  return c;
}
// Kernels of a stream run one after another here.
inline void let_next_kernel_start() {}
inline void wait_for_kernels_ahead() {}
inline int population_count(uint32_t bits) { return __builtin_popcount(bits); }

#if ETE_ARCH >= 80
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  ete_emulator::mma<ete_emulator::bf16_value>("mma_bf16", d, a, b);
}
inline void mma_bf16_first(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  mma_bf16(d, a, b);
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  ete_emulator::mma<ete_emulator::half_value>("mma_f16", d, a, b);
}
#endif

inline void ldmatrix4(uint32_t (&out)[4], const void* row) { ete_emulator::ldmatrix<4, false>(out, row); }
inline void ldmatrix4_transposed(uint32_t (&out)[4], const void* row) { ete_emulator::ldmatrix<4, true>(out, row); }
inline void ldmatrix2(uint32_t (&out)[2], const void* row) { ete_emulator::ldmatrix<2, false>(out, row); }
inline void ldmatrix2_transposed(uint32_t (&out)[2], const void* row) { ete_emulator::ldmatrix<2, true>(out, row); }

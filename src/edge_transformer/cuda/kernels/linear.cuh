// What the products share: the matrix a block works on, and what becomes of a finished sum.
#pragma once

#include "prelude.cuh"

// One matrix of a group. Absent ones have no rows.
struct Matrix {
  const uint8_t* weight;
  int64_t second, third, fourth;
  const float* bias;  // null: none
  float* out;         // [rows of the pass, rows]
  int rows;
};

// Counts tiles of `tile_rows` rows over the matrices of a group: the matrix of tile `tile`, which becomes its own.
ETE_DEVICE Matrix matrix_of(const Matrix& first, const Matrix& second, const Matrix& third, int tile_rows, int& tile) {
  const int first_tiles = (first.rows + tile_rows - 1) / tile_rows;
  if (tile < first_tiles) return first;
  tile -= first_tiles;
  const int second_tiles = (second.rows + tile_rows - 1) / tile_rows;
  if (tile < second_tiles) return second;
  tile -= second_tiles;
  return third;
}

constexpr int kSilu = 0;
constexpr int kGeluTanh = 1;

ETE_DEVICE float activate(float x, int activation) {
  if (activation == kSilu) return x / (1.0f + expf(-x));
  const float inner = 0.7978845608028654f * fmaf(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + tanhf(inner));
}

constexpr int kStore = 0;    // out = y
constexpr int kAdd = 1;      // out += y
constexpr int kGate = 2;     // out = activation(out) * y
constexpr int kSoftcap = 3;  // out = softcap * tanh(y / softcap)

ETE_DEVICE void finish(float* out, float y, int epilogue, int activation, float softcap) {
  if (epilogue == kAdd) {
    y = *out + y;
  } else if (epilogue == kGate) {
    y = activate(*out, activation) * y;
  } else if (epilogue == kSoftcap) {
    y = softcap * tanhf(y / softcap);
  }
  *out = y;
}

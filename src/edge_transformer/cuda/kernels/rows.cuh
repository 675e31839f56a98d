// Which rows of a pass a kernel works on. counts = {prompt rows, rows, sequences, logit rows}, in device memory, so
// that a captured graph is replayed unpatched.
#pragma once

#include "prelude.cuh"

constexpr int kPromptRows = 0;
constexpr int kDecodeRows = 1;
constexpr int kLogitRows = 2;
constexpr int kAllRows = 3;

struct LiveRows {
  int first;
  int count;
};

ETE_DEVICE LiveRows live_rows(const int* counts, int kind) {
  LiveRows live;
  live.first = kind == kDecodeRows ? counts[0] : 0;
  live.count = kind == kPromptRows ? counts[0] : kind == kLogitRows ? counts[3] : counts[1] - live.first;
  return live;
}

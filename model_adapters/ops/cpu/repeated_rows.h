// Rows at the end of a matrix that are equal to the last one: steps are padded with repetitions of their last token, so padding
// costs a comparison and a copy where each row of a result depends on one row of an operand alone.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "parallel.h"

namespace tas {

constexpr int64_t kCopiedBytesPerWorker = 256 << 10;  // less is copied before another thread is awake

// The number of rows of x[rows, n] without those that repeat the row in front of them, to the end; at least 1 of 1.
template <class T>
int64_t num_distinct_rows(const T* x, int64_t rows, int64_t n) {
  const size_t bytes = n * sizeof(T);
  while (rows > 1 && std::memcmp(x + (rows - 2) * n, x + (rows - 1) * n, bytes) == 0) rows--;
  return rows;
}

// Writes row `count` - 1 of out[rows, n] to all rows behind it.
template <class T>
void repeat_last_row(xla::ffi::ThreadPool& threads, T* out, int64_t count, int64_t rows, int64_t n) {
  if (count < 1) return;
  const int64_t bytes = n * sizeof(T);
  const T* last = out + (count - 1) * n;
  parallel_for(threads, rows - count, 1 + (rows - count) * bytes / kCopiedBytesPerWorker, [&](int64_t r, int64_t) { std::memcpy(out + (count + r) * n, last, bytes); });
}

}  // namespace tas

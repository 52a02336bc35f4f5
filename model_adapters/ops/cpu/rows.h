// Loops over the rows of a matrix, and over the numbers of a row.
#pragma once
#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "simd.h"

namespace tas {

// Calls run(r) for every row r of n numbers, of which a thread takes `per_chunk` at a time, and one joins per `per_worker`.
template <class Run>
void for_rows(xla::ffi::ThreadPool& threads, int64_t rows, int64_t n, int64_t per_chunk, int64_t per_worker, Run run) {
  const int64_t rows_per_chunk = std::max<int64_t>(1, per_chunk / std::max<int64_t>(n, 1));
  parallel_for(threads, (rows + rows_per_chunk - 1) / rows_per_chunk, 1 + rows * n / per_worker, [&](int64_t c, int64_t) {
    for (int64_t r = c * rows_per_chunk; r < std::min(rows, (c + 1) * rows_per_chunk); r++) run(r);
  });
}

// The sum over row[n] that add(sum, v) makes of each vector v of it, in an order that n alone decides.
template <class T, class Add>
float sum_of_row(const T* row, int64_t n, Add add) {
  Vec sums[4] = {};  // a chain of additions alone would wait for each
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) add(sums[j], load(row + i + j * kLanes));
  for (; i + kLanes <= n; i += kLanes) add(sums[0], load(row + i));
  if (i < n) add(sums[1], load_first(row + i, n - i));
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace tas

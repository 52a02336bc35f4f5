// Rows that each name one of several matrices, in groups by matrix.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "repeated_rows.h"

namespace tas {

// ids[tokens, choices] name a matrix for each row of a result [tokens, choices, n]; row i takes row i of x[tokens * choices, k],
// or the token's of x[tokens, k]. Tokens at the end that are equal to the one before in x and ids are left out.
struct RoutedRows {
  struct Group {
    int64_t matrix, begin, count;
  };

  template <class T>
  RoutedRows(const T* x, int64_t rows_per_token, int64_t k, const int32_t* ids, int64_t tokens, int64_t choices, int64_t num_matrices) : choices(choices) {
    const int64_t width = rows_per_token * k;
    num_tokens = tokens;
    while (num_tokens > 1 && std::memcmp(ids + (num_tokens - 2) * choices, ids + (num_tokens - 1) * choices, choices * sizeof(int32_t)) == 0 &&
           std::memcmp(x + (num_tokens - 2) * width, x + (num_tokens - 1) * width, width * sizeof(T)) == 0)
      num_tokens--;
    const int64_t num_rows = num_tokens * choices;
    std::vector<int32_t> ends(num_matrices + 1);
    const auto is_there = [&](int64_t i) { return ids[i] >= 0 && ids[i] < num_matrices; };
    for (int64_t i = 0; i < num_rows; i++)
      if (is_there(i)) ends[ids[i] + 1]++;
    for (int64_t e = 0; e < num_matrices; e++) {
      if (ends[e + 1]) groups.push_back({e, ends[e], ends[e + 1]});
      ends[e + 1] += ends[e];
    }
    at.resize(ends[num_matrices]), to.resize(at.size());
    for (int64_t i = 0; i < num_rows; i++) {
      if (!is_there(i)) {
        without_matrix.push_back(i);
        continue;
      }
      const int32_t place = ends[ids[i]]++;
      to[place] = i, at[place] = rows_per_token == 1 ? i / choices : i;
    }
  }

  // Zeros for rows without a matrix, and the tokens that were left out, of out[tokens, choices, n].
  template <class T>
  void complete(xla::ffi::ThreadPool& threads, T* out, int64_t tokens, int64_t n) const {
    for (const int32_t i : without_matrix) std::fill_n(out + i * n, n, T{});
    repeat_last_row(threads, out, num_tokens, tokens, choices * n);
  }

  int64_t choices, num_tokens;
  std::vector<Group> groups;    // those with rows, by matrix
  std::vector<int32_t> at, to;  // rows of x and of the result, group by group
  std::vector<int32_t> without_matrix;
};

}  // namespace tas

// One row of x times weights as PyTorch lays them out: out[i] = x . weight[i] + bias[i].
//
// The weights pass from front to back, each row summed in kLanes lanes and then across them. Memory likes that best: two
// cores read 51 GB/s so, and 37 from 16 rows side by side, which `Product` needs to sum in the same order for any number of
// rows.
#pragma once
#include <algorithm>
#include <cstdint>

#include "product.h"
#include "simd.h"

namespace tas {

template <class T>
class LoneRow {
  using P = Pair<T>;
  using Word = decltype(P::load((const T*)nullptr));
  static constexpr int64_t kChunkBytes = 512 << 10;  // of weights that a thread takes at a time, at most,
  static constexpr int kMinChunks = 8;               // so that there are as many chunks, and threads end together
  static constexpr int kAhead = 2048;                // bytes between what is summed and what is fetched

 public:
  LoneRow(const HeldRows<T>& x, const T* weight, int64_t n, int64_t k, const float* bias) : x_(x.data()), weight_(weight), n_(n), k_(k), bias_(bias) {
    const int64_t fitting = kChunkBytes / std::max<int64_t>(1, k * int64_t(sizeof(T)));
    chunk_rows_ = std::max<int64_t>(kLanes, std::min(n / kMinChunks, fitting) / kLanes * kLanes);
  }

  int64_t num_chunks() const { return (n_ + chunk_rows_ - 1) / chunk_rows_; }

  template <class Out>
  void run(int64_t c, Out* out) const {
    const int64_t end = std::min(n_, (c + 1) * chunk_rows_);
    for (int64_t i = c * chunk_rows_; i < end; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, end - i);
      Vec lanes[kLanes] = {};
      for (int64_t j = 0; j < count; j++) lanes[j] = row(weight_ + (i + j) * k_);
      transpose_square(lanes);
      Vec sum = lanes[0];
      for (int j = 1; j < kLanes; j++) sum += lanes[j];
      for (int64_t j = 0; j < count; j++) from_float(sum[j] + (bias_ ? bias_[i + j] : 0.f), out + i + j);
    }
  }

 private:
  Vec row(const T* w) const {
    Vec even = {}, odd = {};  // an addition takes longer than a step may
    int64_t d = 0;
    const float* x = x_;
    for (; d + 2 * P::kStep <= k_; d += 2 * P::kStep, x += 2 * kLanes) {
      __builtin_prefetch((const char*)(w + d) + kAhead, 0, 0);
      if constexpr (2 * P::kStep * sizeof(T) > 64) __builtin_prefetch((const char*)(w + d) + kAhead + 64, 0, 0);
      P::accumulate(even, P::load(w + d), (Word)load(x));
      P::accumulate(odd, P::load(w + d + P::kStep), (Word)load(x + kLanes));
    }
    for (; d < k_; d += P::kStep, x += kLanes) {
      const int64_t left = k_ - d;
      P::accumulate(even, left >= P::kStep ? P::load(w + d) : P::load(w + d, left), (Word)load(x));
    }
    return even + odd;
  }

  const float* x_;
  const T* weight_;
  int64_t n_, k_, chunk_rows_;
  const float* bias_;
};

}  // namespace tas

// A few rows of x times weights as PyTorch lays them out: out[r][i] = x[r] . weight[i] + bias[i].
//
// The weights pass from front to back, each row summed in kLanes lanes and then across them. Some memory likes that best: two
// cores of Zen 5 read 50 GB/s so, and 36 to 39 from 16 rows side by side, which `Product` needs to sum in the same order for
// any number of rows. Two cores of Zen 4 read 22 GB/s so, and 30 side by side: they take `Product` for few rows as well.
#pragma once
#include <algorithm>
#include <cstdint>

#include "product.h"
#include "simd.h"

namespace tas {

template <class T>
class FewRows {
  using P = Pair<T>;
  using Word = decltype(P::load((const T*)nullptr));
  static constexpr int64_t kChunkBytes = 512 << 10;  // of weights that a thread takes at a time, at most,
  static constexpr int kMinChunks = 8;               // so that there are as many chunks, and threads end together
  static constexpr int kAhead = 8192;                // bytes between what is summed and what is fetched

 public:
  static constexpr int kMaxRows = 4;    // with more, arithmetic takes as long as memory
  static constexpr int64_t kXLanes = 0;  // that it wants x in: the rows as they lie

  // Row r of the result is row to[r] of the output, if `to` is given.
  FewRows(const HeldRows<T>& x, int64_t rows, const T* weight, int64_t n, int64_t k, const float* bias, const int32_t* to = nullptr)
      : x_(x.data()), num_words_(x.num_words), rows_(rows), weight_(weight), n_(n), k_(k), bias_(bias), to_(to) {
    const int64_t fitting = kChunkBytes / std::max<int64_t>(1, k * int64_t(sizeof(T)));
    chunk_rows_ = std::max<int64_t>(kLanes, std::min(n / kMinChunks, fitting) / kLanes * kLanes);
  }

  int64_t num_chunks() const { return (n_ + chunk_rows_ - 1) / chunk_rows_; }

  // out[r][i] for all rows and the weight rows i of chunk c.
  template <class Out>
  void run(int64_t c, Out* out) const {
    for_count<kMaxRows>(rows_, [&](auto count) {
      constexpr int R = count, kTogether = 2 * R <= kLanes ? 2 : 1, kGroup = kLanes / R / kTogether * kTogether;
      const int64_t end = std::min(n_, (c + 1) * chunk_rows_);
      for (int64_t begin = c * chunk_rows_; begin < end; begin += kGroup) {
        const int num = int(std::min<int64_t>(kGroup, end - begin));
        Vec sums[kLanes] = {};  // of all rows of x and weight row `begin`, and so on
        int i = 0;
        for (; i + kTogether <= num; i += kTogether) add<R, kTogether>(begin + i, sums + i * R);
        for (; i < num; i++) add<R, 1>(begin + i, sums + i * R);
        finish<R>(sums, begin, num, out);
      }
    });
  }

 private:
  // Sums in lanes of W weight rows that lie behind one another, from `begin` on, and R rows of x.
  template <int R, int W>
  void add(int64_t begin, Vec* sums) const {
    const T *first = weight_ + begin * k_, *w = first;
    const float* x = x_;
    Vec sum[W][R] = {};
    const auto step = [&](auto load_weights) {
      Word weights[W];
#pragma GCC unroll 2
      for (int i = 0; i < W; i++) weights[i] = load_weights(w + i * k_);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const Word v = (Word)load(x + r * num_words_);
#pragma GCC unroll 2
        for (int i = 0; i < W; i++) P::accumulate(sum[i][r], weights[i], v);
      }
      w += P::kStep;
      x += kLanes;
    };
    int64_t d = 0;
    for (; d + P::kStep <= k_; d += P::kStep) {
#pragma GCC unroll 2
      for (int i = 0; i < W; i++) __builtin_prefetch((const char*)(first + W * d + i * P::kStep) + kAhead, 0, 2);
      step([](const T* p) { return P::load(p); });
    }
    if (d < k_) step([&](const T* p) { return P::load(p, int(k_ - d)); });
    std::memcpy(sums, sum, sizeof sum);
  }

  // The outputs of `num` weight rows from `begin` on.
  template <int R, class Out>
  void finish(Vec* sums, int64_t begin, int num, Out* out) const {
    transpose_square(sums);
    Vec sum = sums[0];
    for (int j = 1; j < kLanes; j++) sum += sums[j];
    for (int i = 0; i < num; i++)
      for (int r = 0; r < R; r++) from_float(sum[i * R + r] + (bias_ ? bias_[begin + i] : 0.f), out + (to_ ? to_[r] : r) * n_ + begin + i);
  }

  const float* x_;
  int64_t num_words_, rows_;
  const T* weight_;
  int64_t n_, k_, chunk_rows_;
  const float* bias_;
  const int32_t* to_;
};

}  // namespace tas

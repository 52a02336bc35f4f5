// x times packed weights (packed.h) transposed: some rows of x meet sixteen or 32 of the matrix in registers, so that the weights
// are taken apart once for so many rows of x, which the processor does beside the products. Every sum is that of `Product`, to
// the last bit.
#pragma once
#include "packed.h"

#if defined(TAS_PACKS)
namespace tas {

class PackedProduct {
  using P = Pair<bf16>;
  using Word = decltype(P::load((const bf16*)nullptr));
  static constexpr int kPartsOfWord = 2 * kLanes / P::kStep;  // what a word of two numbers is multiplied in: itself, or floats
  // As floats, so few rows meet two blocks side by side: with one, a number of x is loaded for each product, which takes longer
  // than the product. The sums of two and of more rows do not fit into the registers.
  static constexpr int kPairRows = 8;
  static constexpr int64_t kManyRows = 64;  // for which it pays to take all columns of three blocks apart before

 public:
  PackedProduct(const HeldRows<bf16>& x, int64_t rows, const Packed& packed, const float* bias)
      : x_(x.data()), num_words_(x.num_words), rows_(rows), packed_(packed), weights_(packed), bias_(bias), in_pairs_(kPartsOfWord == 2 && rows <= kPairRows) {}

  static int64_t lanes(int64_t rows) { return std::min<int64_t>(rows, kLanes); }  // that it wants x in

  int64_t num_chunks() const { return (packed_.num_blocks() + chunk_blocks() - 1) / chunk_blocks(); }

  // The outputs of chunk c; `next` is what this thread takes after it. Behind the last chunk lie the next weights.
  template <class Out>
  void run(int64_t c, int64_t next, Out* out) const {
    const Stretch stretch{first_block(c + 1), first_block(next)};
    const int64_t begin = first_block(c);
    int64_t block = begin;
    if constexpr (kPartsOfWord == 2) {
      if (rows_ >= kManyRows) return for_count<kMostBlocks>(stretch.stop - begin, [&](auto count) { multiply_many<count>(begin, stretch, out); });
      if (in_pairs_)
        for (; block + 2 <= stretch.stop; block += 2) multiply_rows<2>(block, stretch, out);
    }
    for (; block < stretch.stop; block++) multiply_rows<1>(block, stretch, out);
  }

 private:
  using Stretch = PackedWeights::Stretch;
  static constexpr int kMostBlocks = 3;

  int64_t chunk_blocks() const { return in_pairs_ ? 2 : kMostBlocks; }  // that a thread takes at a time

  int64_t first_block(int64_t c) const {
    const int64_t missing = std::max<int64_t>(0, num_chunks() * chunk_blocks() - packed_.num_blocks());  // in the last chunk
    return c * chunk_blocks() - (c < num_chunks() ? 0 : missing);
  }

  // The outputs of N blocks of weights and all rows of x.
  template <int N, class Out>
  void multiply_rows(int64_t block, const Stretch& stretch, Out* out) const {
    for_count<N == 1 ? kLanes : kPairRows>(lanes(rows_), [&](auto count) {
      multiply<count, N, true>(block, 0, stretch, out);
      if constexpr (N == 1)  // pairs of blocks are for one pass
        for (int64_t row = count; row < rows_; row += count) multiply<count, N, false>(block, row, stretch, out);
    });
  }

  // The outputs of N blocks of weights and R rows of x from `row` on; of those there are.
  template <int R, int N, bool kFetches, class Out>
  void multiply(int64_t block, int64_t row, const Stretch& stretch, Out* out) const {
    Vec sums[N][R] = {};
    const float* x = x_ + row * num_words_;
    weights_.walk<N, kFetches>(block, stretch, [&](int64_t w, const auto& v) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int j = 0; j < kGroupWords; j++)
#pragma GCC unroll 2
        for (int i = 0; i < kPartsOfWord; i++) {
          Word weights[N];
#pragma GCC unroll 2
          for (int b = 0; b < N; b++) weights[b] = (Word)(kPartsOfWord == 1 ? v[b][j] : unpack<bf16>(v[b][j], i));
          const float* words = x + ((w + j) * kPartsOfWord + i) * R;
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {
            const Word word = splat_word<Word>(words + r);
#pragma GCC unroll 2
            for (int b = 0; b < N; b++) P::accumulate(sums[b][r], weights[b], word);
          }
        }
    });
    for (int b = 0; b < N; b++) put<R>(block + b, row, sums[b], out);
  }

  // A column of N blocks, as floats.
  template <int N>
  struct alignas(64) Numbers { float of_row[N][kLanes]; };

  // The outputs of N blocks of weights and many rows of x: the weights are taken apart once, into the second-level cache, as
  // floats, and meet a tile of x at a time.
  template <int N, class Out>
  void multiply_many(int64_t begin, const Stretch& stretch, Out* out) const {
    constexpr int kRows = 8;  // with N * 8 sums, nearly all registers
    static thread_local std::vector<Numbers<N>> numbers;
    numbers.resize(packed_.k);
    for (int b = 0; b < N; b++)
      weights_.walk<1, true>(begin + b, stretch, [&](int64_t w, const auto& v) {
        for (int j = 0; j < 2 * kGroupWords; j++) store(numbers[2 * w + j].of_row[b], unpack<bf16>(v[0][j / 2], j % 2));
      });
    for (int64_t row = 0; row < rows_; row += kRows) {
      Vec sums[N][kRows] = {};
      const float* x = x_ + row / kLanes * num_words_ * kLanes + row % kLanes;
      const Numbers<N>* weights = numbers.data();
      for (int64_t d = 0; d < packed_.k; d++, x += kLanes, weights++) {
        Vec w[N];
        for (int b = 0; b < N; b++) w[b] = load(weights->of_row[b]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
          const Vec v = splat_word<Vec>(x + r);
#pragma GCC unroll 3
          for (int b = 0; b < N; b++) sums[b][r] = fma(w[b], v, sums[b][r]);
        }
      }
      for (int b = 0; b < N; b++) put<kRows>(begin + b, row, sums[b], out);
    }
  }

  // Writes the sums of a block and R rows of x from `row` on; of those there are.
  template <int R, class Out>
  void put(int64_t block, int64_t row, const Vec (&sums)[R], Out* out) const {
    const Vec bias = bias_ ? load(bias_ + block * kLanes) : Vec{};
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      if (row + r < rows_) store(out + (row + r) * packed_.n + block * kLanes, bias_ ? sums[r] + bias : sums[r]);
  }

  const float* x_;
  int64_t num_words_, rows_;
  const Packed packed_;
  const PackedWeights weights_;
  const float* bias_;
  bool in_pairs_;
};

}  // namespace tas
#endif

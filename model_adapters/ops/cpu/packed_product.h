// x times packed weights (packed.h) transposed: some rows of x meet sixteen or 32 of the matrix in registers, so that the weights
// are taken apart once for so many rows of x, which the processor does beside the products. More rows find them, a slice at a
// time, in the first-level cache. Every sum is that of `Product`, to the last bit.
#pragma once
#include "packed.h"

#if defined(TAS_PACKS)
namespace tas {

class PackedProduct {
  using P = Pair<bf16>;
  using Word = decltype(P::load((const bf16*)nullptr));
  static constexpr int kPartsOfWord = 2 * kLanes / P::kStep;  // what a word of two numbers is multiplied in: itself, or floats
  static constexpr int kPassRows = kManyRegisters ? kLanes : 4;  // of x, whose sums stay in registers
  // As floats, so few rows meet two blocks side by side: the products of one alone would wait for the sums of those before.
  static constexpr int kPairRows = kManyRegisters ? 8 : 2;
  static constexpr int64_t kGroupSteps = kGroupWords * kPartsOfWord, kSliceSteps = 128, kSliceGroups = kSliceSteps / kGroupSteps;  // 8 KiB
  static constexpr int kFetchSteps = 16;  // between what of x is multiplied and what is fetched

 public:
  // The result has n columns: rows of the matrix, the last block of which may be padded. Its row r is row to[r] of the output,
  // if `to` is given.
  PackedProduct(const HeldRows<bf16>& x, int64_t rows, const Packed& packed, int64_t n, const float* bias, const int32_t* to = nullptr)
      : x_(x.data()), num_words_(x.num_words), rows_(rows), n_(n), packed_(packed), weights_(packed), bias_(bias), to_(to), in_pairs_(kPartsOfWord == 2 && rows <= kPairRows) {}

  static int64_t lanes(int64_t rows) { return std::min<int64_t>(rows, kPassRows); }  // that it wants x in

  int64_t num_chunks() const { return (packed_.num_blocks() + chunk_blocks() - 1) / chunk_blocks(); }

  // The outputs of chunk c; `next` is what this thread takes after it. Behind the last chunk lie the next weights.
  void run(int64_t c, int64_t next, bf16* out) const {
    const Stretch stretch{first_block(c + 1), first_block(next)};
    int64_t block = first_block(c);
    if (rows_ > kPassRows) {
      for (; block < stretch.stop; block++) multiply_slices(block, stretch, out);
      return;
    }
    if constexpr (kPartsOfWord == 2)
      if (in_pairs_)
        for (; block + 2 <= stretch.stop; block += 2) multiply_blocks<2>(block, stretch, out);
    for (; block < stretch.stop; block++) multiply_blocks<1>(block, stretch, out);
  }

 private:
  using Stretch = PackedWeights::Stretch;

  int64_t chunk_blocks() const { return in_pairs_ ? 2 : 3; }  // that a thread takes at a time

  int64_t first_block(int64_t c) const {
    const int64_t missing = std::max<int64_t>(0, num_chunks() * chunk_blocks() - packed_.num_blocks());  // in the last chunk
    return c * chunk_blocks() - (c < num_chunks() ? 0 : missing);
  }

  // Step j of those that a group is multiplied in.
  static Word step_of(const Vec (&group)[kGroupWords], int j) {
    if constexpr (kPartsOfWord == 1) return (Word)group[j];
    else return (Word)unpack<bf16>(group[j / kPartsOfWord], j % kPartsOfWord);
  }

  // Adds the products of a step of K: one of T strips of weights, and R rows of x.
  template <int T, int R>
  __attribute__((always_inline)) static void add_products(const Word (&weights)[T], const float* x, Vec (*sums)[R]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Word word = splat_word<Word>(x + r);
#pragma GCC unroll 2
      for (int t = 0; t < T; t++) P::accumulate(sums[t][r], weights[t], word);
    }
  }

  // The outputs of N blocks of weights and the rows of x, which are so few that one pass does.
  template <int N>
  void multiply_blocks(int64_t block, const Stretch& stretch, bf16* out) const {
    for_count<N == 1 ? kPassRows : kPairRows>(rows_, [&](auto count) {
      constexpr int R = count, kNum = N * kStrips, T = std::min(kNum, 2);
      Vec sums[kNum][R] = {};
      weights_.walk<N>(block, stretch, [&](int64_t w, const auto& take) __attribute__((always_inline)) {
        const float* x = in_register(x_ + w * kPartsOfWord * R);
#pragma GCC unroll 4
        for (int first = 0; first < kNum; first += T) {
          Vec v[T][kGroupWords];
#pragma GCC unroll 2
          for (int t = 0; t < T; t++) take((first + t) / kStrips, (first + t) % kStrips, v[t]);
#pragma GCC unroll 8
          for (int j = 0; j < kGroupSteps; j++) {
            Word weights[T];
#pragma GCC unroll 2
            for (int t = 0; t < T; t++) weights[t] = step_of(v[t], j);
            add_products<T, R>(weights, x + j * R, sums + first);
          }
        }
      });
      for (int b = 0; b < N; b++) put<R>(block + b, 0, sums + b * kStrips, out);
    });
  }

  // Sums of a block and as many rows of x.
  struct Sums {
    Vec of[kStrips][kPassRows];
  };

  // The outputs of a block and more rows of x than one pass takes. A slice of the block is taken apart in the first pass, and
  // found so by the others.
  void multiply_slices(int64_t block, const Stretch& stretch, bf16* out) const {
    Word slice[kSliceSteps][kStrips];
    static thread_local std::vector<Sums> sums_of_thread;
    const int64_t num_passes = (rows_ + kPassRows - 1) / kPassRows;
    sums_of_thread.resize(num_passes);
    auto place = weights_.first_place<1>(block);
    for (int64_t begin = 0; begin < packed_.num_groups(); begin = place.group) {
      const int64_t end = std::min(packed_.num_groups(), begin + kSliceGroups);
      for (int64_t pass = 0; pass < num_passes; pass++) {
        Sums sums = begin == 0 ? Sums{} : sums_of_thread[pass];
        const float* x = x_ + (pass * num_words_ + begin * kGroupSteps) * kPassRows;
        if (pass == 0) take_slice(place, end, stretch, x, slice, sums);
        else add_slice((end - begin) * kGroupSteps, x, slice, sums);
        sums_of_thread[pass] = sums;
      }
    }
    for (int64_t pass = 0; pass < num_passes; pass++) put<kPassRows>(block, pass * kPassRows, sums_of_thread[pass].of, out);
  }

  // Takes the groups of a block up to `end` apart into `slice`, and adds their products with a pass of x.
  __attribute__((always_inline)) void take_slice(PackedWeights::Place<1>& place, int64_t end, const Stretch& stretch, const float* x, Word (*slice)[kStrips], Sums& sums) const {
    weights_.walk(place, end, stretch, [&](int64_t, const auto& take) __attribute__((always_inline)) {
      Vec v[kStrips][kGroupWords];
#pragma GCC unroll 2
      for (int strip = 0; strip < kStrips; strip++) take(0, strip, v[strip]);
#pragma GCC unroll 8
      for (int j = 0; j < kGroupSteps; j++) {
        Word weights[kStrips];
#pragma GCC unroll 2
        for (int strip = 0; strip < kStrips; strip++) slice[j][strip] = weights[strip] = step_of(v[strip], j);
        add_products<kStrips, kPassRows>(weights, x + j * kPassRows, sums.of);
      }
      slice += kGroupSteps;
      x = in_register(x + kGroupSteps * kPassRows);
    });
  }

  // Adds the products of a slice that is taken apart with a pass of x.
  __attribute__((always_inline)) static void add_slice(int64_t num_steps, const float* x, const Word (*slice)[kStrips], Sums& sums) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < num_steps; j++) {
      __builtin_prefetch(x + kFetchSteps * kLanes, 0, 3);
      add_products<kStrips, kPassRows>(slice[j], x, sums.of);
      x = in_register(x + kPassRows);
    }
  }

  // Writes the sums of a block and R rows of x from `row` on; of those there are.
  template <int R>
  void put(int64_t block, int64_t row, const Vec (*sums)[R], bf16* out) const {
#pragma GCC unroll 2
    for (int strip = 0; strip < kStrips; strip++) {
      const int64_t begin = block * kGroupRows + strip * kLanes, count = std::min<int64_t>(kLanes, n_ - begin);
      if (count <= 0) return;
      const Vec bias = bias_ ? first_of(bias_ + begin, count) : Vec{};
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        if (row + r < rows_) put_first(bias_ ? sums[strip][r] + bias : sums[strip][r], count, out + (to_ ? to_[row + r] : row + r) * n_ + begin);
    }
  }

  static Vec first_of(const float* p, int64_t count) {
    if (count == kLanes) return load(p);
    float all[kLanes] = {};
    std::copy(p, p + count, all);
    return load(all);
  }

  static void put_first(Vec v, int64_t count, bf16* out) {
    if (count == kLanes) return store(out, v);
    bf16 all[kLanes];
    store(all, v);
    std::copy(all, all + count, out);
  }

  const float* x_;
  int64_t num_words_, rows_, n_;
  const Packed packed_;
  const PackedWeights weights_;
  const float* bias_;
  const int32_t* to_;
  bool in_pairs_;
};

}  // namespace tas
#endif

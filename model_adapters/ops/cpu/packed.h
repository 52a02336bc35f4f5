// Weights of bfloat16 in three quarters of their bytes, with none of their bits lost.
//
// The high byte of a bfloat16 is its sign and seven bits of its exponent. Those of a model's weights are much alike: the
// sixteen commonest of a matrix are nearly all of them, and four bits say which. So a group of 8 numbers of 16 rows takes
// 192 bytes: 128 low bytes as they are, and 64 bytes of two codes each. Groups with another high byte lie in a list, as they
// were. (That exponents can be coded so is the finding of arXiv 2411.05239 and 2504.11651, which use Huffman's codes.)
//
// Memory is what decoding waits for, and the codes are taken apart in nine instructions for 128 weights. The vectors that
// come out hold a word of 16 rows each, as `Product` wants them, and the groups of 16 rows are one stretch of memory.
#pragma once
#include "product.h"

// With tiles for matrix products (AMX) many rows are better left to XLA, which wants the weights as they were.
#if defined(__AVX512BW__) && !defined(__AMX_TILE__)
#define TAS_PACKS 1

namespace tas {

constexpr int kGroupWords = 4, kGroupColumns = 8, kGroupBytes = 192, kGroupPlainBytes = 256, kNumCodes = 16;

// Where the parts of a packed matrix lie; those of `index` behind one another, int32:
// table[16 bytes], first[n / 16 + 1], at[number of groups in the list], and the list itself.
struct Packed {
  const uint8_t* groups;
  const int32_t* index;
  int64_t n, k;

  int64_t num_blocks() const { return n / kLanes; }
  int64_t num_groups() const { return k / kGroupColumns; }  // of a block
  const int32_t* first() const { return index + kNumCodes / 4; }
  const int32_t* at() const { return first() + num_blocks() + 1; }
  const uint8_t* list() const { return (const uint8_t*)(at() + first()[num_blocks()]); }
};

// A packed matrix, taken apart.
class PackedWeights {
 public:
  explicit PackedWeights(const Packed& packed) : packed_(packed), table_(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)packed.index))) {}

  // Blocks that a thread takes apart one behind the other, up to `stop`, and the block that it goes on with from there.
  struct Stretch {
    int64_t stop, next;
  };

  // Calls f(w, vectors) for each group of N blocks side by side: words w to w + 3 of their rows, 16 to a block. Memory is asked
  // for what comes later in the stretch, and behind it. Inlined, sums that f adds to stay in registers.
  template <int N, bool kFetches, class F>
  __attribute__((always_inline)) void walk(int64_t block, const Stretch& stretch, const F& f) const {
    const int32_t *first = packed_.first() + block, *at = packed_.at();
    const int64_t num_groups = packed_.num_groups(), block_bytes = num_groups * kGroupBytes;
    const uint8_t *list = packed_.list(), *p = packed_.groups + block * block_bytes;
    const uint8_t* last_fetched = p + block_bytes - kAhead;
    const int64_t behind = kAhead + ((block + N < stretch.stop ? block + N : stretch.next) - block - 1) * block_bytes;
    int64_t listed[N];  // the next one of each block
    for (int b = 0; b < N; b++) listed[b] = first[b];
    for (int64_t g = 0;; g++, p += kGroupBytes) {
      int64_t stop = num_groups;
      for (int b = 0; b < N; b++)
        if (listed[b] < first[b + 1]) stop = std::min<int64_t>(stop, at[listed[b]]);
      for (; g < stop; g++, p += kGroupBytes) {
        Vec v[N][kGroupWords];
        const uint8_t* later = p + (p < last_fetched ? kAhead : behind);
#pragma GCC unroll 3
        for (int b = 0; b < N; b++, later += block_bytes) {
          if (kFetches) {
            __builtin_prefetch(later, 0, 2);
            __builtin_prefetch(later + 64, 0, 2);
            __builtin_prefetch(later + 128, 0, 2);
          }
          take_apart(p + b * block_bytes, v[b]);
        }
        f(g * kGroupWords, v);
      }
      if (g == num_groups) return;
      Vec v[N][kGroupWords];
      for (int b = 0; b < N; b++) {
        if (listed[b] < first[b + 1] && at[listed[b]] == g) std::memcpy(v[b], list + listed[b]++ * kGroupPlainBytes, sizeof v[b]);
        else take_apart(p + b * block_bytes, v[b]);
      }
      f(g * kGroupWords, v);
    }
  }

 private:
  static constexpr int kAhead = 8192;  // bytes between what is taken apart and what is fetched

  void take_apart(const uint8_t* p, Vec* v) const {
    const __m512i low = _mm512_set1_epi8(0x0f), codes = _mm512_loadu_si512(p + 128);
    const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64);
    const __m512i high_a = _mm512_shuffle_epi8(table_, _mm512_and_si512(codes, low));
    const __m512i high_b = _mm512_shuffle_epi8(table_, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
    v[0] = (Vec)_mm512_unpacklo_epi8(a, high_a);
    v[1] = (Vec)_mm512_unpackhi_epi8(a, high_a);
    v[2] = (Vec)_mm512_unpacklo_epi8(b, high_b);
    v[3] = (Vec)_mm512_unpackhi_epi8(b, high_b);
  }

  const Packed packed_;
  const __m512i table_;
};

// x times a packed matrix transposed: some rows of x meet sixteen or 32 of the matrix in registers, so that the weights are
// taken apart once for so many rows of x, which the processor does beside the products. Every sum is that of `Product`, to the
// last bit.
class PackedProduct {
  using P = Pair<bf16>;
  using Word = decltype(P::load((const bf16*)nullptr));
  static constexpr int kPartsOfWord = 2 * kLanes / P::kStep;  // what a word of two numbers is multiplied in: itself, or floats
  static constexpr int64_t kManyRows = 64;  // of x, for which it pays to keep weights as floats for a while
  // As floats, two blocks side by side: a product for each number of x that is loaded takes longer for loads than for
  // products. With more rows the sums of two are too many, and with a few more a second pass takes longer.
  static constexpr int kPairRows = 8;

 public:
  PackedProduct(const HeldRows<bf16>& x, int64_t rows, const Packed& packed, const float* bias)
      : x_(x.data()), num_words_(x.num_words), rows_(rows), packed_(packed), weights_(packed), bias_(bias), in_pairs_(kPartsOfWord == 2 && (rows <= kPairRows || rows >= kLanes) && rows < kManyRows) {}

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
    const auto pass = [&](auto count, auto stride) {
      multiply<count, N, stride, true>(block, 0, stretch, out);
      for (int64_t row = count; row < rows_; row += count) multiply<count, N, stride, false>(block, row, stretch, out);
    };
    constexpr int kMost = N == 1 ? kLanes : kPairRows;
    if (lanes(rows_) > kMost) pass(std::integral_constant<int, kMost>{}, std::integral_constant<int, kLanes>{});
    else for_count<kMost>(lanes(rows_), [&](auto count) { pass(count, count); });
  }

  // The outputs of N blocks of weights and R rows of x from `row` on; of those there are.
  // The rows of x lie in groups of kStride.
  template <int R, int N, int kStride, bool kFetches, class Out>
  void multiply(int64_t block, int64_t row, const Stretch& stretch, Out* out) const {
    Vec sums[N][R] = {};
    const float* x = x_ + row / kStride * kStride * num_words_ + row % kStride;
    weights_.walk<N, kFetches>(block, stretch, [&](int64_t w, const auto& v) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int j = 0; j < kGroupWords; j++)
#pragma GCC unroll 2
        for (int i = 0; i < kPartsOfWord; i++) {
          Word weights[N];
#pragma GCC unroll 2
          for (int b = 0; b < N; b++) weights[b] = (Word)(kPartsOfWord == 1 ? v[b][j] : unpack<bf16>(v[b][j], i));
          const float* words = x + ((w + j) * kPartsOfWord + i) * kStride;
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

  // The outputs of N blocks of weights and many rows of x: the weights are taken apart once, into the second-level cache, as
  // floats, and tiles of them meet some rows of x at a time.
  template <int N, class Out>
  void multiply_many(int64_t begin, const Stretch& stretch, Out* out) const {
    constexpr int kRows = 8;  // with N * 8 sums, nearly all registers
    struct alignas(64) Numbers { float of_row[kLanes]; };
    static thread_local std::vector<Numbers> numbers;  // [k][N]
    numbers.resize(packed_.k * N);
    for (int b = 0; b < N; b++)
      weights_.walk<1, true>(begin + b, stretch, [&](int64_t w, const auto& v) {
        for (int j = 0; j < 2 * kGroupWords; j++) store(numbers[(2 * w + j) * N + b].of_row, unpack<bf16>(v[0][j / 2], j % 2));
      });
    for (int64_t row = 0; row < rows_; row += kRows) {
      Vec sums[N][kRows] = {};
      const float* x = x_ + row / kLanes * num_words_ * kLanes + row % kLanes;
      const Numbers* weights = numbers.data();
      for (int64_t d = 0; d < packed_.k; d++, x += kLanes, weights += N) {
        Vec w[N];
        for (int b = 0; b < N; b++) w[b] = load(weights[b].of_row);
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

// The other way.
class Packer {
 public:
  Packer(const uint16_t* weight, int64_t n, int64_t k, const uint8_t* table) : weight_(weight), n_(n), k_(k), table_(table) {}

  // The sixteen commonest high bytes, by a look at some rows.
  static void choose_table(const uint16_t* weight, int64_t n, int64_t k, uint8_t* table) {
    constexpr int64_t kLooks = 64;
    int64_t counts[256] = {};
    for (int64_t r = 0; r < n; r += std::max<int64_t>(1, n / kLooks))
      for (int64_t d = 0; d < k; d++) counts[weight[r * k + d] >> 8]++;
    for (int c = 0; c < kNumCodes; c++) {
      table[c] = uint8_t(std::max_element(counts, counts + 256) - counts);
      counts[table[c]] = -1;
    }
  }

  // Writes the groups and the list, of up to `most`: in first[b] how many of it are of blocks before b, in `at` which of
  // their block they are. Returns how many there are; of more than `most`, the list has the first ones.
  int64_t pack(uint8_t* groups, int32_t* first, int64_t most, int32_t* at, uint8_t* list) const {
    int32_t count = 0;
    first[0] = 0;
    each_group([&](int64_t block, int64_t g, const __m512i* v) {
      __m512i low[2], codes[2];
      if (!split(v, low, codes) && count++ < most) {
        at[count - 1] = int32_t(g);
        std::memcpy(list + (count - 1) * kGroupPlainBytes, v, kGroupPlainBytes);
      }
      _mm512_storeu_si512(groups, low[0]);
      _mm512_storeu_si512(groups + 64, low[1]);
      _mm512_storeu_si512(groups + 128, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
      groups += kGroupBytes;
      first[block + 1] = count;
    });
    return count;
  }

 private:
  // f(block, group, its four words of 16 rows)
  template <class F>
  void each_group(const F& f) const {
    for (int64_t block = 0; block < n_ / kLanes; block++)
      for (int64_t d = 0; d < k_; d += 2 * kLanes) {
        Vec v[kLanes];
        const int64_t left = std::min<int64_t>(k_ - d, 2 * kLanes) / 2;
        for (int r = 0; r < kLanes; r++) v[r] = load_words(weight_ + (block * kLanes + r) * k_ + d, left * sizeof(float));
        transpose_square(v);
        for (int j = 0; j < left; j += kGroupWords) f(block, (d / 2 + j) / kGroupWords, (const __m512i*)(v + j));
      }
  }

  // The low bytes and the codes of the high ones; false if one has none.
  bool split(const __m512i* v, __m512i* low, __m512i* codes) const {
    const __m512i mask = _mm512_set1_epi16(0x00ff);
    bool fits = true;
    for (int i = 0; i < 2; i++) {
      const __m512i a = v[2 * i], b = v[2 * i + 1];
      low[i] = _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
      const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
      codes[i] = _mm512_setzero_si512();
      __mmask64 found = 0;
      for (int c = 0; c < kNumCodes; c++) {
        const __mmask64 is = _mm512_cmpeq_epi8_mask(high, _mm512_set1_epi8(char(table_[c])));
        codes[i] = _mm512_mask_mov_epi8(codes[i], is, _mm512_set1_epi8(char(c)));
        found |= is;
      }
      fits = fits && found == ~__mmask64(0);
    }
    return fits;
  }

  const uint16_t* weight_;
  int64_t n_, k_;
  const uint8_t* table_;
};

}  // namespace tas
#endif

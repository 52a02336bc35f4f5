// Matrices of int8 or int4 with a scale, and perhaps an offset, for each group of columns of a row, in the order that products
// with the processor's instructions for bytes want.
//
// Sixteen rows of the matrix form a block, four columns of one of its rows a word of 32 bits. A step is a word of each of
// the sixteen rows: 64 bytes, so that sums of rows stay in the lanes of a vector and are never added across them.
//   int8: [n / 16][k / 4] steps. int4: two steps lie in 64 bytes, the first in the low halves of the bytes; what is stored is
//   a number plus `zero`, from 0 to 15. scale and offset: [n / 16][number of groups][16], float16 or float32.
// What lies behind the last row or column is zero.
//
// Rows of x are rounded to int8 with a scale for a group of columns (as llama.cpp's Q8_0 does), or stay floats.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "product.h"
#include "simd.h"

namespace tas {

constexpr int kBlockRows = 16, kStepColumns = 4, kStepBytes = kBlockRows * kStepColumns;
constexpr int kRowStrips = kBlockRows / kLanes;  // of a block: what a vector holds of it
constexpr int kQuantizedPassRows = kManyRegisters ? 12 : 4;  // of x, whose sums stay in registers

// A matrix [n, k] and where its parts lie.
struct QuantizedMatrix {
  const uint8_t* values;
  const void* scale;
  const void* offset;  // or null
  bool is_half;        // scale and offset are float16
  int bits, zero;
  int64_t n, k, padded_k, group;

  int64_t num_blocks() const { return (n + kBlockRows - 1) / kBlockRows; }
  int64_t block_bytes() const { return padded_k * kBlockRows * bits / 8; }
  int64_t num_groups() const { return (k + group - 1) / group; }
  int unit() const { return group % 32 == 0 || group >= k ? 32 : 16; }  // columns that share all scales
  int64_t num_units() const { return (k + unit() - 1) / unit(); }  // with scales: of 16 columns one may lie behind them
};

// kLanes scales or offsets of group g, from row `row` of block b on.
inline Vec load_scales(const void* scales, bool is_half, int64_t index) {
  return is_half ? load((const f16*)scales + index) : load((const float*)scales + index);
}

// Rows of x as the product wants them, in passes of R rows: word w of row r of pass p at words + ((p * num_words + w) * R + r).
// A word is four rounded numbers, or one float. For each unit of columns and row: the scale of the rounded numbers, their sum,
// and their sum times the scale.
class QuantizedRows {
 public:
  QuantizedRows(int64_t rows, const QuantizedMatrix& matrix, bool rounds)
      : rows_(rows), unit_(matrix.unit()), num_units_(matrix.num_units()), k_(matrix.k), rounds_(rounds) {
    const int64_t passes = std::max<int64_t>(1, (rows + kQuantizedPassRows - 1) / kQuantizedPassRows);
    const int64_t even = (rows + passes - 1) / passes;
    pass_rows = even <= 2 ? std::max<int64_t>(1, even) : even <= 4 ? 4 : even <= 8 ? 8 : 12;
    num_passes = (rows + pass_rows - 1) / pass_rows;
    num_words_ = num_units_ * unit_ / (rounds ? 4 : 1);
    const int64_t count = num_passes * pass_rows;
    words_.resize(count * num_words_);
    scale_.resize(count * num_units_);
    sum_.resize(count * num_units_);
    scaled_sum_.resize(count * num_units_);
  }

  template <class T>
  void take(xla::ffi::ThreadPool& threads, const T* x, int64_t act_group) {
    parallel_for(threads, rows_, 1 + rows_ * k_ / (64 << 10), [&](int64_t r, int64_t) {
      if (rounds_) round_row(x + r * k_, r, act_group);
      else copy_row(x + r * k_, r);
    });
  }

  int64_t pass_rows, num_passes;
  const float* words(int64_t pass) const { return words_.data() + pass * num_words_ * pass_rows; }
  const float* scale(int64_t pass) const { return scale_.data() + pass * num_units_ * pass_rows; }
  const int32_t* sum(int64_t pass) const { return sum_.data() + pass * num_units_ * pass_rows; }
  const float* scaled_sum(int64_t pass) const { return scaled_sum_.data() + pass * num_units_ * pass_rows; }

 private:
  // Number `index` of row r, in an array that has `per_row` of each.
  int64_t place(int64_t r, int64_t index, int64_t per_row) const {
    return ((r / pass_rows) * per_row + index) * pass_rows + r % pass_rows;
  }

  template <class T>
  static Vec load_at(const T* row, int64_t d, int64_t end) {
    return d + kLanes <= end ? load(row + d) : d < end ? load_first(row + d, int(end - d)) : Vec{};
  }

  template <class T>
  void round_row(const T* row, int64_t r, int64_t act_group) {
    const Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    for (int64_t begin = 0; begin < k_; begin += act_group) {
      const int64_t end = std::min(k_, begin + act_group);
      UVec most{};
      for (int64_t d = begin; d < end; d += kLanes) {
        const UVec bits = bit_cast<UVec>(load_at(row, d, end)) & 0x7fffffffu;
        most = bits > most ? bits : most;
      }
      uint32_t largest_bits = 0;
      for (int i = 0; i < kLanes; i++) largest_bits = std::max<uint32_t>(largest_bits, most[i]);
      const float largest = bit_cast<float>(largest_bits);
      // NaN and infinity make the outputs of the row NaN; numbers so small that their inverse is none are zeros.
      const bool is_finite = largest_bits < 0x7f800000u, is_zero = largest < 1e-30f;
      const float inverse = is_finite && !is_zero ? 127.f / largest : 0.f;
      const float scale = is_finite ? (is_zero ? 0.f : largest / 127.f) : bit_cast<float>(0x7fc00000u);
      for (int64_t d = begin; d < end; d += unit_) {
        int8_t numbers[32 + kLanes] = {};
        if (is_finite)
          for (int j = 0; j < unit_; j += kLanes) {
            const Vec shifted = load_at(row, d + j, end) * inverse + magic;
            const BVec bytes = __builtin_convertvector(bit_cast<IVec>(shifted) - bit_cast<IVec>(magic), BVec);
            std::memcpy(numbers + j, &bytes, sizeof bytes);
          }
        int32_t sum = 0;
        for (int j = 0; j < unit_; j++) sum += numbers[j];
        const int64_t u = d / unit_, at = place(r, u, num_units_);
        for (int v = 0; v < unit_ / 4; v++) std::memcpy(&words_[place(r, u * (unit_ / 4) + v, num_words_)], numbers + 4 * v, 4);
        scale_[at] = scale, sum_[at] = sum, scaled_sum_[at] = scale * float(sum);
      }
    }
  }

  template <class T>
  void copy_row(const T* row, int64_t r) {
    for (int64_t u = 0; u < num_units_; u++) {
      float sum = 0;
      for (int64_t d = u * unit_; d < std::min(k_, (u + 1) * unit_); d++) {
        const float number = to_float(row[d]);
        words_[place(r, d, num_words_)] = number;
        sum += number;
      }
      scaled_sum_[place(r, u, num_units_)] = sum;
    }
  }

  int64_t rows_, unit_, num_units_, num_words_, k_;
  bool rounds_;
  std::vector<float> words_, scale_, scaled_sum_;
  std::vector<int32_t> sum_;
};

inline IVec load_bytes(const void* p) {
  IVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline IVec splat_int(const void* p) {
#if defined(__AVX512F__)
  return (IVec)_mm512_set1_epi32(*(const int32_t*)p);
#else
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return IVec{} + word;
#endif
}

// Exact sums of products of bytes in the lanes of a vector, over the columns of a unit. Weights are int8, or of 4 bits: 0 to 15,
// from which `zero` is to be taken. `sum` is that of the row's numbers of the unit.
template <int kBits>
struct ByteSum {
#if defined(__AVX512VNNI__)
  // One instruction takes unsigned weights: int8 plus 128.
  IVec acc;
  ByteSum(int32_t sum, int zero) : acc(IVec{} - (kBits == 8 ? 128 : zero) * sum) {}
  static IVec prepared(IVec weights) { return kBits == 8 ? weights ^ int32_t(0x80808080) : weights; }
  void add(IVec weights, IVec x) { acc = (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, (__m512i)x); }
  Vec total(int32_t, int) const { return __builtin_convertvector(acc, Vec); }
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
  // Products of unsigned and signed bytes are added in pairs to 16 bits: of int8 the size of a weight and x with its sign; of
  // int4, whose sums of a unit fit in 16 bits (15 * 127 * 2 * 8), as they are.
  IVec acc{};
  ByteSum(int32_t, int) {}
  static IVec prepared(IVec weights) { return weights; }
  void add(IVec weights, IVec x) {
    if constexpr (kBits == 4) acc = (IVec)((Shorts)acc + (Shorts)pairs(weights, x));
    else acc += joined(pairs(size(weights), with_sign_of(weights, x)));
  }
  Vec total(int32_t sum, int zero) const {
    if constexpr (kBits == 8) return __builtin_convertvector(acc, Vec);
    else return __builtin_convertvector(joined(acc) - zero * sum, Vec);
  }

 private:
  typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));
#if defined(__AVX512BW__)
  static IVec pairs(IVec a, IVec b) { return (IVec)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
  static IVec joined(IVec a) { return (IVec)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1)); }
  static IVec size(IVec a) { return (IVec)_mm512_abs_epi8((__m512i)a); }
  static IVec with_sign_of(IVec a, IVec x) {
    return (IVec)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)a), _mm512_setzero_si512(), (__m512i)x);
  }
#else
  static IVec pairs(IVec a, IVec b) { return (IVec)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
  static IVec joined(IVec a) { return (IVec)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1)); }
  static IVec size(IVec a) { return (IVec)_mm256_abs_epi8((__m256i)a); }
  static IVec with_sign_of(IVec a, IVec x) { return (IVec)_mm256_sign_epi8((__m256i)x, (__m256i)a); }
#endif

 public:
#else
  IVec acc{};
  ByteSum(int32_t, int) {}
  static IVec prepared(IVec weights) { return weights; }
  void add(IVec weights, IVec x) {
    for (int shift = 0; shift < 32; shift += 8) acc += (weights << (24 - shift) >> 24) * (x << (24 - shift) >> 24);
  }
  Vec total(int32_t sum, int zero) const { return __builtin_convertvector(acc - (kBits == 4 ? zero * sum : 0), Vec); }
#endif
};

// x[rows, k] times a quantized matrix transposed.
class QuantizedProduct {
 public:
  // Writes kLanes sums, or the first `count` of them, to element `index` of the result.
  using Store = void (*)(void* out, int64_t index, Vec sums, int count);

  QuantizedProduct(const QuantizedRows& x, int64_t rows, const QuantizedMatrix& matrix, bool rounds, const float* bias, void* out, Store store)
      : x_(x), rows_(rows), matrix_(matrix), rounds_(rounds), bias_(bias), out_(out), store_(store) {}

  template <class Out>
  static void store_as(void* out, int64_t index, Vec sums, int count) {
    Out* to = (Out*)out + index;
    if (count == kLanes) store(to, sums);
    else store_first(to, sums, count);
  }

  int64_t num_chunks() const { return (matrix_.num_blocks() + kChunkBlocks - 1) / kChunkBlocks; }

  // The outputs of chunk c; `next` is what this thread takes after it.
  void run(int64_t c, int64_t next) const {
    if (matrix_.bits == 8) matrix_.unit() == 32 ? run_chunk<8, 32>(c, next) : run_chunk<8, 16>(c, next);
    else matrix_.unit() == 32 ? run_chunk<4, 32>(c, next) : run_chunk<4, 16>(c, next);
  }

 private:
  static constexpr int64_t kChunkBlocks = 4;  // that a thread takes at a time
  static constexpr int64_t kAhead = 10240;     // bytes between what is multiplied and what is fetched
  static constexpr int64_t kScalesAhead = 16 * kBlockRows;  // the same in scales

  template <int kBits, int kUnit>
  void run_chunk(int64_t c, int64_t next) const {
    const int64_t stop = std::min(matrix_.num_blocks(), (c + 1) * kChunkBlocks);
    for (int64_t block = c * kChunkBlocks; block < stop; block++) {
      const int64_t then = block + 1 < stop ? block + 1 : next * kChunkBlocks;  // the block that is multiplied next
      for (int64_t pass = 0; pass < x_.num_passes; pass++) {
        const auto run_pass = [&](auto count) { multiply<kBits, kUnit, count>(block, then, pass); };
        switch (x_.pass_rows) {
          case 1: run_pass(std::integral_constant<int, 1>{}); break;
          case 2: run_pass(std::integral_constant<int, 2>{}); break;
          case 4: run_pass(std::integral_constant<int, 4>{}); break;
          case 8: if constexpr (kManyRegisters) run_pass(std::integral_constant<int, 8>{}); break;
          default: if constexpr (kManyRegisters) run_pass(std::integral_constant<int, 12>{});
        }
      }
    }
  }

  template <int kBits, int kUnit, int R>
  void multiply(int64_t block, int64_t then, int64_t pass) const {
    constexpr int S = R <= 2 ? std::min(2, kRowStrips) : 1;  // strips that meet a word of x together
    for (int strip = 0; strip < kRowStrips; strip += S) {
      const int64_t fetched = pass == 0 && strip == 0 ? then : -1;
      if (rounds_) multiply_strips<kBits, kUnit, R, S, true>(block, fetched, pass, strip);
      else multiply_strips<kBits, kUnit, R, S, false>(block, fetched, pass, strip);
    }
  }

  // Word `step` of S strips at p: bytes of int8, or numbers from 0 to 15.
  template <int kBits, int S>
  __attribute__((always_inline)) static void load_step(const uint8_t* p, int step, int strip, IVec* weights) {
#pragma GCC unroll 2
    for (int s = 0; s < S; s++) {
      const uint8_t* at = p + (kBits == 8 ? step : step / 2) * kStepBytes + (strip + s) * int(sizeof(IVec));
      const IVec bytes = load_bytes(at);
      weights[s] = kBits == 8 ? bytes : (step % 2 ? (IVec)((UVec)bytes >> 4) : bytes) & 0x0f0f0f0f;
    }
  }

  // Sums of a unit of S strips and R rows: of rounded numbers, times their scale, or of floats.
  template <int kBits, int kUnit, int R, int S, bool kRounds>
  __attribute__((always_inline)) static void sum_unit(const uint8_t* p, int zero, int strip, const float* x, const float* scale, const int32_t* sum, Vec (&out)[S][R]) {
    if constexpr (kRounds) {
      using Sum = ByteSum<kBits>;
      struct { alignas(64) char bytes[sizeof(Sum)]; } memory[S][R];
      Sum (*sums)[R] = reinterpret_cast<Sum (*)[R]>(memory);
#pragma GCC unroll 2
      for (int s = 0; s < S; s++)
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) new (&sums[s][r]) Sum(sum[r], zero);
#pragma GCC unroll 8
      for (int v = 0; v < kUnit / 4; v++) {
        IVec weights[S];
        load_step<kBits, S>(p, v, strip, weights);
#pragma GCC unroll 2
        for (int s = 0; s < S; s++) weights[s] = Sum::prepared(weights[s]);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const IVec word = splat_int(x + v * R + r);
#pragma GCC unroll 2
          for (int s = 0; s < S; s++) sums[s][r].add(weights[s], word);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int s = 0; s < S; s++) out[s][r] = sums[s][r].total(sum[r], zero) * splat(scale[r]);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < kUnit / 4; v++) {
        IVec weights[S];
        load_step<kBits, S>(p, v, strip, weights);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
          Vec numbers[S];
#pragma GCC unroll 2
          for (int s = 0; s < S; s++) numbers[s] = __builtin_convertvector((weights[s] << (24 - 8 * c) >> 24) - (kBits == 4 ? zero : 0), Vec);
#pragma GCC unroll 12
          for (int r = 0; r < R; r++) {
            const Vec number = splat_word<Vec>(x + (4 * v + c) * R + r);
#pragma GCC unroll 2
            for (int s = 0; s < S; s++) out[s][r] = fma(numbers[s], number, out[s][r]);
          }
        }
      }
    }
  }

  template <int kBits, int kUnit, int R, int S, bool kRounds>
  void multiply_strips(int64_t block, int64_t then, int64_t pass, int strip) const {
    constexpr int64_t kUnitBytes = kUnit * kBlockRows * kBits / 8, kUnitWords = kUnit / (kRounds ? 4 : 1);
    const int64_t block_bytes = matrix_.block_bytes(), num_units = matrix_.num_units(), units_of_group = (matrix_.group + kUnit - 1) / kUnit;
    const uint8_t *first = matrix_.values + block * block_bytes, *p = first;
    const uint8_t* last_fetched = first + block_bytes - kAhead;
    const int64_t behind = kAhead + (then - block - 1) * block_bytes;
    const float *x = x_.words(pass), *scale = x_.scale(pass), *scaled_sum = x_.scaled_sum(pass);
    const int32_t* sum = x_.sum(pass);
    const int64_t scale_bytes = matrix_.is_half ? 2 : 4;
    int64_t at = block * matrix_.num_groups() * kBlockRows + strip * kLanes, left = 0;
    Vec sums[S][R] = {}, weight_scale[S], offset[S];
    for (int64_t u = 0; u < num_units; u++, p += kUnitBytes, x += kUnitWords * R, scale += R, sum += R, scaled_sum += R) {
      if (then >= 0) {
        const uint8_t* later = p + (p < last_fetched ? kAhead : behind);
#pragma GCC unroll 8
        for (int64_t line = 0; line < kUnitBytes; line += 64) {
          if (x_.num_passes == 1) __builtin_prefetch(later + line, 0, 3);
          else __builtin_prefetch(later + line, 0, 2);  // other passes use the first-level cache meanwhile
        }
      }
      if (left == 0) {
        left = units_of_group;
#pragma GCC unroll 2
        for (int s = 0; s < S; s++) {
          weight_scale[s] = load_scales(matrix_.scale, matrix_.is_half, at + s * kLanes);
          if (matrix_.offset) offset[s] = load_scales(matrix_.offset, matrix_.is_half, at + s * kLanes);
        }
        at += kBlockRows;
        if (then >= 0) __builtin_prefetch((const char*)matrix_.scale + (at + kScalesAhead) * scale_bytes, 0, 2);
      }
      left--;
      Vec of_unit[S][R] = {};
      sum_unit<kBits, kUnit, R, S, kRounds>(p, matrix_.zero, strip, x, scale, sum, of_unit);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int s = 0; s < S; s++) sums[s][r] = fma(of_unit[s][r], weight_scale[s], sums[s][r]);
      if (matrix_.offset) {
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int s = 0; s < S; s++) sums[s][r] = fma(splat(scaled_sum[r]), offset[s], sums[s][r]);
      }
    }
    for (int s = 0; s < S; s++) put<R>(block * kBlockRows + (strip + s) * kLanes, pass * R, sums[s]);
  }

  // Writes the sums of kLanes weight rows from i on and R rows of x from `row` on; of those there are.
  template <int R>
  void put(int64_t i, int64_t row, const Vec (&sums)[R]) const {
    const int count = int(std::min<int64_t>(kLanes, matrix_.n - i));
    if (count <= 0) return;
    Vec bias{};
    if (bias_) bias = count == kLanes ? load(bias_ + i) : load_first(bias_ + i, count);
    for (int r = 0; r < R && row + r < rows_; r++) store_(out_, (row + r) * matrix_.n + i, bias_ ? sums[r] + bias : sums[r], count);
  }

  const QuantizedRows& x_;
  int64_t rows_;
  const QuantizedMatrix matrix_;
  bool rounds_;
  const float* bias_;
  void* out_;
  Store store_;
};

}  // namespace tas

// x times a quantized matrix transposed: sixteen rows of the matrix, in the lanes of vectors, meet some rows of x in registers.
// `quantized_rows.h` has the order of both.
#pragma once
#include "quantized_rows.h"

namespace tas {

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

// Sixteen floats, looked up by the low four bits of words.
class Table {
 public:
  explicit Table(const float* numbers) : numbers_(numbers) {
    if (numbers == nullptr) return;
    low_ = load(numbers);
    if (kLanes < 16) high_ = load(numbers + 16 - kLanes);
  }

  Vec at(IVec codes) const {
#if defined(__AVX512F__)
    return (Vec)_mm512_permutexvar_ps((__m512i)codes, (__m512)low_);
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)low_, (__m256i)codes), high = _mm256_permutevar8x32_ps((__m256)high_, (__m256i)codes);
    return (Vec)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
    Vec v;
    for (int i = 0; i < kLanes; i++) v[i] = numbers_[codes[i] & 15];
    return v;
#endif
  }

 private:
  const float* numbers_;
  Vec low_{}, high_{};
};

// Number c of each word of weights, as floats.
template <Numbers kNumbers>
__attribute__((always_inline)) inline Vec number_of(IVec weights, int c, int zero, const Table& table) {
  if constexpr (kNumbers == Numbers::kFloat8) return widen_f8<IVec, Vec>(weights >> (8 * c));
  else if constexpr (kNumbers == Numbers::kTable4) return table.at((IVec)((UVec)weights >> (8 * c)));
  else return __builtin_convertvector((weights << (24 - 8 * c) >> 24) - (kNumbers == Numbers::kInt4 ? zero : 0), Vec);
}

// Exact sums of products of bytes in the lanes of a vector, over the columns of a unit. Weights are int8, or of 4 bits: 0 to 15.
// `start` is what they begin with, which takes away what has been added to the weights (`QuantizedMatrix::added`).
template <int kBits>
struct ByteSum {
#if defined(__AVX512VNNI__)
  IVec acc;
  explicit ByteSum(const int32_t* start) : acc(splat_int(start)) {}
  static IVec prepared(IVec weights) { return kBits == 8 ? weights ^ int32_t(0x80808080) : weights; }
  void add(IVec weights, IVec x) { acc = (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, (__m512i)x); }
  Vec total(const int32_t*) const { return __builtin_convertvector(acc, Vec); }
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
  // Products of unsigned and signed bytes are added in pairs to 16 bits: of int8 the size of a weight and x with its sign; of
  // int4, whose sums of a unit fit in 16 bits (15 * 127 * 2 * 8), as they are.
  IVec acc{};
  explicit ByteSum(const int32_t*) {}
  static IVec prepared(IVec weights) { return weights; }
  void add(IVec weights, IVec x) {
    if constexpr (kBits == 4) acc = (IVec)((Shorts)acc + (Shorts)pairs(weights, x));
    else acc += joined(pairs(size(weights), with_sign_of(weights, x)));
  }
  Vec total(const int32_t* start) const {
    if constexpr (kBits == 8) return __builtin_convertvector(acc, Vec);
    else return __builtin_convertvector(joined(acc) + splat_int(start), Vec);
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
#elif defined(__ARM_FEATURE_DOTPROD)
  IVec acc;
  explicit ByteSum(const int32_t* start) : acc(splat_int(start)) {}
  static IVec prepared(IVec weights) { return weights; }
  void add(IVec weights, IVec x) { acc = (IVec)vdotq_s32((int32x4_t)acc, (int8x16_t)weights, (int8x16_t)x); }
  Vec total(const int32_t*) const { return __builtin_convertvector(acc, Vec); }
#else
  IVec acc;
  explicit ByteSum(const int32_t* start) : acc(splat_int(start)) {}
  static IVec prepared(IVec weights) { return weights; }
  void add(IVec weights, IVec x) {
    for (int shift = 0; shift < 32; shift += 8) acc += (weights << (24 - shift) >> 24) * (x << (24 - shift) >> 24);
  }
  Vec total(const int32_t*) const { return __builtin_convertvector(acc, Vec); }
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
    switch (matrix_.numbers) {
      case Numbers::kInt8: return run_of<Numbers::kInt8>(c, next);
      case Numbers::kInt4: return run_of<Numbers::kInt4>(c, next);
      case Numbers::kFloat8: return run_of<Numbers::kFloat8>(c, next);
      case Numbers::kTable4: return run_of<Numbers::kTable4>(c, next);
    }
  }

 private:
  static constexpr int64_t kChunkBlocks = 4;  // that a thread takes at a time
  static constexpr int64_t kAhead = 10240;     // bytes between what is multiplied and what is fetched
  static constexpr int64_t kScalesAhead = 16 * kBlockRows;  // the same in scales

  template <Numbers kNumbers>
  void run_of(int64_t c, int64_t next) const {
    matrix_.unit() == 32 ? run_chunk<kNumbers, 32>(c, next) : run_chunk<kNumbers, 16>(c, next);
  }

  template <Numbers kNumbers, int kUnit>
  void run_chunk(int64_t c, int64_t next) const {
    const int64_t stop = std::min(matrix_.num_blocks(), (c + 1) * kChunkBlocks);
    for (int64_t block = c * kChunkBlocks; block < stop; block++) {
      const int64_t then = block + 1 < stop ? block + 1 : next * kChunkBlocks;  // the block that is multiplied next
      for (int64_t pass = 0; pass < x_.num_passes; pass++) {
        const auto run_pass = [&](auto count) { multiply<kNumbers, kUnit, count>(block, then, pass); };
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

  template <Numbers kNumbers, int kUnit, int R>
  void multiply(int64_t block, int64_t then, int64_t pass) const {
    constexpr int S = R <= 2 ? std::min(2, kRowStrips) : 1;  // strips that meet a word of x together
    for (int strip = 0; strip < kRowStrips; strip += S) {
      const int64_t fetched = pass == 0 && strip == 0 ? then : -1;
      if constexpr (are_integers(kNumbers))
        if (rounds_) {
          multiply_strips<kNumbers, kUnit, R, S, true>(block, fetched, pass, strip);
          continue;
        }
      multiply_strips<kNumbers, kUnit, R, S, false>(block, fetched, pass, strip);
    }
  }

  // Word `step` of S strips at p: bytes, or numbers from 0 to 15.
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
  template <Numbers kNumbers, int kUnit, int R, int S, bool kRounds>
  __attribute__((always_inline)) static void sum_unit(const uint8_t* p, int zero, const Table& table, int strip, const float* x, const float* scale, const int32_t* start, Vec (&out)[S][R]) {
    constexpr int kBits = bits_of(kNumbers);
    if constexpr (kRounds) {
      using Sum = ByteSum<kBits>;
      struct { alignas(64) char bytes[sizeof(Sum)]; } memory[S][R];
      Sum (*sums)[R] = reinterpret_cast<Sum (*)[R]>(memory);
#pragma GCC unroll 2
      for (int s = 0; s < S; s++)
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) new (&sums[s][r]) Sum(start + r);
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
        for (int s = 0; s < S; s++) out[s][r] = sums[s][r].total(start + r) * splat(scale[r]);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < kUnit / 4; v++) {
        IVec weights[S];
        load_step<kBits, S>(p, v, strip, weights);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
          Vec numbers[S];
#pragma GCC unroll 2
          for (int s = 0; s < S; s++) numbers[s] = number_of<kNumbers>(weights[s], c, zero, table);
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

  template <Numbers kNumbers, int kUnit, int R, int S, bool kRounds>
  void multiply_strips(int64_t block, int64_t then, int64_t pass, int strip) const {
    constexpr int64_t kUnitBytes = kUnit * kBlockRows * bits_of(kNumbers) / 8, kUnitWords = kUnit / (kRounds ? 4 : 1);
    const int64_t block_bytes = matrix_.block_bytes(), num_units = matrix_.num_units(), units_of_group = (matrix_.group + kUnit - 1) / kUnit;
    const uint8_t *first = matrix_.values + block * block_bytes, *p = first;
    const uint8_t* last_fetched = first + block_bytes - kAhead;
    const int64_t behind = kAhead + (then - block - 1) * block_bytes;
    const float *x = x_.words(pass), *scale = x_.scale(pass), *scaled_sum = x_.scaled_sum(pass);
    const int32_t* start = x_.start(pass);
    const int64_t scale_bytes = matrix_.is_half ? 2 : 4;
    int64_t at = block * matrix_.num_groups() * kBlockRows + strip * kLanes, left = 0;
    const Table table(matrix_.table);
    Vec sums[S][R] = {}, weight_scale[S], offset[S];
    for (int64_t u = 0; u < num_units; u++, p += kUnitBytes, x += kUnitWords * R, scale += R, start += R, scaled_sum += R) {
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
      sum_unit<kNumbers, kUnit, R, S, kRounds>(p, matrix_.zero, table, strip, x, scale, start, of_unit);
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

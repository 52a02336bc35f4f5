// x times a quantized matrix transposed: sixteen rows of the matrix, in the lanes of vectors, meet some rows of x in registers.
// `quantized_rows.h` has the order of both.
#pragma once
#include "quantized_numbers.h"
#include "quantized_tiles.h"

namespace tas {

// x[rows, k] times a quantized matrix transposed.
class QuantizedProduct {
 public:
  // Writes kLanes sums, or the first `count` of them, to element `index` of the result.
  using Store = void (*)(void* out, int64_t index, Vec sums, int count);

  // Row r of the result is row to[r] of `out`, if `to` is given.
  QuantizedProduct(const QuantizedRows& x, int64_t rows, const QuantizedMatrix& matrix, const float* bias, void* out, Store store, const int32_t* to = nullptr)
      : x_(x), rows_(rows), matrix_(matrix), bias_(bias), out_(out), store_(store), to_(to) {}

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
#if defined(TAS_QUANTIZED_TILES)
    if (x_.in_tiles) {
      const QuantizedTiles<kNumbers, kUnit> tiles(x_, matrix_);
      const auto put_pass = [&](int64_t block, int64_t pass, const Vec(&sums)[kTilePassRows]) { put<kTilePassRows>(block * kBlockRows, pass * kTilePassRows, sums); };
      for (int64_t block = c * kChunkBlocks; block < stop; block++) tiles.run(block, block + 1 < stop ? block + 1 : next * kChunkBlocks, put_pass);
      return;
    }
#endif
    for (int64_t block = c * kChunkBlocks; block < stop; block++) {
      const int64_t then = block + 1 < stop ? block + 1 : next * kChunkBlocks;  // the block that is multiplied next
#if defined(TAS_PAIRS)
      if constexpr (kNumbers != Numbers::kTable4)
        if (x_.kind == Words::kPairs && x_.num_passes > 1) {
          multiply_slices<kNumbers, kUnit>(block, then);
          continue;
        }
#endif
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
      const auto run_strips = [&](auto words) { multiply_strips<kNumbers, kUnit, R, S, words>(block, fetched, pass, strip); };
      if (x_.kind == Words::kFloats) run_strips(std::integral_constant<Words, Words::kFloats>{});
      if constexpr (are_integers(kNumbers))
        if (x_.kind == Words::kBytes) run_strips(std::integral_constant<Words, Words::kBytes>{});
#if defined(TAS_PAIRS)
      if constexpr (kNumbers != Numbers::kTable4)
        if (x_.kind == Words::kPairs) run_strips(std::integral_constant<Words, Words::kPairs>{});
#endif
    }
  }

#if defined(TAS_PAIRS)
  static Vec add_pairs(Vec sum, Vec a, Vec b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

  static constexpr int kSliceColumns = 512;  // whose pairs of bfloat16 take half of the first-level cache

  // The outputs of a block and more rows of x than one pass takes. A slice of the block becomes pairs once, for all passes; every
  // sum is that of `multiply_strips`, to the last bit.
  template <Numbers kNumbers, int kUnit>
  void multiply_slices(int64_t block, int64_t then) const {
    switch (x_.pass_rows) {
      case 8: return multiply_slices<kNumbers, kUnit, 8>(block, then);
      default: return multiply_slices<kNumbers, kUnit, 12>(block, then);
    }
  }

  template <Numbers kNumbers, int kUnit, int R>
  void multiply_slices(int64_t block, int64_t then) const {
    constexpr int kBits = bits_of(kNumbers), kSliceUnits = kSliceColumns / kUnit, kPairsOfUnit = kUnit / 2;
    constexpr int64_t kUnitBytes = kUnit * kBlockRows * kBits / 8;
    static_assert(kRowStrips == 1, "a vector holds a word of each row of a block");
    struct Sums { Vec of[R]; };
    static thread_local std::vector<Sums> kept;
    kept.assign(x_.num_passes, Sums{});
    Vec pairs[kSliceUnits * kPairsOfUnit];
    const Table table(matrix_.table);
    const int64_t num_units = matrix_.num_units(), units_of_group = (matrix_.group + kUnit - 1) / kUnit;
    const uint8_t* first = matrix_.values + block * matrix_.block_bytes();
    const uint8_t* following = matrix_.values + then * matrix_.block_bytes();
    for (int64_t begin = 0; begin < num_units; begin += kSliceUnits) {
      const int64_t end = std::min<int64_t>(num_units, begin + kSliceUnits);
      for (int64_t u = begin; u < end; u++) {
        const uint8_t* p = first + u * kUnitBytes;
        for (int64_t line = 0; line < kUnitBytes; line += 64) __builtin_prefetch(following + u * kUnitBytes + line, 0, 2);
#pragma GCC unroll 8
        for (int v = 0; v < kUnit / 4; v++) {
          IVec weights[1];
          load_step<kBits, 1>(p, v, 0, weights);
          for (int h = 0; h < 2; h++) pairs[(u - begin) * kPairsOfUnit + 2 * v + h] = pair_of<kNumbers>(weights[0], h, matrix_.zero, table);
        }
      }
      for (int64_t pass = 0; pass < x_.num_passes; pass++) {
        const float *x = x_.words(pass) + begin * kPairsOfUnit * R, *scaled_sum = x_.scaled_sum(pass) + begin * R;
        Sums sums = kept[pass];
        for (int64_t u = begin; u < end; u++, scaled_sum += R) {
          const int64_t at = (block * matrix_.num_groups() + u / units_of_group) * kBlockRows;
          const Vec weight_scale = load_scales(matrix_.scale, matrix_.is_half, at);
          Vec of_unit[R] = {};
          const Vec* of_slice = pairs + (u - begin) * kPairsOfUnit;
#pragma GCC unroll 4
          for (int w = 0; w < kPairsOfUnit; w++, x = in_register(x + R)) {
            const Vec weights = of_slice[w];
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) of_unit[r] = add_pairs(of_unit[r], weights, splat_word<Vec>(x + r));
          }
#pragma GCC unroll 12
          for (int r = 0; r < R; r++) sums.of[r] = fma(of_unit[r], weight_scale, sums.of[r]);
          if (matrix_.offset) {
            const Vec offset = load_scales(matrix_.offset, matrix_.is_half, at);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) sums.of[r] = fma(splat(scaled_sum[r]), offset, sums.of[r]);
          }
        }
        kept[pass] = sums;
      }
    }
    for (int64_t pass = 0; pass < x_.num_passes; pass++) put<R>(block * kBlockRows, pass * R, kept[pass].of);
  }
#endif

  // Sums of a unit of S strips and R rows: of rounded numbers, times their scale, or of numbers as they are.
  template <Numbers kNumbers, int kUnit, int R, int S, Words kWords>
  __attribute__((always_inline)) static void sum_unit(const uint8_t* p, int zero, const Table& table, int strip, const float* x, const float* scale, const int32_t* start, Vec (&out)[S][R]) {
    constexpr int kBits = bits_of(kNumbers);
    if constexpr (kWords == Words::kBytes) {
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
#if defined(TAS_PAIRS)
    } else if constexpr (kWords == Words::kPairs) {
#pragma GCC unroll 8
      for (int v = 0; v < kUnit / 4; v++) {
        IVec weights[S];
        load_step<kBits, S>(p, v, strip, weights);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          Vec pairs[S];
#pragma GCC unroll 2
          for (int s = 0; s < S; s++) pairs[s] = pair_of<kNumbers>(weights[s], h, zero, table);
#pragma GCC unroll 12
          for (int r = 0; r < R; r++) {
            const Vec word = splat_word<Vec>(x + (2 * v + h) * R + r);
#pragma GCC unroll 2
            for (int s = 0; s < S; s++) out[s][r] = add_pairs(out[s][r], pairs[s], word);
          }
        }
      }
#endif
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

  template <Numbers kNumbers, int kUnit, int R, int S, Words kWords>
  void multiply_strips(int64_t block, int64_t then, int64_t pass, int strip) const {
    constexpr int64_t kUnitBytes = kUnit * kBlockRows * bits_of(kNumbers) / 8, kUnitWords = kUnit / numbers_in(kWords);
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
      sum_unit<kNumbers, kUnit, R, S, kWords>(p, matrix_.zero, table, strip, x, scale, start, of_unit);
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
    for (int r = 0; r < R && row + r < rows_; r++) store_(out_, (to_ ? to_[row + r] : row + r) * matrix_.n + i, bias_ ? sums[r] + bias : sums[r], count);
  }

  const QuantizedRows& x_;
  int64_t rows_;
  const QuantizedMatrix matrix_;
  const float* bias_;
  void* out_;
  Store store_;
  const int32_t* to_;
};

}  // namespace tas

// Matrices of int8 or int4 with a scale, and perhaps an offset, for each group of columns of a row, in the order that products
// with the processor's instructions for bytes want.
//
// Sixteen rows of the matrix form a block, four columns of one of its rows a word of 32 bits. A step is a word of each of
// the sixteen rows: 64 bytes, so that sums of rows stay in the lanes of a vector and are never added across them.
//   8 bits (int8, float8_e4m3fn): [n / 16][k / 4] steps. 4 bits: two steps lie in 64 bytes, the first in the low halves of the
//   bytes; what is stored is an integer plus `zero`, from 0 to 15, or a place in a table of 16 floats (nf4, fp4).
//   scale and offset: [n / 16][number of groups][16], float16 or float32.
// What lies behind the last row or column is zero.
//
// Rows of x are rounded to int8 with a scale for a group of columns (as llama.cpp's Q8_0 does), or stay as they are; to meet
// numbers that are no integers they always do.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "product.h"
#include "simd.h"
#include "tile_product.h"

namespace tas {

constexpr int kBlockRows = 16, kStepColumns = 4, kStepBytes = kBlockRows * kStepColumns;
constexpr int kRowStrips = kBlockRows / kLanes;  // of a block: what a vector holds of it
constexpr int kQuantizedPassRows = kManyRegisters ? 12 : 4;  // of x, whose sums stay in registers

#if defined(__AVX512VNNI__)
constexpr bool kUnsignedBytes = true;  // one instruction takes unsigned weights: int8 plus 128
#else
constexpr bool kUnsignedBytes = false;
#endif

enum class Numbers { kInt8, kInt4, kFloat8, kTable4 };
constexpr int bits_of(Numbers numbers) { return numbers == Numbers::kInt8 || numbers == Numbers::kFloat8 ? 8 : 4; }
constexpr bool are_integers(Numbers numbers) { return numbers == Numbers::kInt8 || numbers == Numbers::kInt4; }

// A matrix [n, k] and where its parts lie.
struct QuantizedMatrix {
  const uint8_t* values;
  const void* scale;
  const void* offset;  // or null
  bool is_half;        // scale and offset are float16
  Numbers numbers;
  int zero;
  const float* table;  // float[16] of kTable4, else null
  int64_t n, k, padded_k, group;

  // What is added to integers where they are multiplied: sums begin with that many times the sum of x taken away.
  int added() const { return numbers == Numbers::kInt4 ? zero : numbers == Numbers::kInt8 && kUnsignedBytes ? 128 : 0; }
  int64_t num_blocks() const { return (n + kBlockRows - 1) / kBlockRows; }
  int64_t block_bytes() const { return padded_k * kBlockRows * bits_of(numbers) / 8; }
  int64_t num_groups() const { return (k + group - 1) / group; }
  int unit() const { return group % 32 == 0 || group >= k ? 32 : 16; }  // columns that share all scales
  int64_t num_units() const { return (k + unit() - 1) / unit(); }  // with scales: of 16 columns one may lie behind them
};

// kLanes scales or offsets of group g, from row `row` of block b on.
inline Vec load_scales(const void* scales, bool is_half, int64_t index) {
  return is_half ? load((const f16*)scales + index) : load((const float*)scales + index);
}

// What a word of 32 bits of x holds: four numbers that are rounded to bytes, a pair of bfloat16, or one float.
enum class Words { kBytes, kPairs, kFloats };
constexpr int numbers_in(Words words) { return words == Words::kBytes ? 4 : words == Words::kPairs ? 2 : 1; }

#if defined(__AVX512BF16__) && !defined(TAS_SLOW_DPBF16)
#define TAS_PAIRS
#endif

#if defined(TAS_TILES) && defined(__AMX_INT8__)
#define TAS_QUANTIZED_TILES
#endif
constexpr int64_t kTilePassRows = 16;  // of x, that a tile has
constexpr int64_t kLeastRowsOfBytes = 9, kLeastRowsOfPairs = 5;  // that tile registers multiply sooner than vectors do

// How rows of x meet a matrix: as which words, and whether in tile registers, in passes of kTilePassRows.
struct Meeting {
  Words words;
  bool in_tiles;
};

// Whether all numbers of a matrix are exact in bfloat16: those of 8 bits and integers of 4, and those of most tables of floats.
inline bool are_exact_pairs(const QuantizedMatrix& matrix) {
  if (matrix.numbers != Numbers::kTable4) return true;
  return std::all_of(matrix.table, matrix.table + 16, [](float number) { return (bit_cast<uint32_t>(number) & 0xffff) == 0; });
}

// How `rows` rows of T meet a matrix. Sums of rounded numbers are exact in any order; those of others have one order for all
// numbers of rows if `in_order`.
template <class T>
Meeting meeting_of(const QuantizedMatrix& matrix, int64_t rows, bool rounds, bool in_order) {
#if defined(TAS_QUANTIZED_TILES)
  if (rounds && rows >= kLeastRowsOfBytes && are_integers(matrix.numbers) && tiles_allowed()) return {Words::kBytes, true};
  if (!rounds && !in_order && std::is_same_v<T, bf16> && rows >= kLeastRowsOfPairs && are_exact_pairs(matrix) && tiles_allowed()) return {Words::kPairs, true};
#endif
#if defined(TAS_PAIRS)
  if (!rounds && std::is_same_v<T, bf16> && matrix.numbers != Numbers::kTable4) return {Words::kPairs, false};
#endif
  return {rounds ? Words::kBytes : Words::kFloats, false};
}

// Rows of x as the product wants them, in passes of R rows: word w of row r of pass p at words + ((p * num_words + w) * R + r);
// for tiles the words of a unit of a row lie side by side, those of the next row behind them. For each unit of columns and row: the scale of rounded numbers, what a sum of products with them begins with, and the sum of
// the numbers times the scale.
class QuantizedRows {
 public:
  QuantizedRows(int64_t rows, const QuantizedMatrix& matrix, Meeting how)
      : kind(how.words), in_tiles(how.in_tiles), rows_(rows), unit_(matrix.unit()), num_units_(matrix.num_units()), k_(matrix.k), added_(matrix.added()),
        wants_sums_(matrix.offset != nullptr || (kind == Words::kBytes && !in_tiles)) {
    const int64_t passes = std::max<int64_t>(1, (rows + kQuantizedPassRows - 1) / kQuantizedPassRows);
    const int64_t even = (rows + passes - 1) / passes;
    pass_rows = in_tiles ? kTilePassRows : even <= 2 ? std::max<int64_t>(1, even) : even <= 4 ? 4 : even <= 8 ? 8 : 12;
    num_passes = (rows + pass_rows - 1) / pass_rows;
    num_words_ = num_units_ * unit_ / numbers_in(kind);
    const int64_t count = num_passes * pass_rows;
    words_.resize(count * num_words_);
    if (wants_sums_) scaled_sum_.resize(count * num_units_);
    if (kind != Words::kBytes) return;
    scale_.resize(count * num_units_);
    if (wants_sums_) start_.resize(count * num_units_);
  }

  // Row r is row at[r] of x, if `at` is given.
  template <class T>
  void take(xla::ffi::ThreadPool& threads, const T* x, int64_t act_group, const int32_t* at = nullptr) {
    // A thread takes the rows of a pass, whose words share lines of the cache.
    parallel_for(threads, num_passes, 1 + rows_ * k_ / (64 << 10), [&](int64_t pass, int64_t) {
      for (int64_t r = pass * pass_rows; r < std::min(rows_, (pass + 1) * pass_rows); r++) {
        const T* row = x + (at ? at[r] : r) * k_;
        if (kind == Words::kBytes) round_row(row, r, act_group);
        else copy_row(row, r);
      }
    });
  }

  Words kind;
  bool in_tiles;
  int64_t pass_rows, num_passes;
  const float* words(int64_t pass) const { return words_.data() + pass * num_words_ * pass_rows; }
  const float* scale(int64_t pass) const { return scale_.data() + pass * num_units_ * pass_rows; }
  const int32_t* start(int64_t pass) const { return start_.data() + pass * num_units_ * pass_rows; }
  const float* scaled_sum(int64_t pass) const { return scaled_sum_.data() + pass * num_units_ * pass_rows; }

 private:
  // Where the words of unit u of row r begin, and how far apart they are.
  float* words_at(int64_t r, int64_t u) {
    const int64_t unit_words = unit_ / numbers_in(kind), in_pass = r % pass_rows;
    return words_.data() + r / pass_rows * num_words_ * pass_rows + u * unit_words * pass_rows + (in_tiles ? in_pass * unit_words : in_pass);
  }
  int64_t word_stride() const { return in_tiles ? 1 : pass_rows; }

  // Where row r begins in an array that has `per_row` for each; the next of the row is pass_rows behind it.
  int64_t begin_of(int64_t r, int64_t per_row) const { return r / pass_rows * per_row * pass_rows + r % pass_rows; }

  template <class T>
  static Vec load_at(const T* row, int64_t d, int64_t end) {
    return d + kLanes <= end ? load(row + d) : d < end ? load_first(row + d, int(end - d)) : Vec{};
  }

  template <class T>
  void round_row(const T* row, int64_t r, int64_t act_group) {
    const Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const int64_t stride = word_stride(), by_unit = begin_of(r, num_units_);
    for (int64_t begin = 0; begin < k_; begin += act_group) {
      const int64_t end = std::min(k_, begin + act_group);
      UVec most{};
      for (int64_t d = begin; d < end; d += kLanes) {
        const UVec bits = bit_cast<UVec>(load_at(row, d, end)) & 0x7fffffffu;
        most = bits > most ? bits : most;
      }
      const uint32_t largest_bits = largest_of(most);
      const float largest = bit_cast<float>(largest_bits);
      // NaN and infinity make the outputs of the row NaN; numbers so small that their inverse is none are zeros.
      const bool is_finite = largest_bits < 0x7f800000u, is_zero = largest < 1e-30f;
      const float inverse = is_finite && !is_zero ? 127.f / largest : 0.f;
      const float scale = is_finite ? (is_zero ? 0.f : largest / 127.f) : bit_cast<float>(0x7fc00000u);
      for (int64_t d = begin; d < end; d += unit_) {
        int8_t numbers[32 + kLanes] = {};
        IVec sums{};
        if (is_finite)
          for (int j = 0; j < unit_; j += kLanes) {
            const Vec shifted = load_at(row, d + j, end) * inverse + magic;
            const IVec rounded = bit_cast<IVec>(shifted) - bit_cast<IVec>(magic);
            const BVec bytes = __builtin_convertvector(rounded, BVec);
            std::memcpy(numbers + j, &bytes, sizeof bytes);
            sums += rounded;
          }
        const int64_t u = d / unit_, at = by_unit + u * pass_rows;
        float* to = words_at(r, u);
        if (in_tiles) std::memcpy(to, numbers, unit_);
        else
          for (int v = 0; v < unit_ / 4; v++) std::memcpy(to + v * stride, numbers + 4 * v, 4);
        scale_[at] = scale;
        if (!wants_sums_) continue;
        const int32_t sum = sum_of(sums);
        start_[at] = -added_ * sum, scaled_sum_[at] = scale * float(sum);
      }
    }
  }

  template <class T>
  void copy_row(const T* row, int64_t r) {
    const int64_t stride = word_stride(), per_word = numbers_in(kind), by_unit = begin_of(r, num_units_);
    for (int64_t u = 0; u < num_units_; u++) {
      const int64_t begin = u * unit_, end = std::min(k_, begin + unit_);
      if (wants_sums_) {
        Vec total{};
        for (int64_t d = begin; d < end; d += kLanes) total += load_at(row, d, end);
        scaled_sum_[by_unit + u * pass_rows] = sum(total);
      }
      float* to = words_at(r, u);
      if (in_tiles && kind == Words::kPairs) std::memcpy(to, row + begin, sizeof(T) * (end - begin));
      else if (kind == Words::kFloats)
        for (int64_t d = begin; d < end; d++, to += stride) *to = to_float(row[d]);
      else
        for (int64_t d = begin; d < end; d += per_word, to += stride) std::memcpy(to, row + d, sizeof(T) * std::min(per_word, end - d));
    }
  }

  static uint32_t largest_of(UVec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)v);
#else
    uint32_t most = 0;
    for (int i = 0; i < kLanes; i++) most = std::max<uint32_t>(most, v[i]);
    return most;
#endif
  }

  static int32_t sum_of(IVec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < kLanes; i++) total += v[i];
    return total;
#endif
  }

  int64_t rows_, unit_, num_units_, num_words_, k_;
  int32_t added_;
  bool wants_sums_;
  std::vector<float> words_, scale_, scaled_sum_;
  std::vector<int32_t> start_;
};

}  // namespace tas

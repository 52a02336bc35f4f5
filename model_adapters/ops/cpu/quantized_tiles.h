// Products of quantized matrices in the tile registers of Intel's servers (AMX): sixteen rows of x meet sixteen rows of the matrix
// in one instruction for each unit of columns that share scales.
//
// Rounded numbers are multiplied as bytes, others as pairs of bfloat16, in which they are exact. A tile's sums leave it with each
// unit, or of pairs with each group, and are scaled and added in vectors in the order of the columns. Sums of bytes are exact: results
// are those of `QuantizedProduct` without tiles, to the last bit. The order of sums of pairs within a group is the processor's.
#pragma once
#include <numeric>

#include "quantized_numbers.h"

namespace tas {

#if defined(TAS_QUANTIZED_TILES)
// The thread's tiles have the size of a unit of so many words while this lives: 0 and 1 are sums, 2 and 3 rows of x, 4 and 5 of the
// matrix.
class UnitTileRegisters {
 public:
  explicit UnitTileRegisters(int unit_words) {
    alignas(64) uint8_t config[64] = {1};  // the palette
    for (int t = 0; t < 6; t++) {
      config[16 + 2 * t] = uint8_t(t / 2 == 1 ? unit_words * 4 : 64);
      config[48 + t] = uint8_t(t / 2 == 2 ? unit_words : 16);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~UnitTileRegisters() { asm volatile("tilerelease" ::); }
};

template <int kTile>
void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <Words kWords, int kSums, int kLeft, int kRight>
void add_products() {
  if constexpr (kWords == Words::kBytes) asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kRight), "i"(kLeft), "i"(kSums));
  else asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kRight), "i"(kLeft), "i"(kSums));
}

template <Numbers kNumbers, int kUnit>
class QuantizedTiles {
 public:
  QuantizedTiles(const QuantizedRows& x, const QuantizedMatrix& matrix) : x_(x), matrix_(matrix), registers_(kUnit / numbers_in(x.kind)) {
    if constexpr (kBits == 4)
      for (int i = 0; i < 32; i++) {
        const float number = kNumbers == Numbers::kTable4 ? matrix.table[i % 16] : float(i % 16 - matrix.zero);
        of_four_bits_[i] = uint16_t(bit_cast<uint32_t>(number) >> 16);
      }
  }

  // Calls put(block, pass, sums) for all passes of x; `then` is the block that this thread multiplies next.
  template <class Put>
  void run(int64_t block, int64_t then, const Put& put) const {
    if constexpr (are_integers(kNumbers))
      if (x_.kind == Words::kBytes) return run_words<Words::kBytes>(block, then, put);
    run_words<Words::kPairs>(block, then, put);
  }

 private:
  static constexpr int kBits = bits_of(kNumbers);
  static constexpr int64_t kStoredUnitBytes = kUnit * kBlockRows * kBits / 8;
  static constexpr int kSliceColumns = 512;  // of the matrix, that stay in the first-level cache for all passes

  struct Sums {
    Vec of[kTilePassRows];
  };

  // Units of a group whose sums a tile adds up, so that slices are whole steps: of bytes one, since each has another scale of x.
  template <Words kWords>
  int64_t units_of_step() const {
    constexpr int64_t kSliceUnits = kSliceColumns / kUnit;
    if (kWords == Words::kBytes) return 1;
    return units_of_group() >= matrix_.num_units() ? kSliceUnits : std::gcd(units_of_group(), kSliceUnits);
  }
  int64_t units_of_group() const { return (matrix_.group + kUnit - 1) / kUnit; }

  template <Words kWords, class Put>
  void run_words(int64_t block, int64_t then, const Put& put) const {
    constexpr int kSliceUnits = kSliceColumns / kUnit, kUnitWords = kUnit / numbers_in(kWords);
    static thread_local std::vector<Sums> kept;
    kept.assign(x_.num_passes, Sums{});
    Vec unpacked[kSliceUnits * kUnitWords];
    const int64_t num_units = matrix_.num_units();
    const uint8_t *first = matrix_.values + block * matrix_.block_bytes(), *following = matrix_.values + then * matrix_.block_bytes();
    for (int64_t begin = 0; begin < num_units; begin += kSliceUnits) {
      const int64_t end = std::min<int64_t>(num_units, begin + kSliceUnits);
      const void* weights = first + begin * kStoredUnitBytes;
      if constexpr (kWords == Words::kPairs || kBits == 4) {
        for (int64_t u = begin; u < end; u++) unpack<kWords>(first + u * kStoredUnitBytes, unpacked + (u - begin) * kUnitWords);
        weights = unpacked;
      }
      for (int64_t pass = 0; pass < x_.num_passes; pass++) multiply<kWords>(block, pass, begin, end, (const char*)weights, pass == 0 ? following : nullptr, kept[pass]);
    }
    for (int64_t pass = 0; pass < x_.num_passes; pass++) put(block, pass, kept[pass].of);
  }

  // The words of a unit as a tile wants them: signed bytes, or pairs of bfloat16. Those of 4 bits are looked up: an index of 16 bits
  // counts by its lowest five.
  template <Words kWords>
  void unpack(const uint8_t* p, Vec* out) const {
    const Table table(matrix_.table);
    const __m512i of_four_bits = kBits == 4 ? _mm512_load_si512(of_four_bits_) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int v = 0; v < kUnit / 4; v++) {
      IVec weights[1];
      load_step<kBits, 1>(p, v, 0, weights);
      const __m512i words = (__m512i)weights[0];
      if constexpr (kWords == Words::kBytes) {
        out[v] = (Vec)_mm512_sub_epi8(words, _mm512_set1_epi8(char(matrix_.zero)));
      } else if constexpr (kBits == 4) {
        const __m512i first = _mm512_mask_blend_epi16(0xaaaaaaaa, words, _mm512_slli_epi32(words, 8));
        const __m512i second = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(words, 16), _mm512_srli_epi32(words, 8));
        out[2 * v] = (Vec)_mm512_permutexvar_epi16(first, of_four_bits), out[2 * v + 1] = (Vec)_mm512_permutexvar_epi16(second, of_four_bits);
      } else {
        for (int h = 0; h < 2; h++) out[2 * v + h] = pair_of<kNumbers>(weights[0], h, matrix_.zero, table);
      }
    }
  }

  // Adds to the sums of a pass what units `begin` to `end` give; those of the matrix begin at `weights`. The same units of the block
  // at `following` are fetched meanwhile, if it is given.
  template <Words kWords>
  void multiply(int64_t block, int64_t pass, int64_t begin, int64_t end, const char* weights, const uint8_t* following, Sums& kept) const {
    constexpr int64_t kUnitWords = kUnit / numbers_in(kWords), kRowBytes = kUnitWords * 4, kUnitBytes = kUnitWords * 64;
    const char* x = (const char*)x_.words(pass) + begin * kUnitBytes;
    const float *scale = x_.scale(pass), *scaled_sum = x_.scaled_sum(pass);
    const int64_t per_step = units_of_step<kWords>(), per_group = units_of_group();
    alignas(64) float found[2][kTilePassRows * kLanes];
    const auto start = [&](auto which, int64_t unit) __attribute__((always_inline)) {
      constexpr int kAt = which;
      zero_tile<kAt>();
      for (int64_t u = unit - begin; u < std::min(unit + per_step, end) - begin; u++) {
        load_tile<2 + kAt>(x + u * kUnitBytes, kRowBytes);
        load_tile<4 + kAt>(weights + u * kUnitBytes, 64);
        add_products<kWords, kAt, 2 + kAt, 4 + kAt>();
        if (following)
          for (int64_t line = 0; line < kStoredUnitBytes; line += 64) __builtin_prefetch(following + (u + begin) * kStoredUnitBytes + line, 0, 2);
      }
      store_tile<kAt>(found[kAt]);
    };
    Sums sums = kept;
    const auto finish = [&](const float* of_step, int64_t unit) __attribute__((always_inline)) {
      const int64_t at = (block * matrix_.num_groups() + unit / per_group) * kBlockRows;
      const Vec weight_scale = load_scales(matrix_.scale, matrix_.is_half, at);
#pragma GCC unroll 16
      for (int r = 0; r < kTilePassRows; r++) {
        Vec part = load(of_step + r * kLanes);
        if constexpr (kWords == Words::kBytes) part = __builtin_convertvector(bit_cast<IVec>(part), Vec) * splat(scale[unit * kTilePassRows + r]);
        sums.of[r] = fma(part, weight_scale, sums.of[r]);
      }
      if (!matrix_.offset) return;
      const Vec offset = load_scales(matrix_.offset, matrix_.is_half, at);
      for (int64_t u = unit; u < std::min(unit + per_step, end); u++)
#pragma GCC unroll 16
        for (int r = 0; r < kTilePassRows; r++) sums.of[r] = fma(splat(scaled_sum[u * kTilePassRows + r]), offset, sums.of[r]);
    };
    const std::integral_constant<int, 0> even;
    const std::integral_constant<int, 1> odd;
    start(even, begin);
    for (int64_t unit = begin; unit < end; unit += 2 * per_step) {  // a tile is filled while the sums of the other are added
      if (unit + per_step < end) start(odd, unit + per_step);
      finish(found[0], unit);
      if (unit + per_step >= end) break;
      if (unit + 2 * per_step < end) start(even, unit + 2 * per_step);
      finish(found[1], unit + per_step);
    }
    kept = sums;
  }

  const QuantizedRows& x_;
  const QuantizedMatrix& matrix_;
  const UnitTileRegisters registers_;
  alignas(64) uint16_t of_four_bits_[32];  // the 16 numbers in bfloat16, twice
};
#endif

}  // namespace tas

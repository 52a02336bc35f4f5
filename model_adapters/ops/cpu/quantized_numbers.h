// Numbers of a quantized matrix in registers: as floats, or as bytes whose products are summed exactly.
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

// Word `step` of S strips at p: bytes, or numbers from 0 to 15.
template <int kBits, int S>
__attribute__((always_inline)) inline void load_step(const uint8_t* p, int step, int strip, IVec* weights) {
#pragma GCC unroll 2
  for (int s = 0; s < S; s++) {
    const uint8_t* at = p + (kBits == 8 ? step : step / 2) * kStepBytes + (strip + s) * int(sizeof(IVec));
    const IVec bytes = load_bytes(at);
    weights[s] = kBits == 8 ? bytes : (step % 2 ? (IVec)((UVec)bytes >> 4) : bytes) & 0x0f0f0f0f;
  }
}

// Numbers 2 h and 2 h + 1 of each word of weights as a pair of bfloat16: the high halves of floats, which are exact.
template <Numbers kNumbers>
__attribute__((always_inline)) inline Vec pair_of(IVec weights, int h, int zero, const Table& table) {
  const UVec first = bit_cast<UVec>(number_of<kNumbers>(weights, 2 * h, zero, table)), second = bit_cast<UVec>(number_of<kNumbers>(weights, 2 * h + 1, zero, table));
  return bit_cast<Vec>(first >> 16 | (second & 0xffff0000u));
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

}  // namespace tas

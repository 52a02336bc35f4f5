// Vectors of float as wide as the target has them, written once with the vector extensions of GCC and Clang: 16 lanes with
// AVX-512, 8 with AVX, 4 elsewhere (SSE2, NEON). Intrinsics stand only where the extension has no word for it.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace tas {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr bool kManyRegisters = kLanes == 16;  // 32 vector registers instead of 16

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HVec __attribute__((vector_size(kLanes * 2)));
typedef int8_t BVec __attribute__((vector_size(kLanes)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct f8 { uint8_t bits; };  // float8_e4m3fn, which has no infinity

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Vec splat(float x) { return x - Vec{}; }

// ---- one number
inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_float(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // inf, nan
  if (magnitude < 0x400)  // subnormal, by normal numbers alone: XLA's threads flush the others to zero
    return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(0x38800000 | magnitude << 13) - 0x1p-14f));
  return bit_cast<float>(sign | ((magnitude << 13) + 0x38000000));
}

// kLanes float8 in the low bytes of words. Subnormals are made of integers: XLA's threads flush those of float to zero.
template <class Words, class Floats>
inline Floats widen_f8(Words bits) {
  const Words sign = (bits & 0x80) << 24, magnitude = bits & 0x7f;
  const Floats small = __builtin_convertvector(magnitude, Floats) * 0x1p-9f;
  const Words normal = (magnitude << 20) + 0x3c000000;
  return bit_cast<Floats>(sign | (magnitude < 8 ? bit_cast<Words>(small) : normal));
}
inline float to_float(f8 x) {
  const uint32_t magnitude = x.bits & 0x7f;
  const float size = magnitude < 8 ? magnitude * 0x1p-9f : bit_cast<float>((magnitude << 20) + 0x3c000000);
  return x.bits & 0x80 ? -size : size;
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bf16* out) {
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // to nearest, ties to even
  out->bits = uint16_t(x != x ? (u >> 16) | 0x40 : rounded);
}
inline void from_float(float x, f16* out) {
  const uint32_t u = bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) half = 0x7e00;
  else if (magnitude >= 0x477ff000) half = 0x7c00;  // rounds beyond the largest half
  else if (magnitude < 0x38800000) half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;  // subnormal: the addition rounds
  else half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  out->bits = uint16_t(sign | half);
}

// To nearest, ties to even; x is a number within -448 .. 448.
inline void from_float(float x, f8* out) {
  const uint32_t u = bit_cast<uint32_t>(x), sign = (u >> 24) & 0x80, magnitude = u & 0x7fffffff;
  uint32_t rounded;
  if (magnitude < 0x3c800000) rounded = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000;  // subnormal: the addition rounds
  else rounded = (magnitude - 0x3c000000 + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  out->bits = uint8_t(sign | rounded);
}

// ---- kLanes numbers
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load(const bf16* p) {
#if defined(__AVX512F__)  // a compiler widens it in halves
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  HVec h;
  std::memcpy(&h, p, sizeof h);
  return bit_cast<Vec>(__builtin_convertvector(h, UVec) << 16);
#endif
}
inline Vec load(const f16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Vec v;
  for (int i = 0; i < kLanes; i++) v[i] = to_float(p[i]);
  return v;
#endif
}
inline Vec load(const int8_t* p) {
  BVec b;
  std::memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, Vec);
}
inline Vec load(const f8* p) {
  BVec b;
  std::memcpy(&b, p, sizeof b);
  return widen_f8<IVec, Vec>(__builtin_convertvector(b, IVec));
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  const UVec u = bit_cast<UVec>(v), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const HVec h = __builtin_convertvector(v != v ? u >> 16 | 0x40 : rounded, HVec);
  std::memcpy(p, &h, sizeof h);
#endif
}
inline void store(f16* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; i++) from_float(v[i], p + i);
#endif
}

// The first n < kLanes numbers, zeros behind: never reads past p + n.
template <class T>
inline Vec load_first(const T* p, int n) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return load(padded);
}

// The first n < kLanes numbers of v: never writes past p + n.
template <class T>
inline void store_first(T* p, Vec v, int n) {
  T whole[kLanes];
  store(whole, v);
  std::memcpy(p, whole, n * sizeof(T));
}

// a * b + c, rounded once where the processor can. Always said in words, and compiled with -ffp-contract=off: left to itself
// GCC fuses here and not there, on AMD's processors not in a chain of additions, and a row alone would get other bits.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
inline Vec fma(Vec a, Vec b, float c) { return fma(a, b, splat(c)); }

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += v[i];
  return total;
#endif
}

inline float largest(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float top = v[0];
  for (int i = 1; i < kLanes; i++) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

// The first `num_bytes` of a vector's worth of 32-bit words, zeros behind: never reads past p + num_bytes.
inline Vec load_words(const void* p, int64_t num_bytes) {
  Vec v{};
  if (num_bytes >= int64_t(sizeof v)) {
    std::memcpy(&v, p, sizeof v);
    return v;
  }
#if defined(__AVX512BW__)
  return (Vec)_mm512_maskz_loadu_epi8((uint64_t(1) << num_bytes) - 1, p);
#else
  std::memcpy(&v, p, num_bytes);
  return v;
#endif
}

// Number i of those that lie side by side in each 32-bit word, the lowest bits first.
template <class T>
inline Vec unpack(Vec words, int i);
template <>
inline Vec unpack<float>(Vec words, int) { return words; }
template <>
inline Vec unpack<bf16>(Vec words, int i) {
  const UVec u = bit_cast<UVec>(words);
  return bit_cast<Vec>(i == 0 ? u << 16 : u & 0xffff0000u);
}
template <>
inline Vec unpack<f16>(Vec words, int i) {
  const HVec half = __builtin_convertvector(bit_cast<UVec>(words) >> (16 * i), HVec);
  f16 numbers[kLanes];
  std::memcpy(numbers, &half, sizeof half);
  return load(numbers);
}
template <>
inline Vec unpack<int8_t>(Vec words, int i) { return __builtin_convertvector(bit_cast<IVec>(words) << (24 - 8 * i) >> 24, Vec); }
template <>
inline Vec unpack<f8>(Vec words, int i) { return widen_f8<IVec, Vec>(bit_cast<IVec>(words) >> (8 * i)); }

// 0, 1, 2, ...
inline IVec int_iota() {
  IVec v;
  for (int i = 0; i < kLanes; i++) v[i] = i;
  return v;
}

// Turns a square of kLanes vectors over its diagonal.
inline void transpose_square(Vec* v) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
  }
  const auto pairs = [](__m512 x, __m512 y, bool high) {
    const __m512d p = _mm512_castps_pd(x), q = _mm512_castps_pd(y);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(p, q) : _mm512_unpacklo_pd(p, q));
  };
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 4; j++) b[i + j] = pairs(a[i + j / 2], a[i + j / 2 + 2], j % 2);
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      a[8 * j + i] = _mm512_shuffle_f32x4(b[8 * j + i], b[8 * j + i + 4], 0x88);
      a[8 * j + i + 4] = _mm512_shuffle_f32x4(b[8 * j + i], b[8 * j + i + 4], 0xdd);
    }
  for (int i = 0; i < 8; i++) {
    v[i] = (Vec)_mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    v[i + 8] = (Vec)_mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
  }
#elif defined(__AVX__)
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    v[i] = (Vec)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    v[i + 4] = (Vec)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
#else
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < i; j++) {
      const float x = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = x;
    }
#endif
}

// v[j] = word j of each of kLanes rows that lie `stride` bytes apart.
inline void load_turned(const char* rows, int64_t stride, Vec* v) {
#if defined(__AVX512F__)
  // Quarters come from memory where they belong, which the load ports do beside the shuffles.
  for (int c = 0; c < 4; c++) {
    __m512 t[4];
    for (int r = 0; r < 4; r++) {
      const auto quarter = [&](int q) { return _mm_loadu_ps((const float*)(rows + (4 * q + r) * stride) + 4 * c); };
      t[r] = _mm512_castps128_ps512(quarter(0));
      t[r] = _mm512_mask_broadcast_f32x4(t[r], 0x00f0, quarter(1));
      t[r] = _mm512_mask_broadcast_f32x4(t[r], 0x0f00, quarter(2));
      t[r] = _mm512_mask_broadcast_f32x4(t[r], 0xf000, quarter(3));
    }
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(t[0], t[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(t[0], t[1]));
    const __m512d d = _mm512_castps_pd(_mm512_unpacklo_ps(t[2], t[3])), e = _mm512_castps_pd(_mm512_unpackhi_ps(t[2], t[3]));
    v[4 * c] = (Vec)_mm512_unpacklo_pd(a, d);
    v[4 * c + 1] = (Vec)_mm512_unpackhi_pd(a, d);
    v[4 * c + 2] = (Vec)_mm512_unpacklo_pd(b, e);
    v[4 * c + 3] = (Vec)_mm512_unpackhi_pd(b, e);
  }
#else
  for (int i = 0; i < kLanes; i++) v[i] = load((const float*)(rows + i * stride));
  transpose_square(v);
#endif
}

// e^x to 2 ulp: 2^n * e^r with |r| <= ln(2)/2 and the Taylor polynomial of degree 7. x below -87 gives about 1e-38 instead of less.
inline Vec exp(Vec x) {
  x = x < splat(-87.3f) ? splat(-87.3f) : x;
  x = x > splat(88.3f) ? splat(88.3f) : x;
  const Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec shifted = fma(x, splat(1.44269504f), magic);
  const Vec n = shifted - magic;
  const Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  Vec p = splat(1.f / 5040);
  for (const float coefficient : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) p = fma(p, r, coefficient);
  const IVec exponent = (bit_cast<IVec>(shifted) - bit_cast<IVec>(magic) + 127) << 23;
  return p * bit_cast<Vec>(exponent);
}

inline Vec tanh(Vec x) { return 1.f - 2.f / (exp(2.f * x) + 1.f); }

// How products of T are summed: in steps of numbers that fill a vector, as floats, or as pairs of bf16 where the processor
// multiplies those by itself.
template <class T>
struct Pair {
  static constexpr int kStep = kLanes;
  static Vec load(const T* p) { return tas::load(p); }
  static Vec load(const T* p, int n) { return load_first(p, n); }
  static void accumulate(Vec& acc, Vec a, Vec b) { acc = fma(a, b, acc); }
};

#if defined(__AVX512BF16__)
struct PairsOfBf16 {
  static constexpr int kStep = 2 * kLanes;
  static __m512i load(const bf16* p) { return _mm512_loadu_si512(p); }
  static __m512i load(const bf16* p, int n) { return _mm512_maskz_loadu_epi16((1u << n) - 1, p); }
  static void accumulate(Vec& acc, __m512i a, __m512i b) { acc = (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
};

// Intel's cores have the instruction for Xeons with tiles: an Emerald Rapids starts one in four cycles and eight products of
// float in them, which is four times the arithmetic.
#if !defined(TAS_SLOW_DPBF16)
template <>
struct Pair<bf16> : PairsOfBf16 {};
#endif
#endif

}  // namespace tas

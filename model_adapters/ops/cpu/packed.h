// Weights of bfloat16 in three quarters of their bytes, with none of their bits lost.
//
// The high byte of a bfloat16 is its sign and seven bits of its exponent. Those of a model's weights are much alike: the
// sixteen commonest of a matrix are nearly all of them, and four bits say which. So a group of 8 numbers of 16 rows takes
// 192 bytes: 128 low bytes as they are, and 64 bytes of two codes each. Groups with another high byte lie in a list, as they
// were. (That exponents can be coded so is the finding of arXiv 2411.05239 and 2504.11651, which use Huffman's codes.)
//
// Memory is what decoding waits for, and the codes are taken apart in nine instructions for 128 weights with AVX-512, in 18
// with AVX2, whose vectors hold half of the rows: a strip. The vectors that come out hold a word of each row of theirs, as
// `Product` wants them, and the groups of 16 rows are one stretch of memory.
#pragma once
#include "product.h"

// With tiles for matrix products (AMX) many rows are better left to XLA, which wants the weights as they were.
#if (defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))) && !defined(__AMX_TILE__)
#define TAS_PACKS 1

namespace tas {

typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfWords __attribute__((vector_size(kLanes * 4)));

// Those of each 16 lanes by themselves, as the processor has it: the byte of `table` that a code below 16 names; a0 b0 a1 b1
// and so on of the lower or the upper eight; and bytes of a, then of b, out of 16 bits each, none above 255.
#if defined(__AVX512BW__)
inline Bytes repeat_16(const void* p) { return (Bytes)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline Bytes look_up(Bytes table, Bytes codes) { return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes); }
inline Vec interleave_low(Bytes a, Bytes b) { return (Vec)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
inline Vec interleave_high(Bytes a, Bytes b) { return (Vec)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
inline Bytes narrow(HalfWords a, HalfWords b) { return (Bytes)_mm512_packus_epi16((__m512i)a, (__m512i)b); }
#else
inline Bytes repeat_16(const void* p) { return (Bytes)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
inline Bytes look_up(Bytes table, Bytes codes) { return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes); }
inline Vec interleave_low(Bytes a, Bytes b) { return (Vec)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
inline Vec interleave_high(Bytes a, Bytes b) { return (Vec)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
inline Bytes narrow(HalfWords a, HalfWords b) { return (Bytes)_mm256_packus_epi16((__m256i)a, (__m256i)b); }
#endif

constexpr int kGroupRows = 16, kGroupColumns = 8, kGroupWords = 4, kGroupBytes = 192, kGroupPlainBytes = 256, kNumCodes = 16;
constexpr int kStrips = kGroupRows / kLanes;  // of a group

// Where the parts of a packed matrix lie; those of `index` behind one another, int32:
// table[16 bytes], first[n / 16 + 1], at[number of groups in the list], and the list itself. n is a multiple of 16: rows are
// added to a matrix of fewer, of which nothing is written to a result.
//
// Matrices of a stack are packed as one, below each other: one table and one list are theirs together. A part of the rows is
// read by the same index, of which it knows how many blocks are in front of it and behind it.
struct Packed {
  const uint8_t* groups;
  const int32_t* index;
  int64_t n, k;
  int64_t in_front = 0, behind = 0;  // blocks of the index that are not of this matrix

  int64_t num_blocks() const { return n / kGroupRows; }
  int64_t num_groups() const { return k / kGroupColumns; }  // of a block
  const int32_t* first() const { return index + kNumCodes / 4 + in_front; }
  const int32_t* at() const { return first() + num_blocks() + behind + 1; }
  const uint8_t* list() const { return (const uint8_t*)(at() + first()[num_blocks() + behind]); }

  // Rows [begin, begin + count), whole blocks.
  Packed rows(int64_t begin, int64_t count) const {
    const int64_t block = begin / kGroupRows, blocks = count / kGroupRows;
    return {groups + block * num_groups() * kGroupBytes, index, count, k, in_front + block, behind + num_blocks() - block - blocks};
  }
};

// groups uint8[n / 16, k / 8, 192], or [matrices, n / 16, k / 8, 192], and index int32[...] as `Packed` says.
inline Packed packed_of(xla::ffi::AnyBuffer& groups, xla::ffi::AnyBuffer& index) {
  const auto dims = groups.dimensions();
  const size_t axes = dims.size();
  const int64_t blocks = axes == 4 ? dims[0] * dims[1] : dims[0];
  return {(const uint8_t*)groups.untyped_data(), (const int32_t*)index.untyped_data(), blocks * kGroupRows, dims[axes - 2] * kGroupColumns};
}

// A packed matrix, taken apart.
class PackedWeights {
 public:
  explicit PackedWeights(const Packed& packed) : packed_(packed), table_(repeat_16(packed.index)) {}

  // Blocks that a thread takes apart one behind the other, up to `stop`, and the block that it goes on with from there.
  struct Stretch {
    int64_t stop, next;
  };

  // Where a walk over N blocks side by side stands: at a group, and in the list of each block.
  template <int N>
  struct Place {
    int64_t block, group;
    int32_t listed[N];
  };

  template <int N>
  Place<N> first_place(int64_t block) const {
    Place<N> place{block, 0, {}};
    for (int b = 0; b < N; b++) place.listed[b] = packed_.first()[block + b];
    return place;
  }

  // Calls f(w, take) for each group of the blocks from `place` on, which it moves to group `end`: take(b, strip, v) sets v to
  // words w to w + 3 of kLanes rows of block b. Memory is asked for what comes later in the stretch, and behind it. Inlined,
  // for sums that f adds to are to stay in registers.
  template <int N, class F>
  __attribute__((always_inline)) void walk(Place<N>& place, int64_t end, const Stretch& stretch, const F& f) const {
    const int64_t block = place.block, num_groups = packed_.num_groups(), block_bytes = num_groups * kGroupBytes;
    const int32_t *last = packed_.first() + block + 1, *at = packed_.at();
    const uint8_t *list = packed_.list(), *first_group = packed_.groups + block * block_bytes, *p = first_group + place.group * kGroupBytes;
    const uint8_t* last_fetched = first_group + block_bytes - kAhead;
    const int64_t behind = kAhead + ((block + N < stretch.stop ? block + N : stretch.next) - block - 1) * block_bytes;
    auto& listed = place.listed;
    for (int64_t g = place.group;; g++, p += kGroupBytes) {
      int64_t stop = end;
      for (int b = 0; b < N; b++)
        if (listed[b] < last[b]) stop = std::min<int64_t>(stop, at[listed[b]]);
      for (; g < stop; g++, p += kGroupBytes) {
        const uint8_t* later = p + (p < last_fetched ? kAhead : behind);
#pragma GCC unroll 2
        for (int b = 0; b < N; b++, later += block_bytes) {
          __builtin_prefetch(later, 0, 2);
          __builtin_prefetch(later + 64, 0, 2);
          __builtin_prefetch(later + 128, 0, 2);
        }
        f(g * kGroupWords, [&](int b, int strip, Vec* v) __attribute__((always_inline)) { take_apart(p + b * block_bytes, strip, v); });
      }
      if (g == end) break;
      const uint8_t* plain[N];
      for (int b = 0; b < N; b++) plain[b] = listed[b] < last[b] && at[listed[b]] == g ? list + listed[b]++ * kGroupPlainBytes : nullptr;
      f(g * kGroupWords, [&](int b, int strip, Vec* v) __attribute__((always_inline)) {
        if (plain[b] == nullptr) return take_apart(p + b * block_bytes, strip, v);
        for (int j = 0; j < kGroupWords; j++) v[j] = load((const float*)plain[b] + j * kGroupRows + strip * kLanes);
      });
    }
    place.group = end;
  }

  // The same for all groups of N blocks.
  template <int N, class F>
  __attribute__((always_inline)) void walk(int64_t block, const Stretch& stretch, const F& f) const {
    Place<N> place = first_place<N>(block);
    walk(place, packed_.num_groups(), stretch, f);
  }

 private:
  static constexpr int kAhead = 8192;  // bytes between what is taken apart and what is fetched

  __attribute__((always_inline)) void take_apart(const uint8_t* p, int strip, Vec* v) const {
    Bytes part[3];  // low bytes of two words, and of two more; codes
    for (int i = 0; i < 3; i++) std::memcpy(&part[i], p + (i * kStrips + strip) * sizeof(Bytes), sizeof(Bytes));
    const Bytes upper = (Bytes)((HalfWords)part[2] >> 4);  // with bits of the byte behind, which the mask takes off
    const Bytes high[2] = {look_up(table_, part[2] & 0x0f), look_up(table_, upper & 0x0f)};
    for (int i = 0; i < 2; i++) {
      v[2 * i] = interleave_low(part[i], high[i]);
      v[2 * i + 1] = interleave_high(part[i], high[i]);
    }
  }

  const Packed packed_;
  const Bytes table_;
};

}  // namespace tas
#endif

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

  // Calls f(w, vectors) for each group of the blocks from `place` on, which it moves to group `end`: words w to w + 3 of their
  // rows, 16 to a block. Memory is asked for what comes later in the stretch, and behind it. Inlined, for sums that f adds to
  // are to stay in registers.
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
        Vec v[N][kGroupWords];
        const uint8_t* later = p + (p < last_fetched ? kAhead : behind);
#pragma GCC unroll 2
        for (int b = 0; b < N; b++, later += block_bytes) {
          __builtin_prefetch(later, 0, 2);
          __builtin_prefetch(later + 64, 0, 2);
          __builtin_prefetch(later + 128, 0, 2);
          take_apart(p + b * block_bytes, v[b]);
        }
        f(g * kGroupWords, v);
      }
      if (g == end) break;
      Vec v[N][kGroupWords];
      for (int b = 0; b < N; b++) {
        if (listed[b] < last[b] && at[listed[b]] == g) std::memcpy(v[b], list + listed[b]++ * kGroupPlainBytes, sizeof v[b]);
        else take_apart(p + b * block_bytes, v[b]);
      }
      f(g * kGroupWords, v);
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

}  // namespace tas
#endif

// Packs weights, as packed.h says.
#pragma once
#include "packed.h"

#if defined(TAS_PACKS)
namespace tas {

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

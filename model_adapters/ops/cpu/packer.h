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
    each_group([&](int64_t block, int64_t g, const Vec (&v)[kStrips][kGroupWords]) {
      bool fits = true;
      for (int strip = 0; strip < kStrips; strip++) fits = split(v[strip], groups + strip * sizeof(Bytes)) && fits;
      if (!fits && count++ < most) {
        at[count - 1] = int32_t(g);
        auto* words = (float*)(list + (count - 1) * kGroupPlainBytes);
        for (int j = 0; j < kGroupWords; j++)
          for (int strip = 0; strip < kStrips; strip++) store(words + j * kGroupRows + strip * kLanes, v[strip][j]);
      }
      groups += kGroupBytes;
      first[block + 1] = count;
    });
    return count;
  }

 private:
  // f(block, group, the four words of its rows)
  template <class F>
  void each_group(const F& f) const {
    for (int64_t block = 0; block < n_ / kGroupRows; block++)
      for (int64_t d = 0; d < k_; d += 2 * kLanes) {
        Vec v[kStrips][kLanes];
        const int64_t left = std::min<int64_t>(k_ - d, 2 * kLanes) / 2;
        for (int strip = 0; strip < kStrips; strip++) {
          for (int r = 0; r < kLanes; r++) v[strip][r] = load_words(weight_ + (block * kGroupRows + strip * kLanes + r) * k_ + d, left * sizeof(float));
          transpose_square(v[strip]);
        }
        for (int j = 0; j < left; j += kGroupWords) {
          Vec group[kStrips][kGroupWords];
          for (int strip = 0; strip < kStrips; strip++) std::copy(v[strip] + j, v[strip] + j + kGroupWords, group[strip]);
          f(block, (d / 2 + j) / kGroupWords, group);
        }
      }
  }

  // Writes the low bytes of a strip and the codes of the high ones, a group's strips side by side; false if one has no code.
  bool split(const Vec* v, uint8_t* out) const {
    Bytes codes[2] = {}, missing{};
    for (int i = 0; i < 2; i++) {
      const HalfWords a = (HalfWords)v[2 * i], b = (HalfWords)v[2 * i + 1];
      const Bytes low = narrow(a & 0xff, b & 0xff), high = narrow(a >> 8, b >> 8);
      std::memcpy(out + i * kStrips * sizeof low, &low, sizeof low);
      Bytes found{};
      for (int c = 0; c < kNumCodes; c++) {
        const Bytes is = (Bytes)(high == table_[c]);
        codes[i] |= is & uint8_t(c);
        found |= is;
      }
      missing |= ~found;
    }
    codes[0] |= (Bytes)((HalfWords)codes[1] << 4);
    std::memcpy(out + 2 * kStrips * sizeof(Bytes), &codes[0], sizeof(Bytes));
    for (int i = 0; i < int(sizeof missing); i++)
      if (missing[i]) return false;
    return true;
  }

  const uint16_t* weight_;
  int64_t n_, k_;
  const uint8_t* table_;
};

}  // namespace tas
#endif

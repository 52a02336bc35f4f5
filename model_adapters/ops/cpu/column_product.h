// Some rows of x times a matrix that is stored [K, N]: out[r][i] = x[r] . weight[:, i] + bias[i].
//
// A thread takes a strip of columns through all of K. Each output is one sum over K from front to back, the same for any
// number of rows, except that tiles of bfloat16 (tile_product.h) sum steps of 32 in their own order.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "product.h"
#include "simd.h"
#include "tile_product.h"

namespace tas {

template <class T>
class ColumnProduct {
  static constexpr int64_t kStrip = 128;     // columns of a chunk
  static constexpr int kMaxTile = 6;         // rows of x that meet a strip at once
  static constexpr int kAhead = 12;          // rows of weights between those that are multiplied and those that are fetched
  static constexpr int64_t kMinTileRows = 5;  // of x; fewer leave most of a tile empty, and the weights pass as fast without

  static constexpr int columns(int rows) { return kManyRegisters ? (rows <= 2 ? 8 : 4) : (rows <= 2 ? 4 : 2); }  // in vectors

 public:
  ColumnProduct(xla::ffi::ThreadPool*, const T* x, const T* weight, const float* bias, int64_t rows, int64_t n, int64_t k, bool in_order, const int32_t* at, const int32_t* to)
      : rows_(rows), weight_(weight), n_(n), k_(k), bias_(bias), to_(to) {
    const auto row = [&](int64_t r) { return x + (at ? at[r] : r) * k; };
#if defined(TAS_TILES)
    if constexpr (TileProduct<T>::kIsThere)
      if (!in_order && rows >= kMinTileRows && tiles_allowed()) {
        stride_ = (k + kTileNumbers - 1) / kTileNumbers * kTileNumbers;
        halves_.resize((rows + kTileRows - 1) / kTileRows * kTileRows * stride_);
        for (int64_t r = 0; r < rows; r++) std::copy_n(row(r), k, halves_.data() + r * stride_);
        return;
      }
#endif
    floats_.resize(rows * k);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < k; d++) floats_[r * k + d] = to_float(row(r)[d]);
  }

  int64_t num_chunks() const { return (n_ + kStrip - 1) / kStrip; }

  // out[r][i] for all rows and the columns i of chunk c.
  template <class Out>
  void run(int64_t c, int64_t, Out* out) const {
    const int64_t begin = c * kStrip, end = std::min(n_, begin + kStrip);
#if defined(TAS_TILES)
    if constexpr (TileProduct<T>::kIsThere)
      if (!halves_.empty()) {
        for (int64_t i = begin; i < end; i += kPanel) run_tiles(i, std::min(end, i + kPanel), out);
        return;
      }
#endif
    for (int64_t r = 0; r < rows_; r += kMaxTile)
      for_count<kMaxTile>(std::min<int64_t>(kMaxTile, rows_ - r), [&](auto count) { strip<count>(r, begin, end, r == 0, out); });
  }

 private:
  template <int R, class Out>
  void strip(int64_t r, int64_t begin, int64_t end, bool fetches, Out* out) const {
    constexpr int C = columns(R);
    int64_t i = begin;
    for (; i + C * kLanes <= end; i += C * kLanes) tile<R, C>(r, i, C * kLanes, fetches, out);
    for (; i < end; i += kLanes) tile<R, 1>(r, i, std::min<int64_t>(kLanes, end - i), fetches, out);
  }

  // The outputs of R rows of x and `count` columns, of C vectors at most, from i on.
  template <int R, int C, class Out>
  void tile(int64_t r, int64_t i, int64_t count, bool fetches, Out* out) const {
    constexpr int kBytes = C * kLanes * int(sizeof(T));
    Vec sum[R][C] = {};
    const T* w = weight_ + i;
    const float* x = floats_.data() + r * k_;
    const bool is_whole = count == C * kLanes;
    for (int64_t d = 0; d < k_; d++, w += n_) {
      if (fetches && d + kAhead < k_)
        for (int b = 0; b < kBytes; b += 64) __builtin_prefetch((const char*)(w + kAhead * n_) + b, 0, 2);
      Vec v[C];
#pragma GCC unroll 8
      for (int j = 0; j < C; j++) v[j] = is_whole ? load(w + j * kLanes) : load_first(w, int(count));
#pragma GCC unroll 8
      for (int q = 0; q < R; q++) {
        const Vec one = splat(x[q * k_ + d]);
#pragma GCC unroll 8
        for (int j = 0; j < C; j++) sum[q][j] = fma(v[j], one, sum[q][j]);
      }
    }
    for (int q = 0; q < R; q++)
      for (int j = 0; j < C; j++) put(sum[q][j], i + j * kLanes, std::min<int64_t>(kLanes, count - j * kLanes), r + q, out);
  }

  template <class Out>
  void put(Vec sum, int64_t i, int64_t count, int64_t r, Out* out) const {
    if (bias_)
      for (int64_t j = 0; j < count; j++) sum[j] += bias_[i + j];
    Out* place = out + (to_ ? to_[r] : r) * n_ + i;
    if (count == kLanes) store(place, sum);
    else store_first(place, sum, int(count));
  }

#if defined(TAS_TILES)
  static constexpr int64_t kPanel = 64;  // columns that meet the tiles of x together

  // Pairs of weight rows side by side, as the tiles want them: [K / 32][4 tiles of 16 columns][16 pairs][16 columns].
  const bf16* panel(int64_t begin, int64_t end) const {
    static thread_local std::vector<bf16> panel_of_thread;
    panel_of_thread.resize(stride_ * kPanel);
    alignas(64) int16_t low[32], high[32];
    for (int j = 0; j < 16; j++) low[2 * j] = j, low[2 * j + 1] = 32 + j, high[2 * j] = 16 + j, high[2 * j + 1] = 48 + j;
    const __m512i low_index = _mm512_load_si512(low), high_index = _mm512_load_si512(high);
    bf16* out = panel_of_thread.data();
    for (int64_t d = 0; d < stride_; d += 2)
      for (int64_t half = 0; half < 2; half++) {
        const int64_t i = begin + half * 32, left = std::clamp<int64_t>(end - i, 0, 32);
        const __mmask32 mask = left == 32 ? ~0u : (1u << left) - 1;
        const auto load_row = [&](int64_t row) { return row < k_ ? _mm512_maskz_loadu_epi16(mask, weight_ + row * n_ + i) : __m512i{}; };
        if (d + kAhead < k_) __builtin_prefetch(weight_ + (d + kAhead) * n_ + i, 0, 2), __builtin_prefetch(weight_ + (d + kAhead + 1) * n_ + i, 0, 2);
        const __m512i a = load_row(d), b = load_row(d + 1);
        bf16* to = out + d / 32 * 4 * 512 + half * 2 * 512 + d % 32 / 2 * 32;
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low_index, b));
        _mm512_storeu_si512(to + 512, _mm512_permutex2var_epi16(a, high_index, b));
      }
    return out;
  }

  template <class Out>
  void run_tiles(int64_t begin, int64_t end, Out* out) const {
    const TileRegisters registers;
    const bf16* weights = panel(begin, end);
    alignas(64) float sums[4][kTileRows * kLanes];
    for (int64_t r = 0; r < rows_; r += kTileRows) {
      zero_tiles();
      const bf16 *x = halves_.data() + r * stride_, *w = weights;
      for (int64_t d = 0; d < stride_; d += kTileNumbers, w += 4 * 512) {
        load_tile<4>(x + d, stride_ * sizeof(bf16));
        load_tile<5>(w, 64);
        multiply_tiles<0, 4, 5>();
        load_tile<6>(w + 512, 64);
        multiply_tiles<1, 4, 6>();
        load_tile<7>(w + 2 * 512, 64);
        multiply_tiles<2, 4, 7>();
        load_tile<5>(w + 3 * 512, 64);
        multiply_tiles<3, 4, 5>();
      }
      store_tile<0>(sums[0]);
      store_tile<1>(sums[1]);
      store_tile<2>(sums[2]);
      store_tile<3>(sums[3]);
      for (int64_t q = r; q < std::min(rows_, r + kTileRows); q++)
        for (int64_t i = begin, t = 0; i < end; i += kLanes, t++) put(load(sums[t] + (q - r) * kLanes), i, std::min<int64_t>(kLanes, end - i), q, out);
    }
  }
#endif

  std::vector<float> floats_;  // x, or
  std::vector<T> halves_;      // x in whole tiles
  int64_t stride_ = 0, rows_;
  const T* weight_;
  int64_t n_, k_;
  const float* bias_;
  const int32_t* to_;
};

}  // namespace tas

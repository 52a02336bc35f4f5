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
    if (rows_ > kMinPanelRows) {
      for (int64_t i = begin; i < end; i += kPanelColumns) {
        const int64_t count = std::min<int64_t>(kPanelColumns, end - i);
        const float* weights = floats_panel(i, count);
        for_tiles([&](auto rows, int64_t r) { strip<rows>(r, weights, kPanelColumns, i, count, false, out); });
      }
      return;
    }
    for_tiles([&](auto rows, int64_t r) { strip<rows>(r, weight_ + begin, n_, begin, end - begin, r == 0, out); });
  }

 private:
  static constexpr int kPanelColumns = columns(kMaxTile) * kLanes;
  static constexpr int64_t kMinPanelRows = 2 * kMaxTile;  // of x, for which a copy of the weights side by side pays

  // Calls run(count, r) for rows of x that meet weights together, from r on.
  template <class Run>
  void for_tiles(const Run& run) const {
    for (int64_t r = 0; r < rows_; r += kMaxTile) for_count<kMaxTile>(std::min<int64_t>(kMaxTile, rows_ - r), [&](auto count) { run(count, r); });
  }

  // `count` columns from i on as floats, [K][kPanelColumns] with zeros behind: rows far apart would share sets of the cache.
  const float* floats_panel(int64_t i, int64_t count) const {
    static thread_local std::vector<float> panel_of_thread;
    panel_of_thread.resize(k_ * kPanelColumns);
    float* to = panel_of_thread.data();
    const T* w = weight_ + i;
    for (int64_t d = 0; d < k_; d++, w += n_, to += kPanelColumns) {
      if (d + kAhead < k_)
        for (int b = 0; b < kPanelColumns * int(sizeof(T)); b += 64) __builtin_prefetch((const char*)(w + kAhead * n_) + b, 0, 2);
      for (int64_t j = 0; j < kPanelColumns; j += kLanes)
        store(to + j, j + kLanes <= count ? load(w + j) : j < count ? load_first(w + j, int(count - j)) : Vec{});
    }
    return panel_of_thread.data();
  }

  // The outputs of R rows of x and the columns [i, i + num), whose weights lie at w, rows `stride` apart.
  template <int R, class W, class Out>
  void strip(int64_t r, const W* w, int64_t stride, int64_t i, int64_t num, bool fetches, Out* out) const {
    constexpr int C = columns(R);
    int64_t j = 0;
    for (; j + C * kLanes <= num; j += C * kLanes) tile<R, C>(r, w + j, stride, i + j, C * kLanes, fetches, out);
    for (; j < num; j += kLanes) tile<R, 1>(r, w + j, stride, i + j, std::min<int64_t>(kLanes, num - j), fetches, out);
  }

  // The outputs of R rows of x and `count` columns, of C vectors at most, from i on.
  template <int R, int C, class W, class Out>
  void tile(int64_t r, const W* w, int64_t stride, int64_t i, int64_t count, bool fetches, Out* out) const {
    constexpr int kBytes = C * kLanes * int(sizeof(W));
    Vec sum[R][C] = {};
    const float* x = floats_.data() + r * k_;
    const bool is_whole = count == C * kLanes;
    for (int64_t d = 0; d < k_; d++, w += stride) {
      if (fetches && d + kAhead < k_)
        for (int b = 0; b < kBytes; b += 64) __builtin_prefetch((const char*)(w + kAhead * stride) + b, 0, 2);
      Vec v[C];
#pragma GCC unroll 8
      for (int j = 0; j < C; j++) v[j] = is_whole ? load(w + j * kLanes) : load_first(w, int(count));
#pragma GCC unroll 8
      for (int q = 0; q < R; q++) {
        const Vec one = splat_word<Vec>(x + q * k_ + d);
#pragma GCC unroll 8
        for (int j = 0; j < C; j++) sum[q][j] = fma(v[j], one, sum[q][j]);
      }
    }
    float kept[R * C * kLanes];  // what a loop below would index would not stay in registers above
#pragma GCC unroll 8
    for (int q = 0; q < R; q++)
#pragma GCC unroll 8
      for (int j = 0; j < C; j++) store(kept + (q * C + j) * kLanes, sum[q][j]);
    for (int q = 0; q < R; q++)
      for (int j = 0; j < C; j++) put(load(kept + (q * C + j) * kLanes), i + j * kLanes, std::min<int64_t>(kLanes, count - j * kLanes), r + q, out);
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
    for (int64_t i = begin; i < end; i += 2 * kTileRows, weights += 2 * 512)
      for (int64_t r = 0; r < rows_; r += 2 * kTileRows) {
        if (r + kTileRows < rows_) pair_of_tiles<2>(r, i, end, weights, out);
        else pair_of_tiles<1>(r, i, end, weights, out);
      }
  }

  // The outputs of G tiles of x from row r on and two tiles of columns from i on.
  template <int G, class Out>
  void pair_of_tiles(int64_t r, int64_t i, int64_t end, const bf16* w, Out* out) const {
    zero_tiles();
    const bf16 *x = halves_.data() + r * stride_, *x1 = x + kTileRows * stride_;
    const int64_t bytes = stride_ * sizeof(bf16);
    for (int64_t d = 0; d < stride_; d += kTileNumbers, w += 4 * 512) {
      load_tile<6>(w, 64);
      load_tile<7>(w + 512, 64);
      load_tile<4>(x + d, bytes);
      multiply_tiles<0, 4, 6>();
      multiply_tiles<1, 4, 7>();
      if constexpr (G == 2) {
        load_tile<5>(x1 + d, bytes);
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
      }
    }
    finish<0>(r, i, end, out);
    finish<1>(r, i + kTileRows, end, out);
    if constexpr (G == 2) {
      finish<2>(r + kTileRows, i, end, out);
      finish<3>(r + kTileRows, i + kTileRows, end, out);
    }
  }

  // Writes tile `kTile` of sums, [rows of x][columns].
  template <int kTile, class Out>
  void finish(int64_t r, int64_t i, int64_t end, Out* out) const {
    if (i >= end) return;
    alignas(64) float sums[kTileRows * kLanes];
    store_tile<kTile>(sums);
    for (int64_t q = r; q < std::min(rows_, r + kTileRows); q++) put(load(sums + (q - r) * kLanes), i, std::min<int64_t>(kLanes, end - i), q, out);
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

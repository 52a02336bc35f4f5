// Some rows of x times one matrix, in the way that is quickest for so many of them on this processor.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>

#include "few_rows.h"
#include "processor.h"
#include "product.h"
#include "tile_product.h"

namespace tas {

// Whether so few rows may be summed in the order that is quickest for them. Float32 keeps that of many rows in any case: its
// results do not depend on the rows beside.
template <class T>
bool in_lanes(int64_t rows, bool in_order) {
  static const bool is_quickest = !is_zen4();
  return rows <= FewRows<T>::kMaxRows && sizeof(T) < sizeof(float) && !in_order && is_quickest;
}

// x[rows, K] weight[N, K] -> [rows, N]. Rows are at[...] of x and to[...] of the result, if these are given. `all_rows` decides
// about the order of the sums, if equal rows of a call were left out.
template <class T>
class RowProduct {
 public:
  RowProduct(xla::ffi::ThreadPool* threads, const T* x, const T* weight, const float* bias, int64_t rows, int64_t n, int64_t k, bool in_order, const int32_t* at = nullptr,
             const int32_t* to = nullptr, int64_t all_rows = 0) {
    if (in_lanes<T>(std::max(rows, all_rows), in_order)) {
      held_.emplace(threads, x, rows, k, FewRows<T>::kXLanes, at);
      few_.emplace(*held_, rows, weight, n, k, bias, to);
      return;
    }
    if constexpr (TileProduct<T>::kIsThere)
      if (!in_order && tiles_allowed()) {
        tiles_.emplace(threads, x, rows, weight, n, k, bias, at, to);
        return;
      }
    held_.emplace(threads, x, rows, k, Product<T>::lanes(rows), at);
    product_.emplace(*held_, rows, weight, n, k, bias, to);
  }

  int64_t num_chunks() const { return few_ ? few_->num_chunks() : tiles_ ? tiles_->num_chunks() : product_->num_chunks(); }

  // Chunk c of the result; the thread goes on with `next`.
  template <class Out>
  void run(int64_t c, int64_t next, Out* out) const {
    if (few_) few_->run(c, out);
    else if (tiles_) tiles_->run(c, next, out);
    else product_->run(c, next, out);
  }

 private:
  std::optional<HeldRows<T>> held_;
  std::optional<FewRows<T>> few_;
  std::optional<TileProduct<T>> tiles_;
  std::optional<Product<T>> product_;
};

}  // namespace tas

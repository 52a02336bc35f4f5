// x[rows, K] times weight[N, K] transposed, and the same for runs of rows with a weight of their own.
#include <vector>

#include "dtypes.h"
#include "few_rows.h"
#include "processor.h"
#include "product.h"
#include "repeated_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

// Whether so few rows may be summed in the order that is quickest for them. Float32 keeps that of many rows in any case: its
// results do not depend on the rows beside.
template <class T>
bool in_lanes(int64_t rows, bool in_order) {
  static const bool is_quickest = !is_zen4();
  return rows <= FewRows<T>::kMaxRows && sizeof(T) < sizeof(float) && !in_order && is_quickest;
}

// x[rows, K] weight[N, K] -> [rows, N], in the way that is quickest for so many rows.
template <class T>
class RowProduct {
 public:
  RowProduct(ffi::ThreadPool* threads, const T* x, const T* weight, const float* bias, int64_t rows, int64_t n, int64_t k, bool in_order)
      : is_few_(in_lanes<T>(rows, in_order)), held_(threads, x, rows, k, is_few_ ? FewRows<T>::kXLanes : Product<T>::lanes(rows)), few_(held_, rows, weight, n, k, bias), product_(held_, rows, weight, n, k, bias) {}

  int64_t num_chunks() const { return is_few_ ? few_.num_chunks() : product_.num_chunks(); }

  // Chunk c of the result; the thread goes on with `next`.
  template <class Out>
  void run(int64_t c, int64_t next, Out* out) const {
    if (is_few_) few_.run(c, out);
    else product_.run(c, next, out);
  }

 private:
  bool is_few_;
  HeldRows<T> held_;
  FewRows<T> few_;
  Product<T> product_;
};

template <class T, class Out>
ffi::Error run(ffi::ThreadPool& threads, const T* x, const T* weight, const float* bias, Out* out, int64_t rows, int64_t n, int64_t k, bool in_order) {
  const int64_t count = num_distinct_rows(x, rows, k);
  // The order of the sums is that of all rows.
  const RowProduct<T> product(&threads, x, weight, bias, count, n, k, in_order || rows > FewRows<T>::kMaxRows);
  parallel_for(threads, product.num_chunks(), num_workers(count, n, k, sizeof(T)), [&](int64_t c, int64_t next) { product.run(c, next, out); });
  repeat_last_row(threads, out, count, rows, n);
  return ffi::Error::Success();
}

// x[rows, K] weight[N, K] bias[N or 0] (float32) -> out[rows, N], summed in one order for any number of rows if `in_order`.
// Dtypes and shapes are checked by the caller in Python.
ffi::Error linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out, bool in_order) {
  if (x.element_type() != weight.element_type()) return ffi::Error::InvalidArgument("linear: x and weight must have one dtype");
  const int64_t rows = x.dimensions()[0], n = weight.dimensions()[0], k = weight.dimensions()[1];
  const auto* added = bias.element_count() ? (const float*)bias.untyped_data() : nullptr;
  return with_float_type("linear", x, [&](const auto* from) {
    const auto call = [&](auto* to) { return run(threads, from, (decltype(from))same_type(from, weight), added, to, rows, n, k, in_order); };
    if (out->element_type() == ffi::F32) return call((float*)out->untyped_data());
    if (out->element_type() == x.element_type()) return call(same_type(from, *out));
    return ffi::Error::InvalidArgument("linear: the result must have the dtype of x or float32");
  });
}

template <class T>
ffi::Error run_grouped(ffi::ThreadPool& threads, const T* x, const T* weight, const int32_t* sizes, T* out, int64_t rows, int64_t num_groups, int64_t n, int64_t k, bool in_order) {
  struct Group {
    RowProduct<T> product;
    T* out;
    int64_t first_chunk;
  };
  std::vector<Group> groups;
  int64_t begin = 0, num_chunks = 0, workers = 0;
  for (int64_t e = 0; e < num_groups; e++) {
    const int64_t count = std::clamp<int64_t>(sizes[e], 0, rows - begin);
    if (count == 0) continue;
    groups.push_back({RowProduct<T>(nullptr, x + begin * k, weight + e * n * k, nullptr, count, n, k, in_order), out + begin * n, num_chunks});
    num_chunks += groups.back().product.num_chunks();
    workers += num_workers(count, n, k, sizeof(T));
    begin += count;
  }
  std::fill(out + begin * n, out + rows * n, T{});
  parallel_for(threads, num_chunks, workers, [&](int64_t c, int64_t next) {
    const Group& group = *std::prev(std::upper_bound(groups.begin(), groups.end(), c, [](int64_t chunk, const Group& g) { return chunk < g.first_chunk; }));
    group.product.run(c - group.first_chunk, next - group.first_chunk, group.out);
  });
  return ffi::Error::Success();
}

// x[T, K] in runs of group_sizes[E] rows, weight[E, N, K] -> out[T, N]; rows behind the last group are zero.
ffi::Error grouped_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer group_sizes, ffi::Result<ffi::AnyBuffer> out, bool in_order) {
  const auto wd = weight.dimensions();
  const auto* sizes = (const int32_t*)group_sizes.untyped_data();
  if (x.element_type() != weight.element_type() || x.element_type() != out->element_type())
    return ffi::Error::InvalidArgument("grouped_linear: x, weight and result must have one dtype");
  return with_float_type("grouped_linear", x, [&](const auto* from) {
    return run_grouped(threads, from, (decltype(from))same_type(from, weight), sizes, same_type(from, *out), x.dimensions()[0], wd[0], wd[1], wd[2], in_order);
  });
}

}  // namespace
}  // namespace tas

// Up to this many rows the product is faster than XLA's; 0: any number.
extern "C" int tas_linear_max_rows(int itemsize) {
#if defined(__AMX_TILE__)
  return itemsize == 2 ? 16 : 0;
#elif defined(__AVX__)
  return 0;
#else
  return 16;
#endif
}

#define TAS_LINEAR(name, function)                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,              \
                                ffi::Ffi::Bind()             \
                                    .Ctx<ffi::ThreadPool>()  \
                                    .Arg<ffi::AnyBuffer>()   \
                                    .Arg<ffi::AnyBuffer>()   \
                                    .Arg<ffi::AnyBuffer>()   \
                                    .Ret<ffi::AnyBuffer>()   \
                                    .Attr<bool>("in_order"))

TAS_LINEAR(tas_linear, tas::linear);
TAS_LINEAR(tas_grouped_linear, tas::grouped_linear);

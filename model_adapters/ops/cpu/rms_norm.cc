// Root-mean-square norms of rows, each the same to the last bit however many rows come along.
#include <cmath>

#include "dtypes.h"
#include "rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kNumbersPerChunk = 8 << 10;
constexpr int64_t kNumbersPerWorker = 32 << 10;  // less is done before another thread is awake

template <class T, class W>
struct Norm {
  const T* x;
  const W* weight;
  T* out;
  int64_t n;
  float eps;
  bool rounds_first;

  void row(int64_t r) const {
    const T* from = x + r * n;
    T* to = out + r * n;
    const float scale = 1.f / std::sqrt(sum_of_squares(from) / float(n) + eps);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, normed(load(from + i), load(weight + i), scale));
    if (i < n) store_first(to + i, normed(load_first(from + i, n - i), load_first(weight + i, n - i), scale), n - i);
  }

 private:
  float sum_of_squares(const T* row) const {
    return sum_of_row(row, n, [](Vec& sum, Vec v) { sum = fma(v, v, sum); });
  }

  Vec normed(Vec v, Vec w, float scale) const {
    v = v * scale;
    if (rounds_first) {
      T rounded[kLanes];
      store(rounded, v);
      v = load(rounded);
    }
    return v * w;
  }
};

template <class T, class W>
ffi::Error run(ffi::ThreadPool& threads, const Norm<T, W>& norm, int64_t rows) {
  for_rows(threads, rows, norm.n, kNumbersPerChunk, kNumbersPerWorker, [&](int64_t r) { norm.row(r); });
  return ffi::Error::Success();
}

// x[rows, n], weight[n] of its dtype or float -> out[rows, n].
ffi::Error rms_norm(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> out, float eps, int64_t rounds_first) {
  const int64_t rows = x.dimensions()[0], n = x.dimensions()[1];
  if (weight.element_type() != ffi::F32 && weight.element_type() != x.element_type()) return ffi::Error::InvalidArgument("rms_norm: weight must be float32 or of the dtype of x");
  return with_float_type("rms_norm", x, [&](const auto* from) {
    using T = std::decay_t<decltype(*from)>;
    const auto with = [&](const auto* w) {
      return run(threads, Norm<T, std::decay_t<decltype(*w)>>{from, w, same_type(from, *out), n, eps, rounds_first != 0}, rows);
    };
    return weight.element_type() == ffi::F32 ? with((const float*)weight.untyped_data()) : with((const T*)same_type(from, weight));
  });
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_rms_norm, tas::rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("rounds_first"));

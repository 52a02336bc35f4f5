// x[rows, K] times weight[N, K] transposed: a thread takes chunks of a `RowProduct`, which chooses the way that is quickest for
// so many rows on this processor.
//
// With `in_order` a row has the same bits however many rows come along: what makes an answer independent of its batch. Rows at
// the end that repeat the one before them, as padding does, are computed once.
#include "dtypes.h"
#include "repeated_rows.h"
#include "row_product.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

template <class T, class Out>
ffi::Error run(ffi::ThreadPool& threads, const T* x, const T* weight, const float* bias, Out* out, int64_t rows, int64_t n, int64_t k, bool in_order) {
  const int64_t count = num_distinct_rows(x, rows, k);
  const RowProduct<T> product(&threads, x, weight, bias, count, n, k, in_order, nullptr, nullptr, rows);
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

}  // namespace
}  // namespace tas

// Up to this many rows the product is faster than XLA's; 0: any number.
extern "C" int tas_linear_max_rows(int itemsize) {
#if defined(__AMX_TILE__)
  return itemsize != 2 || tas::tiles_allowed() ? 0 : 16;
#elif defined(__AVX__)
  return 0;
#else
  return 16;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_linear, tas::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("in_order"));

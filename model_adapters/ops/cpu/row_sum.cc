// Sums of rows in float, the same to the last bit however many rows come along.
#include "dtypes.h"
#include "rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kNumbersPerChunk = 32 << 10;
constexpr int64_t kNumbersPerWorker = 256 << 10;

template <class T>
ffi::Error run(ffi::ThreadPool& threads, const T* x, float* out, int64_t rows, int64_t n) {
  const auto add = [](Vec& sum, Vec v) { sum += v; };
  for_rows(threads, rows, n, kNumbersPerChunk, kNumbersPerWorker, [&](int64_t r) { out[r] = sum_of_row(x + r * n, n, add); });
  return ffi::Error::Success();
}

// x[rows, n] -> out[rows], float32.
ffi::Error row_sum(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const int64_t rows = x.dimensions()[0], n = x.dimensions()[1];
  return with_float_type("row_sum", x, [&](const auto* from) { return run(threads, from, out->typed_data(), rows, n); });
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_row_sum, tas::row_sum,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

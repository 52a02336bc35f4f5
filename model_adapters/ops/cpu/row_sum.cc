// Sums of rows in float, the same to the last bit however many rows come along.
#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kNumbersPerChunk = 32 << 10;
constexpr int64_t kNumbersPerWorker = 256 << 10;

template <class T>
float sum_of(const T* x, int64_t n) {
  Vec sums[4] = {};  // a chain of additions alone would wait for each
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) sums[j] += load(x + i + j * kLanes);
  for (; i + kLanes <= n; i += kLanes) sums[0] += load(x + i);
  if (i < n) sums[1] += load_first(x + i, n - i);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
ffi::Error run(ffi::ThreadPool& threads, const T* x, float* out, int64_t rows, int64_t n) {
  const int64_t per_chunk = std::max<int64_t>(1, kNumbersPerChunk / std::max<int64_t>(n, 1));
  parallel_for(threads, (rows + per_chunk - 1) / per_chunk, 1 + rows * n / kNumbersPerWorker, [&](int64_t c, int64_t) {
    for (int64_t r = c * per_chunk; r < std::min(rows, (c + 1) * per_chunk); r++) out[r] = sum_of(x + r * n, n);
  });
  return ffi::Error::Success();
}

// x[rows, n] -> out[rows], float32.
ffi::Error row_sum(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const int64_t rows = x.dimensions()[0], n = x.dimensions()[1];
  switch (x.element_type()) {
    case ffi::BF16: return run(threads, (const bf16*)x.untyped_data(), out->typed_data(), rows, n);
    case ffi::F16: return run(threads, (const f16*)x.untyped_data(), out->typed_data(), rows, n);
    case ffi::F32: return run(threads, (const float*)x.untyped_data(), out->typed_data(), rows, n);
    default: return ffi::Error::InvalidArgument("row_sum: x must be bfloat16, float16 or float32");
  }
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_row_sum, tas::row_sum,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

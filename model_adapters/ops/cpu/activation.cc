// SiLU and GELU: in float whatever the dtype, rounded once, as PyTorch does.
#include "dtypes.h"
#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kNumbersPerChunk = 8 << 10;
constexpr int64_t kNumbersPerWorker = 32 << 10;  // less is done before another thread is awake

Vec silu(Vec x) { return x / (1.f + exp(-x)); }
Vec gelu_tanh(Vec x) { return 0.5f * x * (1.f + tanh(0.7978845608f * (x + 0.044715f * x * x * x))); }

template <class T>
ffi::Error run(ffi::ThreadPool& threads, const T* x, T* out, int64_t n, Vec (*function)(Vec)) {
  parallel_for(threads, (n + kNumbersPerChunk - 1) / kNumbersPerChunk, 1 + n / kNumbersPerWorker, [&](int64_t c, int64_t) {
    const int64_t end = std::min(n, (c + 1) * kNumbersPerChunk);
    int64_t i = c * kNumbersPerChunk;
    for (; i + kLanes <= end; i += kLanes) store(out + i, function(load(x + i)));
    if (i < end) store_first(out + i, function(load_first(x + i, end - i)), end - i);
  });
  return ffi::Error::Success();
}

ffi::Error activation(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out, int64_t is_gelu) {
  const auto function = is_gelu ? gelu_tanh : silu;
  const int64_t n = x.element_count();
  if (x.element_type() != out->element_type()) return ffi::Error::InvalidArgument("activation: the result must have the dtype of x");
  return with_float_type("activation", x, [&](const auto* from) { return run(threads, from, same_type(from, *out), n, function); });
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_activation, tas::activation,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("is_gelu"));

// x[rows, k] times a matrix of int8 or int4 (quantized.h) transposed.
#include "quantized.h"
#include "repeated_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

template <class T>
ffi::Error run_quantized(ffi::ThreadPool& threads, const T* x, int64_t rows, const QuantizedMatrix& matrix, int64_t act_group, const float* bias, T* out) {
  const bool rounds = act_group > 0;
  const int64_t count = num_distinct_rows(x, rows, matrix.k);
  QuantizedRows held(count, matrix, rounds);
  held.take(threads, x, act_group);
  const QuantizedProduct product(held, count, matrix, rounds, bias, out, QuantizedProduct::store_as<T>);
  parallel_for(threads, product.num_chunks(), num_workers(count, matrix.n, matrix.k, 1), [&](int64_t c, int64_t next) { product.run(c, next); });
  repeat_last_row(threads, out, count, rows, matrix.n);
  return ffi::Error::Success();
}

// x[rows, k], values [n / 16, ...], scale and offset [n / 16, groups, 16] (offset and bias may be empty) -> out[rows, n].
// `zero`: what of a number of 4 bits is 0. `group`: columns that share a scale. `act_group`: columns of x that are rounded with one scale; 0: x is not rounded.
ffi::Error quantized_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer bias,
                            ffi::Result<ffi::AnyBuffer> out, int64_t bits, int64_t zero, int64_t group, int64_t act_group) {
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1], n = out->dimensions()[1];
  const int64_t num_blocks = (n + kBlockRows - 1) / kBlockRows, padded_k = int64_t(values.size_bytes()) * 8 / bits / (num_blocks * kBlockRows);
  const bool is_half = scale.element_type() == ffi::F16;
  const QuantizedMatrix matrix{(const uint8_t*)values.untyped_data(), scale.untyped_data(), offset.element_count() ? offset.untyped_data() : nullptr, is_half, int(bits), int(zero), n, k, padded_k, group};
  const auto* added = bias.element_count() ? (const float*)bias.untyped_data() : nullptr;
  if (!is_half && scale.element_type() != ffi::F32) return ffi::Error::InvalidArgument("quantized_linear: scales must be float16 or float32");
  if (int64_t(scale.element_count()) != num_blocks * matrix.num_groups() * kBlockRows || padded_k < k || padded_k % 32)
    return ffi::Error::InvalidArgument("quantized_linear: values and scales do not fit together");
  switch (x.element_type()) {
    case ffi::BF16: return run_quantized(threads, (const bf16*)x.untyped_data(), rows, matrix, act_group, added, (bf16*)out->untyped_data());
    case ffi::F16: return run_quantized(threads, (const f16*)x.untyped_data(), rows, matrix, act_group, added, (f16*)out->untyped_data());
    case ffi::F32: return run_quantized(threads, (const float*)x.untyped_data(), rows, matrix, act_group, added, (float*)out->untyped_data());
    default: return ffi::Error::InvalidArgument("quantized_linear: x must be bfloat16, float16 or float32");
  }
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_quantized_linear, tas::quantized_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("zero")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("act_group"));

// Mamba-2's state space layer over a packed row: `StateRows` (state_rows.h) with one decay for each token and head. A step is
// the softplus of dt and its bias, within limits.
#include "state_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

// pool[rows, H, P, N], segments, x[T, H, P], dt[T, H], a[H], b[T, G, N], c[T, G, N] of the dtype of x, d[H] or empty, dt_bias[H] or empty
// -> out[T, H, P] of the dtype of x, pool.
ffi::Error state_space(ffi::ThreadPool threads, ffi::AnyBuffer pool, Segments::Ints cu, Segments::Ints read, Segments::Ints write, Segments::Ints first, ffi::Buffer<ffi::PRED> held,
                       ffi::AnyBuffer x, ffi::Buffer<ffi::F32> dt, ffi::Buffer<ffi::F32> a, ffi::AnyBuffer b, ffi::AnyBuffer c, ffi::Buffer<ffi::F32> d, ffi::Buffer<ffi::F32> dt_bias,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> after, bool drops_last, float least, float most) {
  const auto pd = pool.dimensions();
  const int64_t num_tokens = x.dimensions()[0], heads = pd[1], rows = pd[2], groups = b.dimensions()[1], n = pd[3];
  if (pool.element_type() != ffi::F32 || b.element_type() != x.element_type() || c.element_type() != x.element_type() || out->element_type() != x.element_type())
    return ffi::Error::InvalidArgument("state_space: expected a pool of float32 and x, b, c and a result of one dtype");
  const Segments segments(cu, read, write, first, held, num_tokens, pd[0], drops_last);
  float* states = pool_in_place<float>(pool, after);
  return with_float_type("state_space", x, [&](const auto* from) {
    using T = std::decay_t<decltype(*from)>;
    T* to = same_type(from, *out);
    segments.clear_padding(to, num_tokens, heads * rows);
    const auto or_null = [](ffi::Buffer<ffi::F32>& array) { return array.element_count() ? array.typed_data() : nullptr; };
    const StateRows<T, false> layer{from, same_type(from, b), same_type(from, c), dt.typed_data(), a.typed_data(), or_null(d), or_null(dt_bias), least, most, to, states, heads, rows, groups, n};
    return run_rows(threads, layer, segments, 1);
  });
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_state_space, tas::state_space,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("drops_last")
                                  .Attr<float>("least")
                                  .Attr<float>("most"));

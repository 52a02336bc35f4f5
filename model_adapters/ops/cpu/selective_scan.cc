// Mamba's selective scan over a packed row: `StateRows` (state_rows.h) with a decay for each number of the state, made of dt
// and a as it is needed: written to memory, decays would be N times as much as x.
#include "state_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kCost = 6;  // of a number with a decay of its own

// pool[rows, D, N], segments, x[T, D], dt[T, D], a[D, N], b[T, G, N], c[T, G, N] of the dtype of x, d[D] or empty -> out[T, D] of the dtype of x, pool.
ffi::Error selective_scan(ffi::ThreadPool threads, ffi::AnyBuffer pool, Segments::Ints cu, Segments::Ints read, Segments::Ints write, Segments::Ints first, ffi::Buffer<ffi::PRED> held,
                          ffi::AnyBuffer x, ffi::Buffer<ffi::F32> dt, ffi::Buffer<ffi::F32> a, ffi::AnyBuffer b, ffi::AnyBuffer c, ffi::Buffer<ffi::F32> d, ffi::Result<ffi::AnyBuffer> out,
                          ffi::Result<ffi::AnyBuffer> after, bool drops_last) {
  const auto pd = pool.dimensions();
  const int64_t num_tokens = x.dimensions()[0], channels = pd[1], groups = b.dimensions()[1], n = pd[2];
  if (pool.element_type() != ffi::F32 || b.element_type() != x.element_type() || c.element_type() != x.element_type() || out->element_type() != x.element_type())
    return ffi::Error::InvalidArgument("selective_scan: expected a pool of float32 and x, b, c and a result of one dtype");
  const Segments segments(cu, read, write, first, held, num_tokens, pd[0], drops_last);
  float* states = pool_in_place<float>(pool, after);
  return with_float_type("selective_scan", x, [&](const auto* from) {
    using T = std::decay_t<decltype(*from)>;
    T* to = same_type(from, *out);
    segments.clear_padding(to, num_tokens, channels);
    const float* skip = d.element_count() ? d.typed_data() : nullptr;
    const StateRows<T, true> layer{from, same_type(from, b), same_type(from, c), dt.typed_data(), a.typed_data(), skip, nullptr, 0, 0, to, states, groups, channels / groups, groups, n};
    return run_rows(threads, layer, segments, kCost);
  });
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_selective_scan, tas::selective_scan,
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
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("drops_last"));

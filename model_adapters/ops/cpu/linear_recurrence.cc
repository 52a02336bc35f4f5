// Linear recurrences over a packed row: state = gates[t] * state + x[t] is the output of token t, and of the last token what
// the pool keeps.
//
// Channels are independent: a thread takes some of them through all segments, in their order, with the state in a register. It
// is float32 and changes token by token, so that bits depend neither on where a prompt is cut nor on what else is in the row.
#include "dtypes.h"
#include "segments.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kChannelsPerPart = 128;
constexpr int64_t kNumbersPerWorker = 64 << 10;  // less is done before another thread is awake

template <class T>
struct Recurrence {
  const T *gates, *x;
  T* out;
  float* pool;
  int64_t channels;

  // Channels [begin, end) of all segments, as many at once as a vector has numbers.
  void part(const Segments& segments, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; i += kLanes) {
      const int num = std::min<int64_t>(kLanes, end - i);
      const auto numbers = [&](const auto* p) { return num == kLanes ? load(p) : load_first(p, num); };
      const auto keep = [&](auto* p, Vec numbers) { num == kLanes ? store(p, numbers) : store_first(p, numbers, num); };
      for (const Segment& s : segments.all()) {
        Vec state = s.read < 0 ? Vec{} : numbers(pool + s.read * channels + i);
        for (int64_t t = s.begin; t < s.end; t++) {
          state = fma(numbers(gates + t * channels + i), state, numbers(x + t * channels + i));
          keep(out + t * channels + i, state);
        }
        if (s.write >= 0) keep(pool + s.write * channels + i, state);
      }
    }
  }
};

// pool[rows, D], segments, gates[T, D] and x[T, D] of one dtype -> out[T, D] of that dtype, pool.
ffi::Error linear_recurrence(ffi::ThreadPool threads, ffi::AnyBuffer pool, Segments::Ints cu, Segments::Ints read, Segments::Ints write, Segments::Ints first, ffi::Buffer<ffi::PRED> held,
                             ffi::AnyBuffer gates, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> after, bool drops_last) {
  const int64_t num_tokens = x.dimensions()[0], channels = x.dimensions()[1];
  if (pool.element_type() != ffi::F32 || gates.element_type() != x.element_type() || out->element_type() != x.element_type())
    return ffi::Error::InvalidArgument("linear_recurrence: expected a pool of float32 and gates, x and a result of one dtype");
  const Segments segments(cu, read, write, first, held, num_tokens, pool.dimensions()[0], drops_last);
  float* states = pool_in_place<float>(pool, after);
  return with_float_type("linear_recurrence", x, [&](const auto* from) {
    using T = std::decay_t<decltype(*from)>;
    T* to = same_type(from, *out);
    segments.clear_padding(to, num_tokens, channels);
    const Recurrence<T> layer{same_type(from, gates), from, to, states, channels};
    const int64_t workers = 1 + segments.num_tokens() * channels / kNumbersPerWorker;
    parallel_for(threads, (channels + kChannelsPerPart - 1) / kChannelsPerPart, workers,
                 [&](int64_t p, int64_t) { layer.part(segments, p * kChannelsPerPart, std::min(channels, (p + 1) * kChannelsPerPart)); });
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_linear_recurrence, tas::linear_recurrence,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("drops_last"));

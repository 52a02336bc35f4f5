// Depthwise causal convolutions over a packed row. The pool keeps the last K - 1 inputs of each sequence, with which its next
// tokens begin.
//
// Channels are independent: a thread takes some of them through all segments, in their order. An output is one sum over the K
// taps, the oldest input first, in float: the same to the last bit wherever a prompt is cut and whatever else is in the row.
#include "dtypes.h"
#include "segments.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kChannelsPerPart = 128;
constexpr int64_t kNumbersPerWorker = 64 << 10;  // less is done before another thread is awake

template <class T, class W>
struct Convolution {
  const T* x;
  const W* weight;
  const float* bias;
  T *out, *pool;
  int64_t channels, width;

  // Channels [begin, end) of all segments.
  void part(const Segments& segments, int64_t begin, int64_t end) const {
    const int64_t count = end - begin, padded = (count + kLanes - 1) / kLanes * kLanes;
    float* taps = thread_scratch((width + 1) * padded);  // of the oldest input first, then the bias
    for (int64_t i = 0; i < count; i++) {
      for (int64_t w = 0; w < width; w++) taps[w * padded + i] = to_float(weight[(begin + i) * width + w]);
      taps[width * padded + i] = bias ? bias[begin + i] : 0.f;
    }
    for (const Segment& s : segments.all()) {
      const T* old = s.read < 0 ? nullptr : pool + s.read * (width - 1) * channels + begin;
      for (int64_t t = s.begin; t < s.end; t++)
        for (int64_t i = 0; i < count; i += kLanes) token(s, t, old ? old + i : nullptr, begin + i, std::min<int64_t>(kLanes, count - i), taps + i, padded);
      if (s.write >= 0) keep(s, old, pool + s.write * (width - 1) * channels + begin, begin, count);
    }
  }

 private:
  void token(const Segment& s, int64_t t, const T* old, int64_t channel, int num, const float* taps, int64_t stride) const {
    Vec total{};
    for (int64_t w = 0; w < width; w++) {
      const int64_t place = t - s.begin + w - (width - 1);  // in the segment
      const T* from = place >= 0 ? x + (s.begin + place) * channels + channel : old ? old + (place + width - 1) * channels : nullptr;
      if (from) total = fma(num == kLanes ? load(from) : load_first(from, num), num == kLanes ? load(taps + w * stride) : load_first(taps + w * stride, num), total);
    }
    total = total + (num == kLanes ? load(taps + width * stride) : load_first(taps + width * stride, num));
    T* to = out + t * channels + channel;
    if (num == kLanes) store(to, total);
    else store_first(to, total, num);
  }

  // The last inputs of a segment; in their row, if that is the one that was read, they only move down.
  void keep(const Segment& s, const T* old, T* to, int64_t channel, int64_t count) const {
    for (int64_t w = 0; w < width - 1; w++) {
      const int64_t place = s.end - s.begin + w - (width - 1);
      T* row = to + w * channels;
      if (place >= 0) std::memcpy(row, x + (s.begin + place) * channels + channel, count * sizeof(T));
      else if (old) std::memmove(row, old + (place + width - 1) * channels, count * sizeof(T));
      else std::memset(row, 0, count * sizeof(T));
    }
  }
};

// pool[rows, K - 1, D], segments, x[T, D], weight[D, K] of the dtype of x or float32, bias[D] or empty -> out[T, D], pool, both of the dtype of x.
ffi::Error causal_convolution(ffi::ThreadPool threads, ffi::AnyBuffer pool, Segments::Ints cu, Segments::Ints read, Segments::Ints write, Segments::Ints first, ffi::Buffer<ffi::PRED> held,
                              ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Buffer<ffi::F32> bias, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> after, bool drops_last) {
  const int64_t num_tokens = x.dimensions()[0], channels = x.dimensions()[1], width = weight.dimensions()[1];
  if (pool.element_type() != x.element_type() || out->element_type() != x.element_type() || (weight.element_type() != x.element_type() && weight.element_type() != ffi::F32))
    return ffi::Error::InvalidArgument("causal_convolution: expected a pool and a result of the dtype of x, and a weight of that or float32");
  const Segments segments(cu, read, write, first, held, num_tokens, pool.dimensions()[0], drops_last);
  return with_float_type("causal_convolution", x, [&](const auto* from) {
    using T = std::decay_t<decltype(*from)>;
    T *to = same_type(from, *out), *rows = pool_in_place<T>(pool, after);
    segments.clear_padding(to, num_tokens, channels);
    const auto with = [&](const auto* taps) {
      using W = std::decay_t<decltype(*taps)>;
      const Convolution<T, W> layer{from, taps, bias.element_count() ? bias.typed_data() : nullptr, to, rows, channels, width};
      const int64_t workers = 1 + segments.num_tokens() * channels * width / kNumbersPerWorker;
      parallel_for(threads, (channels + kChannelsPerPart - 1) / kChannelsPerPart, workers,
                   [&](int64_t p, int64_t) { layer.part(segments, p * kChannelsPerPart, std::min(channels, (p + 1) * kChannelsPerPart)); });
      return ffi::Error::Success();
    };
    return weight.element_type() == ffi::F32 ? with((const float*)weight.untyped_data()) : with((const T*)same_type(from, weight));
  });
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_causal_convolution, tas::causal_convolution,
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
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("drops_last"));

// x[rows, K] times weight[N, K] transposed, for the few rows of a decode step: a stream over the weights at memory bandwidth.
//
// Each thread takes runs of weight rows; four of them at a time meet up to four rows of x in registers, so that a weight is
// converted to float once for these. Sums are float whatever the dtype.
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kBytesPerChunk = 64 << 10;  // weights a thread takes at a time: small beside a product, large beside an atomic add
template <class T>
constexpr int64_t kAhead = 1024 / sizeof(T);
constexpr int kRowTile = kManyRegisters ? 4 : 2;

// out[r][i] = x[r] . weights[i] for R rows of x, zero-padded to whole steps, and four rows of weights.
template <int R, class T>
void dot4(const T* const* weights, const typename Pair<T>::Other* x, int64_t x_stride, int64_t dim, float out[R][4]) {
  using P = Pair<T>;
  Vec acc[R][4] = {};
  int64_t d = 0;
  for (; d + P::kStep <= dim; d += P::kStep) {
    decltype(P::load(weights[0])) w[4];
    // Ahead in the row, or behind its end in the next four: there the hardware loses track.
    const int64_t ahead = d + kAhead<T> + (d + kAhead<T> < dim ? 0 : 3 * dim);
    for (int i = 0; i < 4; i++) {
      __builtin_prefetch(weights[i] + ahead);
      w[i] = P::load(weights[i] + d);
    }
    for (int r = 0; r < R; r++) {
      const auto v = P::load_other(x + r * x_stride + d);
      for (int i = 0; i < 4; i++) P::accumulate(acc[r][i], w[i], v);
    }
  }
  if (d < dim)
    for (int i = 0; i < 4; i++) {
      const auto w = P::load(weights[i] + d, dim - d);
      for (int r = 0; r < R; r++) P::accumulate(acc[r][i], w, P::load_other(x + r * x_stride + d));
    }
  for (int r = 0; r < R; r++) sum4(acc[r], out[r]);
}

template <int R, class T, class Out>
void rows_tile(const T* const* weights, int count, const typename Pair<T>::Other* x, int64_t x_stride, int64_t dim, const float* bias, Out* out, int64_t out_stride) {
  float y[R][4];
  dot4<R>(weights, x, x_stride, dim, y);
  for (int r = 0; r < R; r++)
    for (int i = 0; i < count; i++) from_float(y[r][i] + (bias ? bias[i] : 0.f), out + r * out_stride + i);
}

// The rows of x as the inner loop wants them. The buffer is the thread's own and outlives the product.
template <class T>
struct HeldRows {
  using X = typename Pair<T>::Other;
  int64_t stride;
  const X* data;

  // One step more than needed: rows a multiple of 4 KiB apart would all want the same few lines of the cache.
  HeldRows(const T* x, int64_t rows, int64_t k) : stride(((k + Pair<T>::kStep - 1) / Pair<T>::kStep + 1) * Pair<T>::kStep) {
    static thread_local std::vector<X> scratch;
    scratch.assign(rows * stride, X{});
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < k; d++) hold(x[r * k + d], &scratch[r * stride + d]);
    data = scratch.data();
  }
};

// How many weight rows a thread takes at a time.
template <class T>
int64_t chunk_rows(int64_t k) {
  return std::max<int64_t>(4, kBytesPerChunk / std::max<int64_t>(1, k * int64_t(sizeof(T))) / 4 * 4);
}

// out[r, i] = x[r] . weight[i] + bias[i] for `rows` rows of x and i in [begin, end).
template <class T, class Out>
void rows_times_weights(const typename Pair<T>::Other* x, int64_t x_stride, int64_t rows, const T* weight, int64_t k, const float* bias, int64_t begin, int64_t end, Out* out, int64_t out_stride) {
  for (int64_t i = begin; i < end; i += 4) {
    const int count = std::min<int64_t>(4, end - i);
    const T* weights[4];
    for (int j = 0; j < 4; j++) weights[j] = weight + (i + std::min(j, count - 1)) * k;
    const float* b = bias ? bias + i : nullptr;
    for (int64_t r = 0; r < rows;) {
      const auto* v = x + r * x_stride;
      Out* y = out + r * out_stride + i;
      const int64_t left = rows - r;
      if (left >= kRowTile) rows_tile<kRowTile>(weights, count, v, x_stride, k, b, y, out_stride), r += kRowTile;
      else if (kRowTile > 3 && left == 3) rows_tile<3>(weights, count, v, x_stride, k, b, y, out_stride), r += 3;
      else if (left >= 2) rows_tile<2>(weights, count, v, x_stride, k, b, y, out_stride), r += 2;
      else rows_tile<1>(weights, count, v, x_stride, k, b, y, out_stride), r += 1;
    }
  }
}

template <class T, class Out>
ffi::Error run(ffi::ThreadPool& threads, const T* x, const T* weight, const float* bias, Out* out, int64_t rows, int64_t n, int64_t k) {
  const HeldRows<T> held(x, rows, k);
  const int64_t chunk = chunk_rows<T>(k);
  auto body = [&](int64_t c) { rows_times_weights(held.data, held.stride, rows, weight, k, bias, c * chunk, std::min(n, (c + 1) * chunk), out, n); };
  parallel_for(threads, (n + chunk - 1) / chunk, 1 + n * k * int64_t(sizeof(T)) / kBytesPerChunk, body);
  return ffi::Error::Success();
}

template <class T>
ffi::Error run_out_type(ffi::ThreadPool& threads, ffi::AnyBuffer& x, ffi::AnyBuffer& weight, ffi::AnyBuffer& bias, ffi::Result<ffi::AnyBuffer>& out) {
  const int64_t rows = x.dimensions()[0], n = weight.dimensions()[0], k = weight.dimensions()[1];
  auto call = [&](auto* result) {
    return run(threads, (const T*)x.untyped_data(), (const T*)weight.untyped_data(), bias.element_count() ? (const float*)bias.untyped_data() : nullptr, result, rows, n, k);
  };
  if (out->element_type() == ffi::F32) return call((float*)out->untyped_data());
  if (out->element_type() == x.element_type()) return call((T*)out->untyped_data());
  return ffi::Error::InvalidArgument("linear: the result must have the dtype of x or float32");
}

// x[rows, K] weight[N, K] bias[N or 0] (float32) -> out[rows, N]. Dtypes and shapes are checked by the caller in Python.
ffi::Error linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out) {
  if (x.element_type() != weight.element_type()) return ffi::Error::InvalidArgument("linear: x and weight must have one dtype");
  switch (x.element_type()) {
    case ffi::BF16: return run_out_type<bf16>(threads, x, weight, bias, out);
    case ffi::F16: return run_out_type<f16>(threads, x, weight, bias, out);
    case ffi::F32: return run_out_type<float>(threads, x, weight, bias, out);
    default: return ffi::Error::InvalidArgument("linear: x must be bfloat16, float16 or float32");
  }
}

template <class T>
ffi::Error run_grouped(ffi::ThreadPool& threads, const T* x, const T* weight, const int32_t* sizes, T* out, int64_t rows, int64_t num_groups, int64_t n, int64_t k) {
  struct Group {
    int64_t index, begin, count;
  };
  std::vector<Group> groups;
  int64_t begin = 0;
  for (int64_t e = 0; e < num_groups; e++) {
    const int64_t count = std::clamp<int64_t>(sizes[e], 0, rows - begin);
    if (count > 0) groups.push_back({e, begin, count});
    begin += count;
  }
  std::fill(out + begin * n, out + rows * n, T{});
  const HeldRows<T> held(x, begin, k);
  const int64_t chunk = chunk_rows<T>(k), chunks = (n + chunk - 1) / chunk;
  auto body = [&](int64_t i) {
    const Group& g = groups[i / chunks];
    const int64_t c = i % chunks;
    rows_times_weights(held.data + g.begin * held.stride, held.stride, g.count, weight + g.index * n * k, k, nullptr, c * chunk, std::min(n, (c + 1) * chunk), out + g.begin * n, n);
  };
  parallel_for(threads, int64_t(groups.size()) * chunks, 1 + int64_t(groups.size()) * n * k * int64_t(sizeof(T)) / kBytesPerChunk, body);
  return ffi::Error::Success();
}

// x[T, K] in runs of group_sizes[E] rows, weight[E, N, K] -> out[T, N]; rows behind the last group are zero.
ffi::Error grouped_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer group_sizes, ffi::Result<ffi::AnyBuffer> out) {
  const auto wd = weight.dimensions();
  auto call = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    return run_grouped(threads, (const T*)x.untyped_data(), (const T*)weight.untyped_data(), (const int32_t*)group_sizes.untyped_data(), (T*)out->untyped_data(), x.dimensions()[0], wd[0], wd[1], wd[2]);
  };
  if (x.element_type() != weight.element_type() || x.element_type() != out->element_type())
    return ffi::Error::InvalidArgument("grouped_linear: x, weight and result must have one dtype");
  switch (x.element_type()) {
    case ffi::BF16: return call((bf16*)nullptr);
    case ffi::F16: return call((f16*)nullptr);
    case ffi::F32: return call((float*)nullptr);
    default: return ffi::Error::InvalidArgument("grouped_linear: x must be bfloat16, float16 or float32");
  }
}

}  // namespace
}  // namespace tas

// Up to this many rows the stream over the weights beats XLA's product; beyond, blocking for the cache pays.
extern "C" int tas_linear_max_rows(int itemsize) {
#if defined(__AMX_TILE__)
  return 8;
#elif defined(__AVX512BF16__)
  return itemsize == 2 ? 32 : 8;
#else
  return itemsize == 2 ? 4 : 8;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_linear, tas::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_grouped_linear, tas::grouped_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

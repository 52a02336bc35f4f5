// Decode attention on a paged cache with the write of the new token, in one pass over the keys and values.
//
// One work item is (row, kv head, split of the context). Positions are taken in blocks of 64 whatever the page size; each
// block's keys and values are read from memory once for all query heads of the group, which meet them in tiles that fill the
// vector registers. Softmax is the online one (Milakov and Gimelshein, 2018); splits are joined by their log-sum-exp, as in
// Flash-Decoding (Dao et al., 2023).
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int kBlock = 64;                              // positions per softmax step
constexpr int kAhead = 16;                              // positions between what is read and what is asked for from memory
constexpr int kGroupTile = kManyRegisters ? 4 : 2;      // query heads whose accumulators are held in registers
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kBytesPerWorker = 64 << 10;           // less than this is not worth waking a thread for
constexpr int64_t kMinSplit = 4 * kBlock;

struct Shape {
  int64_t rows, kv_heads, group, key_dim, value_dim, page, pages_per_seq, num_pages;
  int64_t width() const { return key_dim + value_dim; }
};

struct Options {
  float scale, softcap;
  int64_t window;
};

int64_t padded(int64_t n, int64_t step = kLanes) { return (n + step - 1) / step * step; }

// scores[g][t] = q[g] . keys[t] for four keys; q is zero-padded to whole steps.
template <int G, class P, class T>
void dot_keys(const T* const* keys, const typename P::Other* q, int64_t q_stride, int64_t dim, float* scores) {
  Vec acc[G][4] = {};
  int64_t d = 0;
  for (; d + P::kStep <= dim; d += P::kStep) {
    decltype(P::load(keys[0])) k[4];
    for (int t = 0; t < 4; t++) k[t] = P::load(keys[t] + d);
    for (int g = 0; g < G; g++) {
      const auto x = P::load_other(q + g * q_stride + d);
      for (int t = 0; t < 4; t++) P::accumulate(acc[g][t], k[t], x);
    }
  }
  if (d < dim)
    for (int t = 0; t < 4; t++) {
      const auto k = P::load(keys[t] + d, dim - d);
      for (int g = 0; g < G; g++) P::accumulate(acc[g][t], k, P::load_other(q + g * q_stride + d));
    }
  for (int g = 0; g < G; g++) sum4(acc[g], scores + g * kBlock);
}

// acc[g] = acc[g] * keep[g] + sum_t weights[g][t] * values[t], for W vectors of the value's width from `d` on; the last one
// may be a partial vector.
template <int G, int W, bool kPartial, class T>
void add_values(const T* const* values, int num_tokens, int64_t d, int64_t dim, const float* weights, const float* keep, float* acc, int64_t acc_stride) {
  Vec sum[G][W];
  for (int g = 0; g < G; g++)
    for (int w = 0; w < W; w++) sum[g][w] = load(acc + g * acc_stride + d + w * kLanes) * keep[g];
  for (int t = 0; t < num_tokens; t++) {
    Vec v[W];
    for (int w = 0; w < W; w++) v[w] = kPartial ? load_first(values[t] + d, dim - d) : load(values[t] + d + w * kLanes);
    for (int g = 0; g < G; g++)
      for (int w = 0; w < W; w++) sum[g][w] += weights[g * kBlock + t] * v[w];
  }
  for (int g = 0; g < G; g++)
    for (int w = 0; w < W; w++) store(acc + g * acc_stride + d + w * kLanes, sum[g][w]);
}

template <int G, class T>
void add_all_values(const T* const* values, int num_tokens, int64_t dim, const float* weights, const float* keep, float* acc, int64_t acc_stride) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) add_values<G, 4, false>(values, num_tokens, d, dim, weights, keep, acc, acc_stride);
  for (; d + kLanes <= dim; d += kLanes) add_values<G, 1, false>(values, num_tokens, d, dim, weights, keep, acc, acc_stride);
  if (d < dim) add_values<G, 1, true>(values, num_tokens, d, dim, weights, keep, acc, acc_stride);
}

// What one split of one (row, kv head) leaves: per query head the largest score, the sum of exponentials, and the weighted values.
struct Partial {
  float *top, *total, *acc;  // [group], [group], [group, padded(value_dim)]
};

// Turns one head's scores into weights, in place; returns what the earlier sums are to be multiplied by.
float softmax_step(float* scores, int num_tokens, const Options& options, float* top, float* total) {
  const int n = padded(num_tokens);
  for (int t = num_tokens; t < n; t++) scores[t] = kNone;
  Vec high = splat(*top);
  for (int t = 0; t < n; t += kLanes) {
    Vec s = load(scores + t) * options.scale;
    if (options.softcap != 0) {
      s = options.softcap * tanh(s / options.softcap);
      if (t + kLanes > num_tokens)
        for (int i = num_tokens - t; i < kLanes; i++) s[i] = kNone;
    }
    store(scores + t, s);
    high = max(high, s);
  }
  const float now = largest(high), keep = std::exp(*top - now);
  Vec sums = {};
  for (int t = 0; t < n; t += kLanes) {
    const Vec e = exp(load(scores + t) - now);
    store(scores + t, e);
    if (t + kLanes <= num_tokens) sums += e;
    else
      for (int i = 0; i < num_tokens - t; i++) sums[i] += e[i];
  }
  *top = now;
  *total = *total * keep + sum(sums);
  return keep;
}

// Asks for four rows that are needed soon: pages lie anywhere, and the hardware follows no list of them.
template <class T>
void prefetch(const T* const* rows, int64_t width) {
  for (int t = 0; t < 4; t++)
    for (int64_t d = 0; d < width; d += 64 / sizeof(T)) __builtin_prefetch(rows[t] + d);
}

template <int G, class P, class T>
void attend_tile(const T* const* keys, const T* const* values, int num_tokens, bool first, const Shape& shape, const Options& options, const typename P::Other* q, Partial part) {
  const int64_t q_stride = padded(shape.key_dim, P::kStep), acc_stride = padded(shape.value_dim);
  float scores[G * kBlock], keep[G];
  for (int t = 0; t < num_tokens; t += 4) {
    if (first) prefetch(keys + t + kAhead, shape.width());
    dot_keys<G, P>(keys + t, q, q_stride, shape.key_dim, scores + t);
  }
  for (int g = 0; g < G; g++) keep[g] = softmax_step(scores + g * kBlock, num_tokens, options, part.top + g, part.total + g);
  add_all_values<G>(values, num_tokens, shape.value_dim, scores, keep, part.acc, acc_stride);
}

// Attends the query heads of one group to positions [first, last) of one row.
template <class P, class T>
void attend(const T* pool, const int32_t* pages, int64_t head, int64_t first, int64_t last, const Shape& shape, const Options& options, const typename P::Other* q, Partial part) {
  const int64_t width = shape.width();
  for (int64_t g = 0; g < shape.group; g++) part.top[g] = kNone, part.total[g] = 0;
  std::fill(part.acc, part.acc + shape.group * padded(shape.value_dim), 0.f);
  const T *keys[kBlock + kAhead + 4], *values[kBlock];
  for (int64_t begin = first; begin < last; begin += kBlock) {
    const int n = std::min<int64_t>(kBlock, last - begin), known = std::min<int64_t>(kBlock + kAhead, last - begin);
    for (int t = 0; t < known;) {
      const int64_t position = begin + t, slot = position % shape.page;
      const int64_t page = std::clamp<int64_t>(pages[position / shape.page], 0, shape.num_pages - 1);
      const T* row = pool + ((page * shape.kv_heads + head) * shape.page + slot) * width;
      for (const int end = std::min<int64_t>(known, t + shape.page - slot); t < end; t++, row += width) keys[t] = row;
    }
    for (int t = 0; t < n; t++) values[t] = keys[t] + shape.key_dim;
    // dot_keys takes four at a time, and looks ahead; softmax_step drops the surplus.
    for (int t = known; t < kBlock + kAhead + 4; t++) keys[t] = keys[known - 1];
    for (int64_t g = 0; g < shape.group;) {
      const Partial here{part.top + g, part.total + g, part.acc + g * padded(shape.value_dim)};
      const auto* x = q + g * padded(shape.key_dim, P::kStep);
      const int64_t left = shape.group - g;
      if (left >= kGroupTile) attend_tile<kGroupTile, P>(keys, values, n, g == 0, shape, options, x, here), g += kGroupTile;
      else if (kGroupTile > 3 && left == 3) attend_tile<3, P>(keys, values, n, g == 0, shape, options, x, here), g += 3;
      else if (left >= 2) attend_tile<2, P>(keys, values, n, g == 0, shape, options, x, here), g += 2;
      else attend_tile<1, P>(keys, values, n, g == 0, shape, options, x, here), g += 1;
    }
  }
}

// Joins the splits of one head with its sink (a logit without a value) and writes the row of the result. No position at all: zeros.
template <class T>
void finish(const Partial* parts, int64_t num_parts, int64_t head, float sink, int64_t dim, T* out) {
  const int64_t stride = padded(dim);
  float top = sink;
  for (int64_t p = 0; p < num_parts; p++) top = std::max(top, parts[p].top[head]);
  float total = sink == kNone ? 0.f : std::exp(sink - top);
  float share[64];
  for (int64_t p = 0; p < num_parts; p++) {
    share[p] = parts[p].top[head] == kNone ? 0.f : std::exp(parts[p].top[head] - top);
    total += share[p] * parts[p].total[head];
  }
  const float norm = total == 0 ? 0.f : 1.f / total;
  for (int64_t d = 0; d < dim; d++) {
    float x = 0;
    for (int64_t p = 0; p < num_parts; p++) x += share[p] * parts[p].acc[head * stride + d];
    from_float(x * norm, out + d);
  }
}

template <class T>
struct Call {
  const T *q, *k, *v;
  const int32_t *page_table, *lens, *starts;
  const float* sinks;
  T* out;
};

template <class Q, class P>
ffi::Error run(ffi::ThreadPool& threads, const Call<Q>& call, P* pool, const Shape& shape, const Options& options) {
  const int64_t heads = shape.rows * shape.kv_heads, capacity = shape.page * shape.pages_per_seq;
  auto first_of = [&](int64_t b) {
    const int64_t first = std::max<int64_t>(call.starts[b], 0);
    return options.window > 0 ? std::max<int64_t>(first, call.lens[b] - options.window) : first;
  };
  auto last_of = [&](int64_t b) { return std::min<int64_t>(call.lens[b], capacity); };
  int64_t positions = 0, longest = 0;
  for (int64_t b = 0; b < shape.rows; b++) {
    const int64_t n = std::max<int64_t>(0, last_of(b) - first_of(b));
    positions += n, longest = std::max(longest, n);
  }
  const int64_t workers = std::min<int64_t>(threads.num_threads(), 1 + positions * shape.kv_heads * shape.width() * int64_t(sizeof(P)) / kBytesPerWorker);
  const int64_t splits = heads >= workers ? 1 : std::clamp<int64_t>(std::min((workers + heads - 1) / heads, longest / kMinSplit), 1, 64);

  const int64_t acc_len = shape.group * padded(shape.value_dim), part_len = 2 * shape.group + acc_len;
  std::vector<float> partials(splits > 1 ? heads * splits * part_len : 0);
  auto part_at = [&](float* base) { return Partial{base, base + shape.group, base + 2 * shape.group}; };

  auto finish_group = [&](const Partial* parts, int64_t item) {
    for (int64_t g = 0; g < shape.group; g++) {
      const float sink = call.sinks ? call.sinks[item % shape.kv_heads * shape.group + g] : kNone;
      finish(parts, splits, g, sink, shape.value_dim, call.out + (item * shape.group + g) * shape.value_dim);
    }
  };
  auto body = [&](int64_t i) {
    using Products = Pair<P, Q>;
    static thread_local std::vector<typename Products::Other> queries;
    static thread_local std::vector<float> scratch;
    const int64_t item = i / splits, split = i % splits, b = item / shape.kv_heads, head = item % shape.kv_heads;
    const int64_t q_stride = padded(shape.key_dim, Products::kStep);
    queries.assign(shape.group * q_stride, {});
    scratch.resize(part_len);
    for (int64_t g = 0; g < shape.group; g++)
      for (int64_t d = 0; d < shape.key_dim; d++) hold(call.q[(item * shape.group + g) * shape.key_dim + d], &queries[g * q_stride + d]);
    const int32_t* pages = call.page_table + b * shape.pages_per_seq;
    const int64_t end = last_of(b), begin = std::min(first_of(b), end), newest = call.lens[b] - 1;
    if (split == splits - 1 && newest >= 0 && newest < capacity) {  // the one split that sees the new token
      const int64_t page = pages[newest / shape.page];
      if (page >= 0 && page < shape.num_pages) {
        P* slot = pool + ((page * shape.kv_heads + head) * shape.page + newest % shape.page) * shape.width();
        for (int64_t d = 0; d < shape.key_dim; d++) from_float(to_float(call.k[item * shape.key_dim + d]), slot + d);
        for (int64_t d = 0; d < shape.value_dim; d++) from_float(to_float(call.v[item * shape.value_dim + d]), slot + shape.key_dim + d);
      }
    }
    const int64_t n = std::max<int64_t>(end - begin, 0);
    const Partial part = part_at(splits > 1 ? partials.data() + i * part_len : scratch.data());
    attend<Products>(pool, pages, head, begin + n * split / splits, begin + n * (split + 1) / splits, shape, options, queries.data(), part);
    if (splits == 1) finish_group(&part, item);
  };
  parallel_for(threads, heads * splits, workers, body);
  if (splits > 1)
    for (int64_t item = 0; item < heads; item++) {
      Partial parts[64];
      for (int64_t s = 0; s < splits; s++) parts[s] = part_at(partials.data() + (item * splits + s) * part_len);
      finish_group(parts, item);
    }
  return ffi::Error::Success();
}

struct Buffers {
  ffi::AnyBuffer q, k, v, pool, page_table, lens, starts, sinks;
  ffi::Result<ffi::AnyBuffer> out, pool_out;
};

template <class Q, class P>
ffi::Error run_typed(ffi::ThreadPool& threads, Buffers& b, const Shape& shape, const Options& options) {
  const Call<Q> call{(const Q*)b.q.untyped_data(), (const Q*)b.k.untyped_data(), (const Q*)b.v.untyped_data(),
                     (const int32_t*)b.page_table.untyped_data(), (const int32_t*)b.lens.untyped_data(), (const int32_t*)b.starts.untyped_data(),
                     b.sinks.element_count() ? (const float*)b.sinks.untyped_data() : nullptr, (Q*)b.out->untyped_data()};
  return run(threads, call, (P*)b.pool_out->untyped_data(), shape, options);
}

// q[B, Hq, D] k[B, H, D] v[B, H, Dv] pool[P, H, page, D + Dv] page_table[B, pages_per_seq] lens[B] starts[B] sinks[Hq or 0]
// -> out[B, Hq, Dv], pool (aliased). Dtypes and shapes are checked by the caller in Python.
ffi::Error decode_attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer pool, ffi::AnyBuffer page_table,
                            ffi::AnyBuffer lens, ffi::AnyBuffer starts, ffi::AnyBuffer sinks, float scale, float softcap, int64_t window,
                            ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pool_out) {
  const auto kd = k.dimensions(), vd = v.dimensions(), pd = pool.dimensions();
  const Shape shape{kd[0], kd[1], int64_t(q.dimensions()[1]) / kd[1], kd[2], vd[2], pd[2], page_table.dimensions()[1], pd[0]};
  if (pool_out->untyped_data() != pool.untyped_data()) std::memcpy(pool_out->untyped_data(), pool.untyped_data(), pool.size_bytes());
  Buffers buffers{q, k, v, pool, page_table, lens, starts, sinks, out, pool_out};
  const Options options{scale, softcap, window};
  const auto is = [&](ffi::DataType query, ffi::DataType cache) { return q.element_type() == query && pool.element_type() == cache; };
  if (is(ffi::BF16, ffi::BF16)) return run_typed<bf16, bf16>(threads, buffers, shape, options);
  if (is(ffi::F16, ffi::F16)) return run_typed<f16, f16>(threads, buffers, shape, options);
  if (is(ffi::F32, ffi::F32)) return run_typed<float, float>(threads, buffers, shape, options);
  if (is(ffi::F32, ffi::BF16)) return run_typed<float, bf16>(threads, buffers, shape, options);
  return ffi::Error::InvalidArgument("decode_attention: no kernel for these dtypes of query and pool");
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_decode_attention, tas::decode_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

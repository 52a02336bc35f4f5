// The gated delta rule over a packed row, token by token, so that bits depend neither on other sequences nor on where a prompt is cut.
//
// The state S[K, V] of a head is walked once for each token: the update of one token and what the next one reads of the result
// are one loop, S = S * decay + k delta, then S k' and S q'. With keys and queries times their decay beforehand the decayed
// state is never made: delta = (v - S k') * beta and out = S q' + (q k) delta. All columns of V are independent of each other.
#include <cmath>

#include "dtypes.h"
#include "segments.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kTokensPerRun = 16;            // that are prepared at once
constexpr int64_t kNumbersPerWorker = 96 << 10;  // of states, once for each token: less is done before another thread is awake
constexpr int kMostVectors = kManyRegisters ? 8 : 4, kFewerVectors = kManyRegisters ? 4 : 2;
alignas(64) constexpr float kZeros[kMostVectors * kLanes] = {};

// Rows of columns of a state.
struct Rows {
  float* at;
  int64_t stride;
};

struct Token {
  float *key, *decay, *decayed_key, *decayed_query;  // [K], decay[1] if it is the same for all
  float beta, product;                               // of query and key
};

// What keys and queries read of the state.
template <int N>
struct Sums { Vec known[N] = {}, read[N] = {}; };

template <int N>
inline void add(Sums<N>& sums, const Token& token, int64_t i, const Vec* row) {
  const Vec k = splat(token.decayed_key[i]), q = splat(token.decayed_query[i]);
  for (int j = 0; j < N; j++) {
    sums.known[j] = fma(row[j], k, sums.known[j]);
    sums.read[j] = fma(row[j], q, sums.read[j]);
  }
}

template <int N>
void add_all(Sums<N>& result, const Token& token, Rows from, int64_t dim) {
  Sums<N> sums;
  for (int64_t i = 0; i < dim; i++) {
    Vec row[N];
    for (int j = 0; j < N; j++) row[j] = load(from.at + i * from.stride + j * kLanes);
    add(sums, token, i, row);
  }
  result = sums;
}

// The update by `token`; where there is a next one, its sums as well.
template <int N, bool kByColumn, bool kHasNext>
void update(const Token& token, const Vec* deltas, Rows from, Rows to, int64_t dim, const Token* next, Sums<N>* result) {
  Vec delta[N];
  for (int j = 0; j < N; j++) delta[j] = deltas[j];
  Sums<N> sums;
  Vec decay = splat(token.decay[0]);
  for (int64_t i = 0; i < dim; i++) {
    if (kByColumn) decay = splat(token.decay[i]);
    const Vec k = splat(token.key[i]);
    Vec row[N];
    for (int j = 0; j < N; j++) {
      row[j] = fma(k, delta[j], load(from.at + i * from.stride + j * kLanes) * decay);
      store(to.at + i * to.stride + j * kLanes, row[j]);
    }
    if constexpr (kHasNext) add(sums, *next, i, row);
  }
  if constexpr (kHasNext) *result = sums;
}

template <class T, bool kByColumn>
struct Rule {
  const T *q, *k, *v;
  const float *g, *beta;
  T* out;
  float* pool;
  int64_t heads, key_heads, dim, width;
  bool is_normed;

  int64_t padded_dim() const { return (dim + kLanes - 1) / kLanes * kLanes; }

  void part(const Segments& segments, const SequencePart& p) const {
    const Span columns = span_of(p, width, kFewerVectors * kLanes);
    if (columns.begin == columns.end) return;
    const int64_t padded = padded_dim(), padded_width = (columns.end - columns.begin + kLanes - 1) / kLanes * kLanes;
    float* tokens = thread_scratch((4 * kTokensPerRun + 1) * padded + dim * padded_width);
    float* states = tokens + (4 * kTokensPerRun + 1) * padded;
    for (const Segment* s = segments.begin(p.sequence); s != segments.end(p.sequence); s++) segment(*s, p.head, columns, tokens, states);
  }

 private:
  float* head_of(int64_t row, int64_t h) const { return pool + (row * heads + h) * dim * width; }

  void segment(const Segment& s, int64_t h, Span columns, float* memory, float* states) const {
    Token tokens[kTokensPerRun];
    const int most = s.end - s.begin > 1 ? kFewerVectors : kMostVectors;  // several tokens: a block stays in the first-level cache
    for (int64_t begin = s.begin; begin < s.end; begin += kTokensPerRun) {
      const int64_t count = std::min(kTokensPerRun, s.end - begin);
      for (int64_t t = 0; t < count; t++) tokens[t] = prepared(begin + t, h, memory + 4 * t * padded_dim());
      float* state = states;
      for (int64_t c = columns.begin; c < columns.end;) {
        const int64_t left = columns.end - c;
        const int num = left >= most * kLanes ? most : left >= kFewerVectors * kLanes ? kFewerVectors : left >= 2 * kLanes ? 2 : 1;
        if (num == kMostVectors) run<kMostVectors>(s, begin, count, h, c, tokens, state);
        else if (num == kFewerVectors) run<kFewerVectors>(s, begin, count, h, c, tokens, state);
        else if (num == 2) run<2>(s, begin, count, h, c, tokens, state);
        else if (left >= kLanes) run<1>(s, begin, count, h, c, tokens, state);
        else run_first(s, begin, count, h, c, left, tokens, state);
        c += num * kLanes;
        state += num * kLanes * dim;
      }
    }
  }

  // Columns [c, c + N * kLanes) over the tokens from `begin` on. Between tokens they are in `state`, side by side.
  template <int N>
  void run(const Segment& s, int64_t begin, int64_t count, int64_t h, int64_t c, const Token* tokens, float* state) const {
    static_assert(N <= kMostVectors);
    const Rows between{state, N * kLanes}, nowhere{nullptr, 0};
    Rows from = between, to = between;
    if (begin == s.begin) from = s.read < 0 ? Rows{const_cast<float*>(kZeros), 0} : Rows{head_of(s.read, h) + c, width};
    if (begin + count == s.end) to = s.write < 0 ? nowhere : Rows{head_of(s.write, h) + c, width};
    walk<N>(begin, count, h, c, N * kLanes, tokens, from, between, to);
  }

  // The same for fewer columns than a vector has.
  void run_first(const Segment& s, int64_t begin, int64_t count, int64_t h, int64_t c, int64_t n, const Token* tokens, float* state) const {
    const Rows between{state, kLanes};
    if (begin == s.begin)
      for (int64_t i = 0; i < dim; i++) store(state + i * kLanes, s.read < 0 ? Vec{} : load_first(head_of(s.read, h) + i * width + c, n));
    walk<1>(begin, count, h, c, n, tokens, between, between, between);
    if (begin + count == s.end && s.write >= 0)
      for (int64_t i = 0; i < dim; i++) std::memcpy(head_of(s.write, h) + i * width + c, state + i * kLanes, n * sizeof(float));
  }

  template <int N>
  void walk(int64_t begin, int64_t count, int64_t h, int64_t c, int64_t n, const Token* tokens, Rows from, Rows between, Rows to) const {
    Vec delta[N];
    for (int64_t t = 0; t < count; t++) {
      Sums<N> sums;
      if (t == 0) add_all(sums, tokens[0], from, dim);
      else update<N, kByColumn, true>(tokens[t - 1], delta, t == 1 ? from : between, between, dim, &tokens[t], &sums);
      const int64_t at = ((begin + t) * heads + h) * width + c;
      for (int j = 0; j < N; j++) {
        const int here = std::min<int64_t>(kLanes, n - j * kLanes);
        const Vec value = here == kLanes ? load(v + at + j * kLanes) : load_first(v + at + j * kLanes, here);
        delta[j] = (value - sums.known[j]) * tokens[t].beta;
        const Vec made = fma(delta[j], splat(tokens[t].product), sums.read[j]);
        if (here == kLanes) store(out + at + j * kLanes, made);
        else store_first(out + at + j * kLanes, made, here);
      }
    }
    if (to.at) update<N, kByColumn, false>(tokens[count - 1], delta, count == 1 ? from : between, to, dim, nullptr, nullptr);
  }

  // Token t of head h, in `memory`.
  Token prepared(int64_t t, int64_t h, float* memory) const {
    const int64_t padded = padded_dim(), kh = h / (heads / key_heads);
    const T *query = q + (t * key_heads + kh) * dim, *key = k + (t * key_heads + kh) * dim;
    Token made{memory, memory + padded, memory + 2 * padded, memory + 3 * padded, beta[t * heads + h], 0};
    Vec of_queries{}, of_keys{}, products{};
    for (int64_t i = 0; i < dim; i += kLanes) {
      const int n = std::min<int64_t>(kLanes, dim - i);
      const Vec a = n == kLanes ? load(query + i) : load_first(query + i, n), b = n == kLanes ? load(key + i) : load_first(key + i, n);
      store(made.decayed_query + i, a);
      store(made.key + i, b);
      of_queries = fma(a, a, of_queries);
      of_keys = fma(b, b, of_keys);
      products = fma(a, b, products);
    }
    float query_scale = 1.f / std::sqrt(float(dim)), key_scale = 1.f;
    if (is_normed) {
      query_scale /= std::sqrt(sum(of_queries) + 1e-6f);
      key_scale /= std::sqrt(sum(of_keys) + 1e-6f);
    }
    made.product = sum(products) * query_scale * key_scale;
    if (!kByColumn) made.decay[0] = std::exp(g[t * heads + h]);
    for (int64_t i = 0; i < dim; i += kLanes) {
      Vec decay = splat(made.decay[0]);
      if (kByColumn) {
        const float* logs = g + (t * heads + h) * dim + i;
        decay = exp(dim - i >= kLanes ? load(logs) : load_first(logs, dim - i));
        store(made.decay + i, decay);
      }
      const Vec scaled = load(made.key + i) * key_scale;
      store(made.key + i, scaled);
      store(made.decayed_key + i, scaled * decay);
      store(made.decayed_query + i, load(made.decayed_query + i) * query_scale * decay);
    }
    return made;
  }
};

template <class T, bool kByColumn>
ffi::Error run(ffi::ThreadPool& threads, const Rule<T, kByColumn>& rule, const Segments& segments) {
  const int64_t numbers = segments.num_tokens() * rule.heads * rule.dim * rule.width;
  const int64_t workers = std::min<int64_t>(threads.num_threads(), 1 + numbers / kNumbersPerWorker);
  const auto parts = segments.parts(rule.heads, std::max<int64_t>(1, rule.width / (kFewerVectors * kLanes)), workers);
  parallel_for(threads, parts.size(), workers, [&](int64_t i, int64_t) { rule.part(segments, parts[i]); });
  return ffi::Error::Success();
}

// pool[rows, H, K, V], segments, q[T, Hk, K], k[T, Hk, K], v[T, H, V] of one dtype, g[T, H] or [T, H, K], beta[T, H] -> out[T, H, V] of that dtype, pool.
ffi::Error gated_delta_rule(ffi::ThreadPool threads, ffi::AnyBuffer pool, Segments::Ints cu, Segments::Ints read, Segments::Ints write, Segments::Ints first, ffi::Buffer<ffi::PRED> held,
                            ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::F32> g, ffi::Buffer<ffi::F32> beta, ffi::Result<ffi::AnyBuffer> out,
                            ffi::Result<ffi::AnyBuffer> after, bool drops_last, bool is_normed) {
  const auto pd = pool.dimensions(), kd = k.dimensions();
  const int64_t num_tokens = kd[0], heads = pd[1], width = pd[3];
  if (pool.element_type() != ffi::F32 || q.element_type() != v.element_type() || k.element_type() != v.element_type() || out->element_type() != v.element_type())
    return ffi::Error::InvalidArgument("gated_delta_rule: expected a pool of float32 and q, k, v and a result of one dtype");
  const Segments segments(cu, read, write, first, held, num_tokens, pd[0], drops_last);
  float* states = pool_in_place<float>(pool, after);
  return with_float_type("gated_delta_rule", v, [&](const auto* values) {
    using T = std::decay_t<decltype(*values)>;
    T* to = same_type(values, *out);
    segments.clear_padding(to, num_tokens, heads * width);
    const auto with = [&](auto by_column) {
      return run(threads, Rule<T, decltype(by_column)::value>{same_type(values, q), same_type(values, k), values, g.typed_data(), beta.typed_data(), to, states, heads, kd[1], pd[2], width, is_normed},
                 segments);
    };
    return g.dimensions().size() == 3 ? with(std::true_type{}) : with(std::false_type{});
  });
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_gated_delta_rule, tas::gated_delta_rule,
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
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("drops_last")
                                  .Attr<bool>("is_normed"));

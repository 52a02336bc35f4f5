// States whose rows are independent of each other, walked token by token: S[p] = S[p] * decay + dt x[p] b, out[p] = S[p] c + d x[p].
//
// As many rows as a vector has numbers go together through all tokens of a run and stay in the first-level cache meanwhile.
// A state is float32 and changes token by token in one order, so that bits depend neither on where a prompt is cut nor on what
// else is in the row.
#pragma once
#include <cmath>

#include "dtypes.h"
#include "segments.h"

namespace tas {

constexpr int64_t kTokensPerStateRun = 16;  // that are prepared at once

// x[T, H, P], b[T, G, N], c[T, G, N], pool[rows, H, P, N], out[T, H, P], skip[H] or none. Decays are those of a token and head, or with
// `kByNumber` exp(a[H, P, N] * dt[T, H, P]) of each number, and skip is [H, P].
template <class T, bool kByNumber>
struct StateRows {
  const T *x, *b, *c;
  const float *dt, *a, *skip, *dt_bias;
  float least, most;
  T* out;
  float* pool;
  int64_t heads, rows, groups, n;

  void part(const Segments& segments, const SequencePart& p) const {
    const Span span = span_of(p, rows, kLanes);
    if (span.begin == span.end) return;
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
    float* memory = thread_scratch((2 * kTokensPerStateRun + 1) * padded + (span.end - span.begin) * n);
    std::fill_n(memory + 2 * kTokensPerStateRun * padded, padded, 0.f);
    for (const Segment* s = segments.begin(p.sequence); s != segments.end(p.sequence); s++) segment(*s, p.head, span, padded, memory);
  }

 private:
  struct Rows {
    const float* at;
    int64_t stride;
  };
  struct Token {
    const float *b, *c;
    float dt, decay;  // of all rows, or unused
  };

  void segment(const Segment& s, int64_t h, Span span, int64_t padded, float* memory) const {
    Token tokens[kTokensPerStateRun];
    float *zeros = memory + 2 * kTokensPerStateRun * padded, *dropped = zeros + padded;
    for (int64_t begin = s.begin; begin < s.end; begin += kTokensPerStateRun) {
      const int64_t count = std::min(kTokensPerStateRun, s.end - begin);
      for (int64_t t = 0; t < count; t++) tokens[t] = prepared(begin + t, h, padded, memory + 2 * t * padded);
      for (int64_t r = span.begin; r < span.end; r += kLanes) {
        float* to = s.write < 0 ? dropped + (r - span.begin) * n : pool + ((s.write * heads + h) * rows + r) * n;
        Rows from{to, n};
        if (begin == s.begin) from = s.read < 0 ? Rows{zeros, 0} : Rows{pool + ((s.read * heads + h) * rows + r) * n, n};
        const int num = std::min<int64_t>(kLanes, span.end - r);
        for (int64_t t = 0; t < count; t++) {
          if (num == kLanes && n % kLanes == 0) step<true>(tokens[t], begin + t, h, r, num, from, to);
          else step<false>(tokens[t], begin + t, h, r, num, from, to);
          from = {to, n};
        }
      }
    }
  }

  // Rows [r, r + num) of the state at token t.
  template <bool kIsFull>
  void step(const Token& token, int64_t t, int64_t h, int64_t r, int num, Rows from, float* to) const {
    const auto numbers = [&](const auto* p) { return kIsFull ? load(p) : load_some(p, num); };
    const Vec values = numbers(x + (t * heads + h) * rows + r);
    const Vec dts = kByNumber ? numbers(dt + (t * heads + h) * rows + r) : splat(token.dt);
    float steps[kLanes], added[kLanes];
    store(steps, dts);
    store(added, dts * values);
    Vec sums[kLanes] = {};
    for (int j = 0; j < (kIsFull ? kLanes : num); j += kRowsAtOnce) {
      const Rows some{from.at + j * from.stride, from.stride};
      columns<kIsFull>(token, std::min(kRowsAtOnce, num - j), n, some, to + j * n, kByNumber ? a + (h * rows + r + j) * n : nullptr, steps + j, added + j, sums + j);
    }
    transpose_square(sums);
    for (int half = kLanes / 2; half; half /= 2)
      for (int j = 0; j < half; j++) sums[j] = sums[j] + sums[j + half];
    Vec made = sums[0];
    if (skip) made = fma(values, kByNumber ? numbers(skip + h * rows + r) : splat(skip[h]), made);
    T* place = out + (t * heads + h) * rows + r;
    if (kIsFull || num == kLanes) store(place, made);
    else store_first(place, made, num);
  }

  // Few rows at once: their sums stay in registers, and no load waits for a store 4 kB away.
  static constexpr int kRowsAtOnce = kLanes / 2;

  // sums[j] = S[j] c of `num` rows, after S[j] = S[j] * decay + added[j] b.
  template <bool kIsFull>
  static void columns(const Token& token, int num, int64_t n, Rows from, float* to, const float* logs, const float* steps, const float* added, Vec* result) {
    Vec sums[kRowsAtOnce] = {};
    const Vec decay = splat(token.decay);
    const float *b = token.b, *c = token.c;
    for (int64_t i = 0; i < n; i += kLanes) {
      const int here = kIsFull ? kLanes : std::min<int64_t>(kLanes, n - i);
      const Vec of_b = load(b + i), of_c = load(c + i);
      const float *next = from.at + i, *log = logs + i;
      float* place = to + i;
      for (int j = 0; j < (kIsFull ? kRowsAtOnce : num); j++, next += from.stride, log += n, place += n) {
        const Vec before = kIsFull ? load(next) : load_some(next, here);
        Vec state;
        if constexpr (kByNumber) state = before * exp((kIsFull ? load(log) : load_some(log, here)) * steps[j]);
        else state = before * decay;
        state = fma(splat(added[j]), of_b, state);
        if (kIsFull || here == kLanes) store(place, state);
        else store_first(place, state, here);
        sums[j] = fma(state, of_c, sums[j]);
      }
    }
    for (int j = 0; j < (kIsFull ? kRowsAtOnce : num); j++) result[j] = sums[j];
  }

  template <class N>
  static Vec load_some(const N* p, int count) { return count == kLanes ? load(p) : load_first(p, count); }

  // Token t of head h, b and c as floats in `memory`, with zeros behind them.
  Token prepared(int64_t t, int64_t h, int64_t padded, float* memory) const {
    const int64_t at = (t * groups + h / (heads / groups)) * n;
    for (int64_t i = 0; i < n; i += kLanes) {
      const int here = std::min<int64_t>(kLanes, n - i);
      store(memory + i, load_some(b + at + i, here));
      store(memory + padded + i, load_some(c + at + i, here));
    }
    if (kByNumber) return {memory, memory + padded, 0, 0};
    const float raw = dt[t * heads + h] + (dt_bias ? dt_bias[h] : 0.f);
    const float step = std::min(std::max(std::max(raw, 0.f) + std::log1p(std::exp(-std::fabs(raw))), least), most);
    return {memory, memory + padded, step, std::exp(step * a[h])};
  }
};

// Runs all parts; `cost` is that of a number of the state, in those of a Mamba-2 layer.
template <class T, bool kByNumber>
xla::ffi::Error run_rows(xla::ffi::ThreadPool& threads, const StateRows<T, kByNumber>& states, const Segments& segments, int64_t cost) {
  constexpr int64_t kNumbersPerWorker = 96 << 10;  // less is done before another thread is awake
  const int64_t numbers = segments.num_tokens() * states.heads * states.rows * states.n * cost;
  const int64_t workers = std::min<int64_t>(threads.num_threads(), 1 + numbers / kNumbersPerWorker);
  const auto parts = segments.parts(states.heads, (states.rows + kLanes - 1) / kLanes, workers);
  parallel_for(threads, parts.size(), workers, [&](int64_t i, int64_t) { states.part(segments, parts[i]); });
  return xla::ffi::Error::Success();
}

}  // namespace tas

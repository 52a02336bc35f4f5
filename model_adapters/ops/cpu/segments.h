// Segments of a packed row of tokens, with the rows of a pool of states that they begin with and leave theirs in (segments.py).
//
// A sequence has one segment, or several in a chain, where a state in between is kept or dropped: each but the first reads what
// the one before it has written. So the segments of a sequence are walked in their order by one thread, for each part of its
// state. Different sequences may run at once: no row is written by one and read by another.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace tas {

struct Segment {
  int64_t begin, end;  // tokens
  int64_t read, write; // rows of the pool; below zero: a state of zeros, a state that is dropped
};

// A part of the work: a sequence, one of its heads, and one of the pieces of that head's state.
struct SequencePart { int64_t sequence, head, piece, num_pieces; };

// Numbers [begin, end) of n that are a piece, in units.
struct Span { int64_t begin, end; };
inline Span span_of(const SequencePart& part, int64_t n, int64_t unit) {
  const int64_t units = (n + unit - 1) / unit;
  return {units * part.piece / part.num_pieces * unit, std::min(n, units * (part.piece + 1) / part.num_pieces * unit)};
}

class Segments {
 public:
  using Ints = xla::ffi::Buffer<xla::ffi::S32>;

  // cu[R + 1], read[R], write[R], first[R], held[R] of `num_tokens` and a pool of `num_rows`, the last of which may be one that drops
  // what is written to it. Segments without tokens are left out.
  Segments(Ints cu, Ints read, Ints write, Ints first, xla::ffi::Buffer<xla::ffi::PRED> held, int64_t num_tokens, int64_t num_rows, bool drops_last) {
    int64_t last_first = -1;
    for (int64_t r = 0; r < int64_t(read.element_count()); r++) {
      const int64_t begin = std::clamp<int64_t>(cu.typed_data()[r], num_in_use_, num_tokens), end = std::clamp<int64_t>(cu.typed_data()[r + 1], begin, num_tokens);
      if (begin == end) continue;
      if (all_.empty()) first_token_ = begin;
      if (sequences_.empty() || first.typed_data()[r] != last_first) sequences_.push_back(all_.size());
      last_first = first.typed_data()[r];
      const int64_t from = std::clamp<int64_t>(read.typed_data()[r], 0, num_rows - 1), to = write.typed_data()[r];
      all_.push_back({begin, end, held.typed_data()[r] ? from : -1, to >= 0 && to < num_rows - drops_last ? to : -1});
      num_in_use_ = end;
    }
    sequences_.push_back(all_.size());
  }

  int64_t num_sequences() const { return sequences_.size() - 1; }
  int64_t num_tokens() const { return num_in_use_ - first_token_; }
  const Segment* begin(int64_t sequence) const { return all_.data() + sequences_[sequence]; }
  const Segment* end(int64_t sequence) const { return all_.data() + sequences_[sequence + 1]; }
  const std::vector<Segment>& all() const { return all_; }

  // Zeros for the tokens of no segment.
  template <class T>
  void clear_padding(T* out, int64_t num_tokens, int64_t width) const {
    std::memset(out, 0, first_token_ * width * sizeof(T));
    std::memset(out + num_in_use_ * width, 0, (num_tokens - num_in_use_) * width * sizeof(T));
  }

  // Long sequences first, in as many pieces as keep `threads` busy to the end, each of at most `max_pieces`.
  std::vector<SequencePart> parts(int64_t heads, int64_t max_pieces, int64_t threads) const {
    std::vector<int64_t> order(num_sequences());
    std::iota(order.begin(), order.end(), 0);
    const auto length = [&](int64_t s) { return end(s)[-1].end - begin(s)->begin; };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length(a) > length(b); });
    const int64_t wanted = threads > 1 ? 4 * threads : 1;
    std::vector<SequencePart> found;
    for (const int64_t s : order) {
      const int64_t parts_of_it = (wanted * length(s) + num_tokens() - 1) / num_tokens();
      const int64_t pieces = std::clamp<int64_t>((parts_of_it + heads - 1) / heads, 1, max_pieces);
      for (int64_t h = 0; h < heads; h++)
        for (int64_t p = 0; p < pieces; p++) found.push_back({s, h, p, pieces});
    }
    return found;
  }

 private:
  std::vector<Segment> all_;
  std::vector<int64_t> sequences_;  // the first segment of each, and the end
  int64_t first_token_ = 0, num_in_use_ = 0;
};

// The result's memory, which holds the pool: it is the pool's own if that is donated.
template <class T>
T* pool_in_place(xla::ffi::AnyBuffer& pool, xla::ffi::Result<xla::ffi::AnyBuffer>& after) {
  T* to = static_cast<T*>(after->untyped_data());
  if (to != pool.untyped_data()) std::memcpy(to, pool.untyped_data(), pool.size_bytes());
  return to;
}

// Memory of this thread for n numbers, until the next call.
inline float* thread_scratch(int64_t n) {
  thread_local std::vector<float> numbers;
  if (int64_t(numbers.size()) < n) numbers.resize(n);
  return numbers.data();
}

}  // namespace tas

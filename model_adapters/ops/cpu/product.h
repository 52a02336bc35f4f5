// Products with weights as PyTorch lays them out: out[r][i] = x[r] . weight[i] + bias[i].
//
// A word is 32 bits: one float, or two bfloat16 where the processor multiplies pairs of them. The rows of x are turned over
// their diagonal beforehand, so that a vector holds one word of kLanes rows; the weights are read as they lie, each word
// of theirs spread over a vector. For very few rows that leaves most lanes empty: then the weights are turned, as they
// pass, and the words of x are spread. Either way nothing is summed across lanes, and each output is one sum over K from
// front to back: the same to the last bit however many rows come along and on however many threads.
//
// While weight rows meet x, the next ones are fetched from memory, so that arithmetic does not wait for them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace tas {

constexpr int kFewRows = kManyRegisters ? 8 : 2;    // of x, up to which the weights are turned
constexpr int kMaxGroups = kManyRegisters ? 4 : 2;  // groups of kLanes rows of x that a tile takes together
constexpr int kChunkRows = 48;                      // weight rows that a thread takes at a time: whole tiles of every shape
constexpr int64_t kBlockWords = 1536;               // of K: x of kMaxGroups groups stays in the second-level cache

constexpr std::align_val_t kLine{64};               // of the cache
constexpr int kWordsPerLine = 64 / sizeof(float);

// Weight rows of a tile: its sums, and what they are made of, stay in registers.
constexpr int tile_rows(int groups) { return kManyRegisters ? (groups == 1 ? 16 : groups == 2 ? 8 : 6) : (groups == 1 ? 12 : 6); }

// Threads worth waking: each takes some microseconds, in which one streams a quarter of a megabyte or does millions of products.
inline int64_t num_workers(int64_t rows, int64_t n, int64_t k, int64_t itemsize) {
  return 1 + n * k * itemsize / (1 << 18) + rows * n * k / (1 << 23);
}

// Calls `function` with `count`, of 1 to N, as a constant.
template <int N, class Function>
void for_count(int64_t count, const Function& function) {
  if (count == N) return function(std::integral_constant<int, N>{});
  if constexpr (N > 1) for_count<N - 1>(count, function);
}

// p in one register. With an address of two, a processor takes a product and its load from memory apart again.
inline const float* in_register(const float* p) {
  asm("" : "+r"(p));
  return p;
}

// The 32 bits at p in each lane.
template <class Word>
inline Word splat_word(const void* p) {
#if defined(__AVX512F__)  // said so, that a compiler makes it one instruction with the only product that wants it
  if constexpr (std::is_same_v<Word, Vec>) return (Vec)_mm512_set1_ps(*(const float*)p);
#endif
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return (Word)(UVec{} + word);
}

// x[rows, k] in words, zeros behind each row. Without `lanes` the rows lie as they are, as one row does in any case; else they
// are turned in groups of that many: group g holds its word w at data + (g * num_words + w) * lanes, with zeros for rows that
// are not there. Row r is row at[r] of x, if `at` is given.
template <class T, class P = Pair<T>>
class HeldRows {
 public:
  HeldRows(xla::ffi::ThreadPool* threads, const T* x, int64_t rows, int64_t k, int64_t lanes, const int32_t* at = nullptr) : x_(x), rows_(rows), k_(k), at_(at) {
    if (lanes == 1) lanes = 0;
    num_words = (k + P::kStep - 1) / P::kStep * kLanes;
    const int64_t num_groups = lanes ? (rows + lanes - 1) / lanes : 0;
    const int64_t count = (lanes ? num_groups * lanes : rows) * num_words;
    words_.reset(static_cast<float*>(::operator new(count * sizeof(float), kLine)));  // not vector: nobody needs zeros
    float* out = words_.get();
    if (!lanes) {
      for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < k; d += P::kStep) store(out + r * num_words + d / kPerWord, step_of(r, d));
      return;
    }
    const int64_t slices = (k + kSlice - 1) / kSlice;
    const auto turn = [&](int64_t i, int64_t = 0) {
      const int64_t g = i / slices, begin = i % slices * kSlice;
      turn_group(g, begin, std::min(k, begin + kSlice), lanes, out + (g * num_words + begin / kPerWord) * lanes);
    };
    if (threads != nullptr) parallel_for(*threads, num_groups * slices, 1 + rows * k / kNumbersPerWorker, turn);
    else
      for (int64_t i = 0; i < num_groups * slices; i++) turn(i);
  }

  int64_t num_words;
  const float* data() const { return words_.get(); }

 private:
  static constexpr int64_t kPerWord = P::kStep / kLanes;
  static constexpr int64_t kSlice = 512;  // of K, whole steps: what a thread turns at a time
  static constexpr int64_t kNumbersPerWorker = 16 << 10;

  Vec step_of(int64_t r, int64_t d) const {
    const int left = std::min<int64_t>(P::kStep, k_ - d);
    const T* row = x_ + (at_ ? at_[r] : r) * k_ + d;
    return (Vec)(left == P::kStep ? P::load(row) : P::load(row, left));
  }

  void turn_group(int64_t g, int64_t begin, int64_t end, int64_t lanes, float* out) const {
    const int count = std::min<int64_t>(lanes, rows_ - g * lanes);
    for (int64_t d = begin; d < end; d += P::kStep, out += kLanes * lanes) {
      Vec v[kLanes] = {};
      for (int i = 0; i < count; i++) v[i] = step_of(g * lanes + i, d);
      transpose_square(v);
      const bool is_last = d + P::kStep >= end;  // what lies behind may be another thread's
      float last[kLanes * kLanes], *to = is_last ? last : out;
      for (int j = 0; j < kLanes; j++) store(to + j * lanes, v[j]);
      if (is_last) std::copy(last, last + kLanes * lanes, out);
    }
  }

  const T* x_;
  int64_t rows_, k_;
  const int32_t* at_;
  struct Free {
    void operator()(float* words) const { ::operator delete(words, kLine); }
  };
  std::unique_ptr<float, Free> words_;  // no vector of them crosses a line of the cache
};

// Weight rows as words: as they lie where a number is a word or half of one, else as floats of a scratch.
template <class T>
class Product {
  using P = Pair<T>;
  using Word = decltype(P::load((const T*)nullptr));
  static constexpr int64_t kPerWord = P::kStep / kLanes;
  static constexpr bool kAsTheyLie = sizeof(T) * kPerWord == sizeof(float);
  // A tile meets a copy of its weights as floats, whose rows are no power of two apart: as they lie, a small first-level
  // cache would keep them in one set, and lose them.
  static constexpr bool kCopies = !kAsTheyLie || !kManyRegisters;
  static constexpr int64_t kCopyColumns = 256, kCopyStride = kCopyColumns + kWordsPerLine;
  static constexpr int kStripRows = 6;         // weight rows side by side in a strip; a chunk has a whole number of strips
  static constexpr int64_t kManyGroups = 12;   // of x, from which on turning the weights pays
  static constexpr int64_t kBlockGroups = 96;  // of x, whose sums stay in the second-level cache until they are written
  static_assert(kChunkRows % (2 * kStripRows) == 0);

 public:
  // Row r of the result is row to[r] of the output, if `to` is given.
  Product(const HeldRows<T>& x, int64_t rows, const T* weight, int64_t n, int64_t k, const float* bias, const int32_t* to = nullptr)
      : x_(x.data()), num_words_(x.num_words), rows_(rows), weight_(weight), n_(n), k_(k), bias_(bias), to_(to) {}

  static int64_t lanes(int64_t rows) { return rows <= kFewRows ? 0 : kLanes; }  // that it wants x in

  int64_t num_chunks() const { return (n_ + kChunkRows - 1) / kChunkRows; }

  // out[r][i] for all rows and the weight rows i of chunk c; `next` is the chunk that this thread takes after it.
  template <class Out>
  void run(int64_t c, int64_t next, Out* out) const {
    static thread_local std::vector<float> sums_of_thread;
    const int64_t num_groups = (rows_ + kLanes - 1) / kLanes, begin = c * kChunkRows, end = std::min(n_, begin + kChunkRows);
    const T* after = next < num_chunks() ? weight_ + next * kChunkRows * k_ : nullptr;
    if (rows_ <= kFewRows) {
      for (int64_t i = begin; i < end; i += kLanes)
        for_count<kFewRows>(rows_, [&](auto count) { stream<count>(i, i + kLanes < end ? weight_ + (i + kLanes) * k_ : after, out); });
      return;
    }
    const int64_t most = kCopies && num_groups >= kManyGroups ? kBlockGroups : num_groups;
    sums_of_thread.resize(kChunkRows * std::min(most, num_groups) * kLanes);
    for (int64_t first = 0; first < num_groups; first += most) {
      const int64_t last = std::min(num_groups, first + most);
      const Sums sums{sums_of_thread.data(), (last - first) * kLanes, first};
      multiply(begin, end, first, last, first == 0 ? after : nullptr, sums);
      for (int64_t g = first; g < last; g++)
        for (int64_t i = begin; i < end; i += kLanes) finish(sums, g, i, i - begin, std::min<int64_t>(kLanes, end - i), out);
    }
  }

 private:
  // [kChunkRows][stride], a column for each row of x from group `first` on.
  struct Sums {
    float* data;
    int64_t stride, first;
    float* at(int64_t i, int64_t g) const { return data + i * stride + (g - first) * kLanes; }
  };

  // The sums of weight rows [begin, end) and groups [first, last) of x.
  void multiply(int64_t begin, int64_t end, int64_t first, int64_t last, const T* after, const Sums& sums) const {
    if (kCopies && last - first >= kManyGroups) return strips(begin, end, after, first, last, sums);
    if (kCopies && last - first > kMaxGroups) return panels(begin, end, after, first, last, sums);
    for (int64_t d = 0; d < std::max<int64_t>(k_, 1); d += kBlockWords * kPerWord) {
      const bool is_last = d + kBlockWords * kPerWord >= k_;
      for (int64_t g = first; g < last;) {
        const bool fetches = g == first;  // later groups find the weights in the cache
        const T* then = !fetches ? nullptr : is_last ? after : weight_ + begin * k_ + d + kBlockWords * kPerWord;
        const int64_t left = last - g;
        if (kMaxGroups == 4 && left >= 4) tiles<kMaxGroups>(begin, end, d, g, sums, fetches, then), g += kMaxGroups;
        else if (left >= 2) tiles<2>(begin, end, d, g, sums, fetches, then), g += 2;
        else tiles<1>(begin, end, d, g, sums, fetches, then), g += 1;
      }
    }
  }

  // kLanes weight rows from `begin` on, one step of K at d, turned: v[j] holds word j of each. Rows behind the last repeat it.
  void load_square(int64_t begin, int64_t d, Vec* v) const {
    const T* w = weight_ + begin * k_ + d;
    const int last = std::min<int64_t>(kLanes, n_ - begin) - 1, left = std::min<int64_t>(P::kStep, k_ - d);
    if constexpr (kAsTheyLie)
      if (last == kLanes - 1 && left == P::kStep) return load_turned((const char*)w, k_ * sizeof(T), v);
    for (int i = 0; i < kLanes; i++) {
      const T* row = w + std::min(i, last) * k_;
      v[i] = (Vec)(left == P::kStep ? P::load(row) : P::load(row, left));
    }
    transpose_square(v);
  }

  // The outputs of kLanes weight rows and R rows of x, as the weights pass; those of `next` come after them.
  template <int R, class Out>
  void stream(int64_t begin, const T* next, Out* out) const {
    Vec sum[R] = {};
    if (next + kLanes * k_ > weight_ + n_ * k_) next = nullptr;
    for (int64_t d = 0; d < k_; d += P::kStep) {
      Vec v[kLanes];
      load_square(begin, d, v);
      if (next != nullptr) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) __builtin_prefetch(next + i * k_ + d, 0, 2);
      }
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; j++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) P::accumulate(sum[r], (Word)v[j], splat_word<Word>(x_ + r * num_words_ + d / kPerWord + j));
    }
    const int64_t count = std::min<int64_t>(kLanes, n_ - begin);
    for (int r = 0; r < R; r++) {
      if (bias_)
        for (int64_t i = 0; i < count; i++) sum[r][i] += bias_[begin + i];
      put(sum[r], count, out + (to_ ? to_[r] : r) * n_ + begin);
    }
  }

  // All tiles of weight rows [begin, end), columns from d on, with G groups of x from g on; `then` is read after them.
  template <int G>
  void tiles(int64_t begin, int64_t end, int64_t d, int64_t g, const Sums& sums, bool fetches, const T* then) const {
    constexpr int kRows = tile_rows(G);
    const int64_t columns = std::min(kBlockWords * kPerWord, k_ - d);
    int64_t i = begin;
    for (; i + kRows <= end; i += kRows) {
      const T* next = !fetches ? nullptr : i + kRows < end ? weight_ + (i + kRows) * k_ + d : then;
      tile<kRows, G>(i, d, columns, g, sums, i - begin, next);
    }
    for (; i < end; i++) tile<1, G>(i, d, columns, g, sums, i - begin, nullptr);
  }

  // All groups of x, by columns that are copied once for all of them: a copy takes an eighth of the time of one tile's
  // products. A group's columns stay in the first-level cache while the chunk's tiles pass. The sums take the same steps.
  void panels(int64_t begin, int64_t end, const T* after, int64_t first, int64_t last, const Sums& sums) const {
    static thread_local std::vector<float> panel_of_thread;
    panel_of_thread.resize(kChunkRows * kCopyStride);
    float* panel = panel_of_thread.data();
    for (int64_t d = 0; d < std::max<int64_t>(k_, 1); d += kCopyColumns) {
      const int64_t columns = std::min(kCopyColumns, k_ - d);
      for (int64_t i = begin; i < end; i++) copy_row(weight_ + i * k_ + d, columns, panel + (i - begin) * kCopyStride);
      const T* next = d + kCopyColumns < k_ ? weight_ + begin * k_ + d + kCopyColumns : after;
      for (int64_t g = first; g < last;) {
        const int64_t left = last - g;
        const T* then = g == first ? next : nullptr;
        if (kMaxGroups == 4 && left >= 4) panel_tiles<kMaxGroups>(panel, end - begin, d, columns, g, sums, then), g += kMaxGroups;
        else if (left >= 2) panel_tiles<2>(panel, end - begin, d, columns, g, sums, then), g += 2;
        else panel_tiles<1>(panel, end - begin, d, columns, g, sums, then), g += 1;
      }
    }
  }

  // The tiles of a copied panel of `count` weight rows with G groups of x; the rows at `then` are read after it.
  template <int G>
  void panel_tiles(const float* panel, int64_t count, int64_t d, int64_t columns, int64_t g, const Sums& sums, const T* then) const {
    constexpr int kRows = tile_rows(G);
    int64_t i = 0;
    for (; i + kRows <= count; i += kRows) panel_tile<kRows, G>(panel, d, columns, g, sums, i, then);
    for (; i < count; i++) panel_tile<1, G>(panel, d, columns, g, sums, i, then);
  }

  template <int R, int G>
  void panel_tile(const float* panel, int64_t d, int64_t columns, int64_t g, const Sums& sums, int64_t row, const T* then) const {
    Vec sum[R][G];
    const float* x[G];
    for (int h = 0; h < G; h++) x[h] = x_ + ((g + h) * num_words_ + d / kPerWord) * kLanes;
    for (int i = 0; i < R; i++)
      for (int h = 0; h < G; h++) sum[i][h] = d == 0 ? Vec{} : load(sums.at(row + i, g + h));
    const T* next = then != nullptr && then + (row + R) * k_ <= weight_ + n_ * k_ ? then + row * k_ : nullptr;
    add<R, G>((const char*)(panel + row * kCopyStride), kCopyStride * int64_t(sizeof(float)), columns, x, next, sum);
    for (int i = 0; i < R; i++)
      for (int h = 0; h < G; h++) store(sums.at(row + i, g + h), sum[i][h]);
  }

  // As `panels`, for many groups. A copy is turned, in strips of kStripRows weight rows whose words lie side by side, column by
  // column: a tile then reads one stream from the second-level cache, which the processor fetches ahead by itself. The sums
  // take the same steps. Zeros stand for rows that are not there.
  void strips(int64_t begin, int64_t end, const T* after, int64_t first, int64_t last, const Sums& sums) const {
    static thread_local std::vector<float> strips_of_thread;
    strips_of_thread.resize(kChunkRows * kCopyColumns + kLanes);
    float* strips = strips_of_thread.data();
    const int64_t num_strips = (end - begin + kStripRows - 1) / kStripRows;
    for (int64_t d = 0; d < std::max<int64_t>(k_, 1); d += kCopyColumns) {
      const int64_t columns = std::min(kCopyColumns, k_ - d);
      for (int64_t s = 0; s < num_strips; s++) turn_strip(begin + s * kStripRows, end, d, columns, strips + s * kStripRows * kCopyColumns);
      const T* next = d + kCopyColumns < k_ ? weight_ + begin * k_ + d + kCopyColumns : after;
      for (int64_t g = first; g < last;) {
        const int64_t left = last - g;
        const T* then = g == first ? next : nullptr;
        if (left >= kMaxGroups) strip_tiles<kMaxGroups>(strips, num_strips, d, columns, g, sums, then), g += kMaxGroups;
        else strip_tiles<1>(strips, num_strips, d, columns, g, sums, then), g += 1;
      }
    }
  }

  // Column j of weight rows [begin, begin + kStripRows), up to `end`, to out + j * kStripRows. What a vector writes behind a
  // column, the next one writes over.
  void turn_strip(int64_t begin, int64_t end, int64_t d, int64_t columns, float* out) const {
    const int count = int(std::min<int64_t>(kStripRows, end - begin));
    const T* w = weight_ + begin * k_ + d;
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int here = int(std::min<int64_t>(kLanes, columns - j));
      Vec v[kLanes] = {};
      for (int i = 0; i < count; i++) v[i] = here == kLanes ? load(w + i * k_ + j) : load_first(w + i * k_ + j, here);
      transpose_square(v);
      for (int l = 0; l < here; l++) store(out + (j + l) * kStripRows, v[l]);
    }
  }

  // The tiles of all strips with G groups of x: two strips together where one would leave registers empty.
  template <int G>
  void strip_tiles(const float* strips, int64_t num_strips, int64_t d, int64_t columns, int64_t g, const Sums& sums, const T* then) const {
    constexpr int kTogether = G == 1 ? 2 : 1;
    int64_t s = 0;
    for (; s + kTogether <= num_strips; s += kTogether) strip_tile<kTogether, G>(strips, s, d, columns, g, sums, then);
    for (; s < num_strips; s++) strip_tile<1, G>(strips, s, d, columns, g, sums, then);
  }

  // Adds the products of S strips from `s` on; the first columns set the sums.
  template <int S, int G>
  void strip_tile(const float* strips, int64_t s, int64_t d, int64_t columns, int64_t g, const Sums& sums, const T* then) const {
    constexpr int R = S * kStripRows;
    constexpr int64_t kSize = kStripRows * kCopyColumns;
    const int64_t row = s * kStripRows;
    Vec sum[R][G];
    for (int i = 0; i < R; i++)
      for (int h = 0; h < G; h++) sum[i][h] = d == 0 ? Vec{} : load(sums.at(row + i, g + h));
    const float* w = strips + s * kSize;
    const float* x[G];
    for (int h = 0; h < G; h++) x[h] = x_ + ((g + h) * num_words_ + d / kPerWord) * kLanes;
    const T* next = then != nullptr && then + (row + R) * k_ <= weight_ + n_ * k_ ? then + row * k_ : nullptr;
    for (int64_t j = 0; j < columns; j += kWordsPerLine) {
      if (next != nullptr)
        for (int i = 0; i < R; i++) __builtin_prefetch(next + i * k_ + j, 0, 2);
      const int64_t here = std::min<int64_t>(kWordsPerLine, columns - j);
#pragma GCC unroll 4
      for (int64_t l = 0; l < here; l++) {
        Vec v[G];
#pragma GCC unroll 4
        for (int h = 0; h < G; h++) v[h] = load(x[h]), x[h] += kLanes;
#pragma GCC unroll 16
        for (int i = 0; i < R; i++) {
          const Vec word = splat_word<Vec>(w + i / kStripRows * kSize + i % kStripRows);
#pragma GCC unroll 4
          for (int h = 0; h < G; h++) sum[i][h] = fma(word, v[h], sum[i][h]);
        }
        w += kStripRows;
      }
    }
    for (int i = 0; i < R; i++)
      for (int h = 0; h < G; h++) store(sums.at(row + i, g + h), sum[i][h]);
  }

  // Adds the products of R weight rows from `begin` on; the first columns set the sums.
  template <int R, int G>
  void tile(int64_t begin, int64_t d, int64_t columns, int64_t g, const Sums& sums, int64_t row, const T* next) const {
    const T* w = weight_ + begin * k_ + d;
    Vec sum[R][G];
    for (int i = 0; i < R; i++)
      for (int h = 0; h < G; h++) sum[i][h] = d == 0 ? Vec{} : load(sums.at(row + i, g + h));
    const float* x[G];
    for (int h = 0; h < G; h++) x[h] = x_ + ((g + h) * num_words_ + d / kPerWord) * kLanes;
    if constexpr (kCopies) {
      alignas(64) float copy[R * kCopyStride];
      for (int64_t j = 0; j < columns; j += kCopyColumns) {
        const int64_t here = std::min(kCopyColumns, columns - j);
        for (int i = 0; i < R; i++) copy_row(w + i * k_ + j, here, copy + i * kCopyStride);
        add<R, G>((const char*)copy, kCopyStride * int64_t(sizeof(float)), here, x, next == nullptr ? nullptr : next + j, sum);
      }
    } else {
      add<R, G>((const char*)w, k_ * int64_t(sizeof(T)), columns, x, next, sum);
    }
    for (int i = 0; i < R; i++)
      for (int h = 0; h < G; h++) store(sums.at(row + i, g + h), sum[i][h]);
  }

  static void copy_row(const T* from, int64_t count, float* to) {
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) store(to + j, load(from + j));
    for (; j < count; j++) to[j] = to_float(from[j]);
  }

  // Adds the products of R rows of words, `stride` bytes apart, with G groups of x, whose pointers move on.
  template <int R, int G>
  void add(const char* w, int64_t stride, int64_t columns, const float* (&x)[G], const T* next, Vec (&sum)[R][G]) const {
    const char* rows[(R + 3) / 4];  // a pointer for four rows: more would not stay in registers
    for (int i = 0; i < R; i += 4) rows[i / 4] = w + i * stride;
    const auto step = [&](auto word_of) {
      Word v[G];
#pragma GCC unroll 4
      for (int h = 0; h < G; h++) v[h] = (Word)load(x[h]), x[h] += kLanes;
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        const Word word = word_of(rows[i / 4] + i % 4 * stride);
#pragma GCC unroll 4
        for (int h = 0; h < G; h++) P::accumulate(sum[i][h], word, v[h]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < (R + 3) / 4; i++) rows[i] += sizeof(float);
    };
    const int64_t words = columns / kPerWord;
    for (int64_t j = 0; j < words; j += kWordsPerLine) {
      if (next != nullptr)
        for (int i = 0; i < R; i++) __builtin_prefetch((const char*)(next + i * k_) + j * int64_t(sizeof(T)) * kPerWord, 0, 2);
      const int64_t here = std::min<int64_t>(kWordsPerLine, words - j);
      for (int64_t l = 0; l < here; l++) step(splat_word<Word>);
    }
    if (words * kPerWord < columns)  // half a word: what lies behind it is another row
      step([](const char* p) {
        uint16_t half;
        std::memcpy(&half, p, sizeof half);
        return (Word)(UVec{} + uint32_t(half));
      });
  }

  // Writes the sums of group g and `count` weight rows from i on, which are rows from `row` on of the chunk.
  template <class Out>
  void finish(const Sums& sums, int64_t g, int64_t i, int64_t row, int64_t count, Out* out) const {
    Vec v[kLanes] = {};
    for (int64_t j = 0; j < count; j++) v[j] = load(sums.at(row + j, g)) + (bias_ ? bias_[i + j] : 0.f);
    transpose_square(v);
    const int64_t begin = g * kLanes, rows = std::min<int64_t>(kLanes, rows_ - begin);
    for (int64_t r = begin; r < begin + rows; r++) put(v[r - begin], count, out + (to_ ? to_[r] : r) * n_ + i);
  }

  template <class Out>
  static void put(Vec v, int64_t count, Out* out) {
    if (count == kLanes) return store(out, v);
    Out all[kLanes];
    store(all, v);
    std::copy(all, all + count, out);
  }

  const float* x_;
  int64_t num_words_, rows_;
  const T* weight_;
  int64_t n_, k_;
  const float* bias_;
  const int32_t* to_;
};

}  // namespace tas

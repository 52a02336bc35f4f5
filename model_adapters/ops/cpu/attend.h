// Attention of a tile of query rows to one kv head of a paged context.
//
// Positions are taken in blocks of 64 from multiples of 64 on, whatever the page size: each block's keys are transposed and
// its values converted to float once for all rows of the tile, which meet them in tiles of registers. Softmax is the online
// one (Milakov and Gimelshein, 2018); at multiples of 512 positions it begins anew, and the spans are joined in order by
// their log-sum-exp, as in Flash-Decoding (Dao et al., 2023), so that they may be computed on several threads.
//
// What a row gets depends on nothing but the row and what it sees, to the last bit: every sum runs in one order over the
// positions, and a position, block or span that a row does not see leaves its sums as they are.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace tas {

constexpr int kBlock = 64;                    // positions per softmax step
constexpr int64_t kSpan = 8 * kBlock;         // positions after which sums begin anew
constexpr int kRowTile = 6;                   // rows whose accumulators are held in registers
constexpr int kWide = kManyRegisters ? 4 : 2; // vectors of each of them
constexpr int kBiasMargin = 16;               // zeros beside biases by distance: vectors reach over their ends
constexpr float kNone = -std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// A pool [num_pages, kv_heads, page, width], keys at [0, key_dim) and values at [value_begin, value_begin + value_dim) of each
// row: behind the keys, or columns of them. Or values are pages of their own, [num_pages, kv_heads, page, value_dim].
struct Shape {
  int64_t kv_heads, group, key_dim, value_dim, page, width, pages_per_seq, num_pages, value_begin;
  const void* values;  // the pages of values, or null
  bool has_own_values() const { return value_begin == key_dim; }
  int64_t used() const { return has_own_values() && !values ? key_dim + value_dim : key_dim; }  // of a row
  int64_t capacity() const { return page * pages_per_seq; }
};

// Query rows of one sequence and kv head: the `group` query heads of each of some consecutive tokens.
struct Tile {
  int64_t rows, group, position;     // of the first token
  int64_t start, end, prefix, window;  // visible: [start, end), of these those below `prefix` and the last `window`; 0: all
  const float* q;                    // [rows, num_words * kPerWord], zeros behind key_dim
  float scale, softcap;
  const float* alibi;                // [group] or null
  const int32_t* until;              // [rows / group], last position that a token sees if it is behind its own; or null
  const float* biases;               // of the first row; or null
  int64_t bias_stride, token_stride;  // of the biases: from a row to the next of its token, and from a token to the next
  int64_t offset;                     // rows of its page in front of position 0
  int64_t reach;                      // 0: biases are by position, up to the end of the last block; else of so many keys up to
                                      // the query's own, between kBiasMargin zeros on each side

  const float* biases_of(int64_t row) const { return biases + row / group * token_stride + row % group * bias_stride; }
  // Of kLanes positions from `first` on. All other keys than the last `reach` have none.
  Vec biases_at(int64_t row, int64_t first) const {
    const float* own = biases_of(row);
    if (reach == 0) return load(own + first);
    const int64_t i = first - at(row) + reach - 1;
    return i <= -kLanes || i >= reach ? Vec{} : load(own + kBiasMargin + i);
  }
  int64_t at(int64_t row) const { return position + row / group; }
  int64_t first(int64_t row) const { return window > 0 ? std::max(start, at(row) + 1 - window) : start; }
  int64_t last(int64_t row) const { return std::min((until ? std::max<int64_t>(at(row), until[row / group]) : at(row)) + 1, end); }
  // The largest `last` of the rows: that of the last one, unless an earlier one sees further.
  int64_t last_of(int64_t row_begin, int64_t row_end) const {
    int64_t most = last(row_end - 1);
    if (until)
      for (int64_t row = row_begin; row < row_end; row += group) most = std::max(most, last(row));
    return most;
  }
  bool sees(int64_t row_begin, int64_t row_end, int64_t begin, int64_t stop) const {
    return begin < prefix || (begin < last_of(row_begin, row_end) && stop > first(row_begin));
  }
};

// What a span of positions leaves: per row the largest score, the sum of exponentials, and the weighted values.
struct Sums {
  float *top, *total, *acc;  // [rows], [rows], [rows, padded(value_dim)]
  static int64_t size(int64_t rows, int64_t value_dim) { return rows * (2 + padded(value_dim)); }
  static Sums at(float* base, int64_t rows) { return {base, base + rows, base + 2 * rows}; }
  void clear(int64_t rows, int64_t value_dim) const {
    std::fill(top, top + rows, kNone);
    std::fill(total, acc + rows * padded(value_dim), 0.f);
  }
};

// Asks memory for the rows of the blocks that come next, a few lines of the cache at a time and in the order in which they
// lie, while another block is computed: pages lie anywhere, the hardware follows no list of them, and it takes only so many
// requests at once: what asks for too many waits, and so does what it has in the cache. So a block is asked for in even steps:
// of 16 bits, a quarter while keys are turned, half while they meet the queries, a quarter beside the values. Two blocks are
// known ahead, because one may be too short to be computed for as long as the next takes.
class Fetch {
 public:
  struct Rows {
    const char* const* begin;
    int count;
  };

  explicit Fetch(int64_t row_bytes) : row_bytes_(row_bytes) {}

  // Behind those that are not yet asked for, of one block at most.
  void add(const Rows& rows) {
    is_behind_ = rows_.count > 0;
    (is_behind_ ? behind_ : rows_) = rows;
  }

  void lines(int n) {
    for (; n > 0; n--) {
      if (rows_.count == 0 && is_behind_) take_behind();
      if (rows_.count == 0) return;
      ask();
    }
  }

  // What is left of those before the last that were added; of all.
  void all_but_last() {
    while (is_behind_) rows_.count > 0 ? ask() : take_behind();
  }
  void rest() { lines(std::numeric_limits<int>::max()); }

 private:
  void ask() {
    __builtin_prefetch(*rows_.begin + at_, 0, 2);
    if ((at_ += 64) >= row_bytes_) at_ = 0, rows_.begin++, rows_.count--;
  }
  void take_behind() { rows_ = behind_, is_behind_ = false; }

  Rows rows_{}, behind_{};
  bool is_behind_ = false;
  int64_t row_bytes_, at_ = 0;
};

// Numbers of T that share a 32-bit word. Keys are transposed by the word, as they are; products unpack them.
template <class T>
constexpr int64_t kPerWord = 4 / sizeof(T);

// Words of a key, and the row of floats that a query takes: zeros stand where a key ends within a word.
template <class T>
int64_t num_words(int64_t dim) { return (dim + kPerWord<T> - 1) / kPerWord<T>; }

// out[i][t] = word i of rows[t] for kLanes rows.
template <class T>
void transpose(const T* const* rows, int64_t dim, float* out, Fetch& fetch) {
  const int64_t words = num_words<T>(dim);
  for (int64_t i = 0; i < words; i += kLanes) {
    const int64_t d = i * kPerWord<T>;
    Vec v[kLanes];
    for (int t = 0; t < kLanes; t++) v[t] = load_words(rows[t] + d, (dim - d) * int64_t(sizeof(T)));
    fetch.lines(kLanes / 2);
    transpose_square(v);
    const int n = int(std::min<int64_t>(kLanes, words - i));
    if (n == kLanes)
      for (int j = 0; j < kLanes; j++) store(out + (i + j) * kBlock, v[j]);
    else
      for (int j = 0; j < n; j++) store(out + (i + j) * kBlock, v[j]);
  }
}

// scores[r][t] = q[r] . keys[t] for the first `count` keys of a transposed block, each product summed from the first dimension
// on; for further ones up to a whole number of vectors, too.
template <int R, class T>
void dot_keys(const float* keys, const float* q, int64_t words, int count, float* scores, Fetch& fetch) {
  for (int t = 0; t < count; t += kWide * kLanes) {
    Vec sum[R][kWide] = {};
    for (int64_t i = 0; i < words; i++) {
      fetch.lines(kWide * kLanes / 16);
      for (int j = 0; j < kPerWord<T>; j++) {
        Vec k[kWide];
        for (int w = 0; w < kWide; w++) k[w] = unpack<T>(load(keys + i * kBlock + t + w * kLanes), j);
        for (int r = 0; r < R; r++) {
          const Vec x = splat(q[(r * words + i) * kPerWord<T> + j]);
          for (int w = 0; w < kWide; w++) sum[r][w] = fma(x, k[w], sum[r][w]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int w = 0; w < kWide; w++) store(scores + r * kBlock + t + w * kLanes, sum[r][w]);
  }
}

// acc[r] = acc[r] * keep[r] + sum over t in [first, last) of weights[r][t] * values[t], for W vectors from `d` on.
template <int R, int W, bool kPartial, class T>
void add_values(const T* const* values, int first, int last, int64_t d, int64_t dim, const float* weights, const float* keep, float* acc, int64_t acc_stride, Fetch& fetch) {
  Vec sum[R][W];
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) sum[r][w] = load(acc + r * acc_stride + d + w * kLanes) * keep[r];
  for (int t = first; t < last; t++) {
    Vec v[W];
    const T* row = values[t] + d;
    fetch.lines(1);
    for (int w = 0; w < W; w++) v[w] = kPartial ? load_first(row, int(dim - d)) : load(row + w * kLanes);
    for (int r = 0; r < R; r++) {
      const Vec x = splat(weights[r * kBlock + t]);
      for (int w = 0; w < W; w++) sum[r][w] = fma(x, v[w], sum[r][w]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) store(acc + r * acc_stride + d + w * kLanes, sum[r][w]);
}

template <int R, class T>
void add_all_values(const T* const* values, int first, int last, int64_t dim, const float* weights, const float* keep, float* acc, int64_t acc_stride, Fetch& fetch) {
  int64_t d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes) add_values<R, kWide, false>(values, first, last, d, dim, weights, keep, acc, acc_stride, fetch);
  for (; d + kLanes <= dim; d += kLanes) add_values<R, 1, false>(values, first, last, d, dim, weights, keep, acc, acc_stride, fetch);
  if (d < dim) add_values<R, 1, true>(values, first, last, d, dim, weights, keep, acc, acc_stride, fetch);
}

// Turns one row's products with `count` positions of the block at `begin` into weights, in place; returns what the earlier
// sums are to be multiplied by. No row sees a position behind them. Not a template: one order of operations for all tiles.
inline float softmax_step(const Tile& tile, int64_t row, int64_t begin, int count, float* scores, float* top, float* total) {
  const int64_t first = tile.first(row) - begin, last = tile.last(row) - begin, prefix = tile.prefix - begin;
  const bool all_seen = (first <= 0 && last >= kBlock) || prefix >= kBlock;
  const float slope = tile.alibi ? tile.alibi[row % tile.group] : 0.f;
  Vec high = splat(*top);
  for (int t = 0; t < count; t += kLanes) {
    Vec s = load(scores + t) * tile.scale;
    if (tile.softcap != 0) s = tile.softcap * tanh(s / tile.softcap);
    if (tile.alibi) s += slope * __builtin_convertvector(int_iota() + int32_t(begin + t - tile.at(row)), Vec);
    if (tile.biases) s += tile.biases_at(row, begin + t);
    if (!all_seen) {
      const auto clip = [](int64_t n) { return IVec{} + int32_t(std::clamp<int64_t>(n, -1, kBlock + 1)); };
      const IVec i = int_iota() + t;
      s = ((i >= clip(first)) & (i < clip(last))) | (i < clip(prefix)) ? s : splat(kNone);
    }
    store(scores + t, s);
    high = max(high, s);
  }
  const float now = largest(high);
  const float base = now == kNone ? 0.f : now;  // nothing seen yet: keeps -inf - -inf out
  Vec sums = {};
  for (int t = 0; t < count; t += kLanes) {
    const Vec x = load(scores + t) - base;
    const Vec e = x < splat(-87.f) ? Vec{} : exp(x);  // exactly nothing for what is not seen
    store(scores + t, e);
    sums += e;
  }
  const float keep = *top == now ? 1.f : std::exp(*top - base);
  *top = now;
  *total = *total * keep + sum(sums);
  return keep;
}

// Where the rows of a block's positions lie, keys and values.
template <class T>
struct Block {
  const T *keys[kBlock], *values[kBlock];

  // Positions [begin + skipped, begin + known) of the page list; those before stand for the first of them, those behind for
  // the last.
  void find(const T* pool, const int32_t* pages, int64_t head, const Shape& shape, int64_t begin, int skipped, int known, int64_t offset) {
    for (int t = skipped; t < known;) {
      const int64_t at = begin + t, slot = at % shape.page;
      const int64_t page = std::clamp<int64_t>(pages[at / shape.page], 0, shape.num_pages - 1);
      const int64_t place = (page * shape.kv_heads + head) * shape.page + slot + offset;
      const T* row = pool + place * shape.width;
      const T* value = shape.values ? static_cast<const T*>(shape.values) + place * shape.value_dim : row + shape.value_begin;
      const int64_t step = shape.values ? shape.value_dim : shape.width;
      for (const int end = int(std::min<int64_t>(known, t + shape.page - slot)); t < end; t++, row += shape.width, value += step) keys[t] = row, values[t] = value;
    }
    for (const T** rows : {keys, values}) {
      std::fill(rows, rows + skipped, rows[skipped]);
      std::fill(rows + known, rows + kBlock, rows[known - 1]);
    }
  }

  Fetch::Rows rows(int known) const { return {(const char* const*)keys, known}; }
};

// What rows of a tile make of a block: scores[rows][kBlock], weights in the end, and what earlier sums are multiplied by.
struct Weights {
  float *scores, *keep;
};

template <int R, class T>
void weigh_rows(const Tile& tile, int64_t row, int64_t begin, int count, const float* keys, const Sums& sums, int64_t words, const Weights& weights, Fetch& fetch) {
  float* scores = weights.scores + row * kBlock;
  dot_keys<R, T>(keys, tile.q + row * words * kPerWord<T>, words, count, scores, fetch);
  for (int r = 0; r < R; r++) weights.keep[row + r] = softmax_step(tile, row + r, begin, count, scores + r * kBlock, sums.top + row + r, sums.total + row + r);
}

template <int R, class V>
void add_rows(const Tile& tile, int64_t row, int64_t begin, const V* const* values, int64_t value_dim, const Sums& sums, const Weights& weights, Fetch& fetch) {
  const float* scores = weights.scores + row * kBlock;
  float* keep = weights.keep + row;
  const int64_t acc_stride = padded(value_dim);
  const auto within = [&](int64_t n) { return int(std::clamp<int64_t>(n - begin, 0, kBlock)); };
  // What some of these rows see, in one or two runs: between them may lie anything, and 0 times anything may be NaN.
  int first = within(tile.first(row)), last = within(tile.last_of(row, row + R));
  const int prefix = within(tile.prefix);
  if (last <= first) first = last = prefix;
  float* acc = sums.acc + row * acc_stride;
  if (prefix > 0 && prefix < first) {
    add_all_values<R>(values, 0, prefix, value_dim, scores, keep, acc, acc_stride, fetch);
    std::fill(keep, keep + R, 1.f);
  } else if (prefix > 0) {
    first = 0, last = std::max(last, prefix);
  }
  add_all_values<R>(values, first, last, value_dim, scores, keep, acc, acc_stride, fetch);
}

// Calls f(count as a constant, row) for the groups of at most kRowTile rows that see some of the block.
template <class F>
void each_group(const Tile& tile, int64_t begin, const F& f) {
  for (int64_t row = 0; row < tile.rows;) {
    const int n = int(std::min<int64_t>(kRowTile, tile.rows - row));
    if (tile.sees(row, row + n, begin, begin + kBlock)) switch (n) {
        case 1: f(std::integral_constant<int, 1>{}, row); break;
        case 2: f(std::integral_constant<int, 2>{}, row); break;
        case 3: f(std::integral_constant<int, 3>{}, row); break;
        case 4: f(std::integral_constant<int, 4>{}, row); break;
        case 5: f(std::integral_constant<int, 5>{}, row); break;
        default: f(std::integral_constant<int, kRowTile>{}, row);
      }
    row += n;
  }
}

// All rows meet the keys before any meets the values: together these would not stay in a first-level cache of 32 KB.
template <class K, class V>
void attend_tile(const Tile& tile, int64_t begin, int count, const float* keys, const V* const* values, int64_t value_dim, const Sums& sums, int64_t words, const Weights& weights, Fetch& fetch) {
  each_group(tile, begin, [&](auto n, int64_t row) { weigh_rows<n, K>(tile, row, begin, count, keys, sums, words, weights, fetch); });
  each_group(tile, begin, [&](auto n, int64_t row) { add_rows<n>(tile, row, begin, values, value_dim, sums, weights, fetch); });
}

// A block of positions that a tile sees some of, with where their keys and values lie.
template <class T>
struct Visit {
  int64_t begin;
  int known;  // positions up to the last one that any row sees
  Block<T> block;
};

// The positions [begin, stop) of a tile, which lie in one span, block by block.
template <class T>
class Walk {
 public:
  Walk(const T* pool, const int32_t* pages, int64_t head, const Shape& shape, const Tile& tile, int64_t begin, int64_t stop)
      : pool_(pool), pages_(pages), head_(head), shape_(shape), tile_(tile), begin_(begin), stop_(stop),
        lowest_(tile.prefix > 0 ? 0 : tile.first(0)), highest_(std::max(tile.last_of(0, tile.rows), tile.prefix)) {
    if (highest_ <= lowest_) begin_ = stop_;
  }

  int skipped(int64_t begin) const { return int(std::clamp<int64_t>(lowest_ - begin, 0, kBlock - 1)); }

  // Finds the next block; false: there is none.
  bool next(Visit<T>& visit) {
    while (begin_ < stop_ && !tile_.sees(0, tile_.rows, begin_, begin_ + kBlock)) begin_ += kBlock;
    if (begin_ >= stop_) return false;
    visit.begin = begin_, visit.known = int(std::min<int64_t>(kBlock, highest_ - begin_));
    visit.block.find(pool_, pages_, head_, shape_, begin_, skipped(begin_), visit.known, tile_.offset);
    begin_ += kBlock;
    return true;
  }

 private:
  const T* pool_;
  const int32_t* pages_;
  int64_t head_;
  const Shape& shape_;
  const Tile& tile_;
  int64_t begin_, stop_, lowest_, highest_;
};

// The sums of a tile over a walk. `then` is asked for behind its blocks, as the first one of `walk` was by whoever came
// before.
template <class T>
void attend_span(Walk<T> walk, const Shape& shape, const Tile& tile, const Sums& sums, const Fetch::Rows& then) {
  static thread_local std::vector<float> scratch;
  const int64_t value_stride = padded(shape.value_dim);
  const int64_t words = num_words<T>(shape.key_dim);
  scratch.resize((words + value_stride + tile.rows) * kBlock + tile.rows);
  float* keys = scratch.data();
  float* converted = keys + words * kBlock;
  float* scores = converted + value_stride * kBlock;
  const Weights weights{scores, scores + tile.rows * kBlock};
  const float* converted_rows[kBlock];
  for (int t = 0; t < kBlock; t++) converted_rows[t] = converted + t * value_stride;
  sums.clear(tile.rows, shape.value_dim);
  Fetch fetch(shape.used() * int64_t(sizeof(T)));
  Visit<T> visits[3];  // what is computed, and two that come next
  const auto find = [&](int i) {
    const bool is_there = walk.next(visits[i % 3]);
    fetch.add(is_there ? visits[i % 3].block.rows(visits[i % 3].known) : then);
    return is_there;
  };
  bool is_left = walk.next(visits[0]), is_next = is_left && find(1);
  for (int i = 0; is_left; i++) {
    const bool is_behind = is_next && find(i + 2);
    const Visit<T>& visit = visits[i % 3];
    const Block<T>& block = visit.block;
    for (int t = 0; t < visit.known; t += kLanes) transpose(block.keys + t, shape.key_dim, keys + t, fetch);
    if (tile.rows <= kRowTile) {
      attend_tile<T>(tile, visit.begin, visit.known, keys, block.values, shape.value_dim, sums, words, weights, fetch);
    } else {
      for (int t = walk.skipped(visit.begin); t < visit.known; t++)
        for (int64_t d = 0; d < value_stride; d += kLanes)
          store(converted + t * value_stride + d, d + kLanes <= shape.value_dim ? load(block.values[t] + d) : load_first(block.values[t] + d, int(shape.value_dim - d)));
      attend_tile<T>(tile, visit.begin, visit.known, keys, converted_rows, shape.value_dim, sums, words, weights, fetch);
    }
    fetch.all_but_last();
    is_left = is_next, is_next = is_behind;
  }
  fetch.rest();
}

// Adds the sums of the next span to those before it. A span in which a row sees nothing changes nothing.
inline void join(const Sums& sums, const Sums& next, int64_t rows, int64_t value_dim) {
  const int64_t stride = padded(value_dim);
  for (int64_t r = 0; r < rows; r++) {
    const float now = std::max(sums.top[r], next.top[r]);
    if (now == kNone) continue;
    const float mine = std::exp(sums.top[r] - now), theirs = std::exp(next.top[r] - now);
    sums.top[r] = now;
    sums.total[r] = sums.total[r] * mine + next.total[r] * theirs;
    for (int64_t d = 0; d < stride; d += kLanes) store(sums.acc + r * stride + d, load(sums.acc + r * stride + d) * mine + load(next.acc + r * stride + d) * theirs);
  }
}

}  // namespace tas

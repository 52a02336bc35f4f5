// Attention on a paged cache with the write of the new tokens: runs of tokens of several sequences, or one token of each.
//
// A work item is (some consecutive tokens of a sequence, kv head), or one span of its positions where there are fewer items
// than threads; `attend.h` has what is done in it. Which thread takes which item, and how tokens are cut into items, changes
// no result. The new keys and values are written by the one item that sees them, or all before where there are several.
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "attend.h"
#include "parallel.h"
#include "repeated_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kTileRows = 16 * kRowTile;        // query rows that share one reading of keys and values
constexpr int64_t kProductsPerWorker = 512 << 10;  // less, a dozen microseconds, is not worth waking a thread for

// Numbers of any of the float types, by the row.
struct Rows {
  const void* data;
  ffi::DataType dtype;

  template <class T>
  const T* as() const { return static_cast<const T*>(data); }

  void read(int64_t begin, int64_t n, float* out) const {
    const auto convert = [&](const auto* x) {
      for (int64_t i = 0; i < n; i++) out[i] = to_float(x[begin + i]);
    };
    if (dtype == ffi::F32) convert(as<float>());
    else if (dtype == ffi::BF16) convert(as<bf16>());
    else convert(as<f16>());
  }
};

void write_rows(void* data, ffi::DataType dtype, int64_t begin, const float* row, int64_t n, float factor) {
  const auto convert = [&](auto* out) {
    for (int64_t i = 0; i < n; i++) from_float(row[i] * factor, out + begin + i);
  };
  if (dtype == ffi::F32) convert(static_cast<float*>(data));
  else if (dtype == ffi::BF16) convert(static_cast<bf16*>(data));
  else convert(static_cast<f16*>(data));
}

// As a pool has a number: one in 8 bits in steps of `scale`, to nearest, ties to even.
template <class T>
void put(float x, float, T* out) { from_float(x, out); }
void put(float x, float scale, int8_t* out) {
  const float steps = std::nearbyint(x / scale);
  *out = x != x ? 0 : int8_t(std::clamp(steps, -127.f, 127.f));
}
void put(float x, float scale, f8* out) { from_float(x != x ? 0.f : std::clamp(x / scale, -448.f, 448.f), out); }

struct Call {
  Rows q, k, v;
  const int32_t *page_table, *kv_lens, *cu_q_lens, *starts, *prefix_lens, *sees_until;  // the last four or null
  const float *sinks, *alibi, *k_scale, *v_scale, *biases;                             // or null
  void* out;
  int64_t num_tokens, num_seqs, query_heads, window, value_begin;  // the last -1: behind the keys
  int64_t bias_stride, bias_token_stride, bias_seq_stride;         // numbers from a query head, token or sequence to the next
  int64_t reach;                                                   // as of `Tile`
  int64_t sink_stride;                                             // query_heads: each token has sinks of its own; 0: all have the same
  bool reads_only;                                                 // pages have all keys: none is written
  bool is_dense;                                                   // all keys are one page, those of a sequence at its tokens
  bool sees_all;                                                   // each query sees all keys, and none has a position
  float scale, softcap;

  // Without cu_q_lens every sequence has one new token.
  int64_t begin(int64_t s) const { return cu_q_lens ? cu_q_lens[s] : s; }
  int64_t position(int64_t s, int64_t token) const { return int64_t(kv_lens[s]) + token - begin(sees_all ? s : s + 1); }
  // The tokens of a sequence that are there and have a position.
  int64_t first_token(int64_t s) const { return std::max<int64_t>({begin(s), sees_all ? 0 : begin(s + 1) - kv_lens[s], 0}); }
  int64_t last_token(int64_t s) const { return std::min(begin(s + 1), num_tokens); }
};

// Consecutive tokens of one sequence, and the positions that some of them see.
struct Piece {
  int64_t seq, token, count, lowest, highest;
  bool is_all;  // of the sequence's new tokens
  int64_t first_span() const { return lowest / kSpan; }
  int64_t num_spans() const { return std::max<int64_t>(1, (highest + kSpan - 1) / kSpan - first_span()); }
};

Tile tile_of(const Call& call, const Shape& shape, int64_t s, int64_t token, int64_t count) {
  Tile tile{};
  tile.rows = count * shape.group, tile.group = shape.group, tile.position = call.position(s, token);
  tile.start = call.starts ? std::max(call.starts[s], 0) : 0;
  tile.end = std::min<int64_t>(call.kv_lens[s], shape.capacity());
  tile.prefix = call.prefix_lens ? std::clamp<int64_t>(call.prefix_lens[s], 0, tile.end) : 0;
  tile.window = call.window, tile.softcap = call.softcap, tile.scale = call.scale;
  tile.offset = call.is_dense ? call.begin(s) : 0;
  tile.until = call.sees_until ? call.sees_until + token : nullptr;
  return tile;
}

std::vector<Piece> pieces_of(const Call& call, const Shape& shape) {
  const int64_t most = std::max<int64_t>(1, kTileRows / shape.group);
  std::vector<Piece> pieces;
  for (int64_t s = 0; s < call.num_seqs; s++)
    for (int64_t token = call.first_token(s); token < call.last_token(s); token += most) {
      const int64_t count = std::min(most, call.last_token(s) - token);
      const Tile tile = tile_of(call, shape, s, token, count);
      const int64_t highest = std::max(tile.last_of(0, tile.rows), tile.prefix);
      pieces.push_back({s, token, count, std::min(tile.prefix > 0 ? 0 : tile.first(0), highest), highest, count == call.last_token(s) - call.first_token(s)});
    }
  // The largest first: a thread that is left with one at the end keeps the others waiting.
  const auto work = [](const Piece& p) { return p.count * (p.highest - p.lowest); };
  std::stable_sort(pieces.begin(), pieces.end(), [&](const Piece& a, const Piece& b) { return work(a) > work(b); });
  return pieces;
}

template <class T>
class Attention {
 public:
  Attention(ffi::ThreadPool& threads, const Call& call, T* pool, const Shape& shape) : threads_(threads), call_(call), pool_(pool), shape_(shape) {}

  void run() {
    const std::vector<Piece> pieces = pieces_of(call_, shape_);
    clear_outputs(pieces);
    attend_all(pieces);
    repeat_last(pieces);
  }

 private:
  void attend_all(const std::vector<Piece>& pieces) {
    const int64_t heads = shape_.kv_heads, num_items = int64_t(pieces.size()) * heads;
    int64_t products = 0, most_spans = 1;
    for (const Piece& p : pieces) {
      products += p.count * call_.query_heads * (p.highest - p.lowest) * (shape_.key_dim + shape_.value_dim);
      most_spans = std::max(most_spans, p.num_spans());
    }
    const int64_t workers = std::min<int64_t>(threads_.num_threads(), 1 + products / kProductsPerWorker);
    const bool by_spans = workers > 1 && most_spans > 1 && num_items < 2 * workers;
    // An item that sees all new tokens of its sequence alone writes them itself, which keeps memory busy meanwhile.
    std::vector<const Piece*> before;
    for (const Piece& piece : pieces)
      if (by_spans || !piece.is_all) before.push_back(&piece);
    const int64_t num_before = int64_t(before.size()) * heads;
    parallel_for(threads_, num_before, num_before, [&](int64_t i, int64_t) { write(*before[i / heads], i % heads); });
    if (by_spans) return run_spans(pieces, workers);
    parallel_for(threads_, num_items, workers, [&](int64_t i, int64_t next_item) {
      const Piece& piece = pieces[i / heads];
      const int64_t head = i % heads, rows = piece.count * shape_.group;
      if (piece.is_all) write(piece, head);
      const Piece* next_piece = next_item < num_items ? &pieces[next_item / heads] : nullptr;
      static thread_local std::vector<float> scratch;
      scratch.resize(2 * Sums::size(rows, shape_.value_dim));
      const Sums sums = Sums::at(scratch.data(), rows), next = Sums::at(scratch.data() + Sums::size(rows, shape_.value_dim), rows);
      for (int64_t n = 0; n < piece.num_spans(); n++) {
        const Unit then = n + 1 < piece.num_spans() ? Unit{&piece, head, n + 1} : Unit{next_piece, next_item % heads, 0};
        attend({&piece, head, n}, n == 0 ? sums : next, then);
        if (n > 0) join(sums, next, rows, shape_.value_dim);
      }
      finish(piece, head, sums);
    });
  }

  // Padding behind the last token gets that one's result, so that the products that follow find equal rows.
  void repeat_last(const std::vector<Piece>& pieces) {
    int64_t count = 0;
    for (const Piece& p : pieces) count = std::max(count, p.token + p.count);
    if (call_.cu_q_lens && count != call_.cu_q_lens[call_.num_seqs]) return;  // tokens without a position are no padding
    const int64_t width = call_.query_heads * shape_.value_dim;
    if (call_.q.dtype == ffi::F32) repeat_last_row(threads_, static_cast<float*>(call_.out), count, call_.num_tokens, width);
    else repeat_last_row(threads_, static_cast<uint16_t*>(call_.out), count, call_.num_tokens, width);
  }

  void write(const Piece& piece, int64_t head) {
    if (call_.reads_only) return;
    for (int64_t token = piece.token; token < piece.token + piece.count; token++) write(piece.seq, token, head);
  }

  void write(int64_t s, int64_t token, int64_t head) {
    const int64_t position = call_.position(s, token);
    if (position >= shape_.capacity()) return;
    const int64_t page = call_.page_table[s * shape_.pages_per_seq + position / shape_.page];
    if (page < 0 || page >= shape_.num_pages) return;
    T* slot = pool_ + ((page * shape_.kv_heads + head) * shape_.page + position % shape_.page) * shape_.width;
    const int64_t at = token * shape_.kv_heads + head;
    store(call_.k, at * shape_.key_dim, shape_.key_dim, call_.k_scale ? call_.k_scale[head] : 1.f, slot);
    if (shape_.has_own_values()) store(call_.v, at * shape_.value_dim, shape_.value_dim, call_.v_scale ? call_.v_scale[head] : 1.f, slot + shape_.key_dim);
    std::fill(slot + shape_.used(), slot + shape_.width, T{});
  }

  static void store(const Rows& from, int64_t begin, int64_t n, float scale, T* out) {
    static thread_local std::vector<float> row;
    row.resize(n);
    from.read(begin, n, row.data());
    for (int64_t d = 0; d < n; d++) put(row[d], scale, out + d);
  }

  // Zeros for tokens before position 0, and for rows of length 0.
  void clear_outputs(const std::vector<Piece>& pieces) {
    const int64_t covered = std::accumulate(pieces.begin(), pieces.end(), int64_t{0}, [](int64_t n, const Piece& p) { return n + p.count; });
    const int64_t item = call_.q.dtype == ffi::F32 ? 4 : 2;
    if (covered < call_.num_tokens) std::memset(call_.out, 0, call_.num_tokens * call_.query_heads * shape_.value_dim * item);
  }

  // One piece and kv head, and the n-th span of what they see; no piece: nothing.
  struct Unit {
    const Piece* piece;
    int64_t head, span;
  };

  Walk<T> walk_of(const Unit& unit, const Tile& tile) const {
    const int64_t begin = (unit.piece->first_span() + unit.span) * kSpan;
    return {pool_, call_.page_table + unit.piece->seq * shape_.pages_per_seq, unit.head, shape_, tile, begin, std::min(begin + kSpan, unit.piece->highest)};
  }

  // The sums of a unit; what `then` begins with is asked for meanwhile.
  void attend(const Unit& unit, const Sums& sums, const Unit& then) const {
    static thread_local std::vector<float> queries;
    const Piece& piece = *unit.piece;
    const int64_t head = unit.head;
    Tile tile = tile_of(call_, shape_, piece.seq, piece.token, piece.count);
    if (call_.k_scale) tile.scale *= call_.k_scale[head];
    if (call_.alibi) tile.alibi = call_.alibi + head * shape_.group;
    if (call_.biases) {
      tile.reach = call_.reach, tile.bias_stride = call_.bias_stride, tile.token_stride = call_.bias_token_stride;
      tile.biases = call_.biases + piece.seq * call_.bias_seq_stride + piece.token * tile.token_stride + head * shape_.group * tile.bias_stride;
    }
    const int64_t stride = num_words<T>(shape_.key_dim) * kPerWord<T>;
    queries.assign(tile.rows * stride, 0.f);
    for (int64_t r = 0; r < tile.rows; r++)
      call_.q.read(((piece.token + r / shape_.group) * call_.query_heads + head * shape_.group + r % shape_.group) * shape_.key_dim, shape_.key_dim, &queries[r * stride]);
    tile.q = queries.data();
    Visit<T> first;
    Fetch::Rows rows{};
    if (then.piece != nullptr) {
      const Tile next = tile_of(call_, shape_, then.piece->seq, then.piece->token, then.piece->count);
      if (walk_of(then, next).next(first)) rows = first.block.rows(first.known);
    }
    attend_span(walk_of(unit, tile), shape_, tile, sums, rows);
  }

  // Each span of each item on whatever thread is free; then they are joined in order.
  void run_spans(const std::vector<Piece>& pieces, int64_t workers) {
    struct Part {
      Unit unit;
      int64_t offset;
    };
    std::vector<Part> parts;
    int64_t size = 0;
    for (const Piece& piece : pieces)
      for (int64_t head = 0; head < shape_.kv_heads; head++)
        for (int64_t n = 0; n < piece.num_spans(); n++) {
          parts.push_back({{&piece, head, n}, size});
          size += Sums::size(piece.count * shape_.group, shape_.value_dim);
        }
    std::vector<float> partials(size);
    const auto sums_of = [&](const Part& part) { return Sums::at(partials.data() + part.offset, part.unit.piece->count * shape_.group); };
    const int64_t num_parts = int64_t(parts.size());
    parallel_for(threads_, num_parts, workers, [&](int64_t i, int64_t next) {
      attend(parts[i].unit, sums_of(parts[i]), next < num_parts ? parts[next].unit : Unit{});
    });
    for (int64_t i = 0; i < num_parts;) {
      const Unit& first = parts[i].unit;
      const Sums sums = sums_of(parts[i]);
      for (i++; i < num_parts && parts[i].unit.span > 0; i++) join(sums, sums_of(parts[i]), first.piece->count * shape_.group, shape_.value_dim);
      finish(*first.piece, first.head, sums);
    }
  }

  // Takes the sink in (a logit without a value) and writes the rows of the result. No position seen: zeros.
  void finish(const Piece& piece, int64_t head, const Sums& sums) const {
    for (int64_t r = 0; r < piece.count * shape_.group; r++) {
      const int64_t query_head = head * shape_.group + r % shape_.group, token = piece.token + r / shape_.group;
      const float sink = call_.sinks ? call_.sinks[token * call_.sink_stride + query_head] : kNone, top = std::max(sums.top[r], sink);
      const float share = sums.top[r] == kNone ? 0.f : std::exp(sums.top[r] - top);
      const float total = sums.total[r] * share + (sink == kNone ? 0.f : std::exp(sink - top));
      const float factor = (total == 0 ? 0.f : share / total) * (call_.v_scale ? call_.v_scale[head] : 1.f);
      write_rows(call_.out, call_.q.dtype, (token * call_.query_heads + query_head) * shape_.value_dim, sums.acc + r * padded(shape_.value_dim), shape_.value_dim, factor);
    }
  }

  ffi::ThreadPool& threads_;
  const Call& call_;
  T* pool_;
  const Shape& shape_;
};

template <class T>
const T* data_or_null(ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<const T*>(buffer.untyped_data()) : nullptr;
}

Rows rows_of(ffi::AnyBuffer& buffer) { return {buffer.untyped_data(), buffer.element_type()}; }

// What all calls have in common; `pages` is the pool, of `dtype`.
ffi::Error attend_pages(ffi::ThreadPool& threads, const Call& call, const Shape& shape, ffi::DataType dtype, void* pages) {
  const auto start = [&](auto* pool) {
    Attention<std::remove_pointer_t<decltype(pool)>>(threads, call, pool, shape).run();
    return ffi::Error::Success();
  };
  switch (dtype) {
    case ffi::BF16: return start(static_cast<bf16*>(pages));
    case ffi::F16: return start(static_cast<f16*>(pages));
    case ffi::F32: return start(static_cast<float*>(pages));
    case ffi::S8: return start(static_cast<int8_t*>(pages));
    case ffi::F8E4M3FN: return start(static_cast<f8*>(pages));
    default: return ffi::Error::InvalidArgument("paged attention: no kernel for this dtype of the pool");
  }
}

void take_queries(Call& call, ffi::AnyBuffer& q, ffi::AnyBuffer& page_table, ffi::Result<ffi::AnyBuffer>& out) {
  call.q = rows_of(q), call.page_table = static_cast<const int32_t*>(page_table.untyped_data());
  call.out = out->untyped_data();
  call.num_tokens = q.dimensions()[0], call.num_seqs = page_table.dimensions()[0], call.query_heads = q.dimensions()[1];
}

void take_biases(Call& call, ffi::AnyBuffer& biases) {
  call.biases = data_or_null<float>(biases);
  if (call.biases) call.bias_stride = biases.dimensions()[2], call.bias_token_stride = biases.dimensions()[1] * call.bias_stride;
}

// Dtypes and shapes are checked by the caller in Python. Arrays of no element are arguments that are not there.
ffi::Error run(ffi::ThreadPool& threads, Call& call, ffi::AnyBuffer& q, ffi::AnyBuffer& k, ffi::AnyBuffer& v, ffi::AnyBuffer& pool, ffi::AnyBuffer& page_table,
               ffi::AnyBuffer& sinks, ffi::AnyBuffer& alibi, ffi::AnyBuffer& k_scale, ffi::AnyBuffer& v_scale, ffi::Result<ffi::AnyBuffer>& out, ffi::Result<ffi::AnyBuffer>& pool_out) {
  const auto qd = q.dimensions(), pd = pool.dimensions();
  take_queries(call, q, page_table, out);
  call.k = rows_of(k), call.v = rows_of(v);
  call.sinks = data_or_null<float>(sinks), call.sink_stride = sinks.dimensions().size() > 1 ? call.query_heads : 0, call.alibi = data_or_null<float>(alibi);
  call.k_scale = data_or_null<float>(k_scale), call.v_scale = data_or_null<float>(v_scale);
  const Shape shape{pd[1], qd[1] / pd[1], qd[2], v.dimensions()[2], pd[2], pd[3], page_table.dimensions()[1], pd[0], call.value_begin < 0 ? qd[2] : call.value_begin, nullptr};
  if (pool_out->untyped_data() != pool.untyped_data()) std::memcpy(pool_out->untyped_data(), pool.untyped_data(), pool.size_bytes());
  return attend_pages(threads, call, shape, pool.element_type(), pool_out->untyped_data());
}

// q[T, Hq, D] k[T, H, D] v[T, H, Dv] pool[P, H, page, W] page_table[S, pages_per_seq] kv_lens[S] cu_q_lens[S + 1]
// prefix_lens[S or 0] sees_until[T or 0] sinks[T, Hq or Hq or 0] alibi[Hq or 0] k_scale[H or 0] v_scale[H or 0]
// biases[T, Hq, a multiple of the block, or `reach` between margins; or 0] -> out[T, Hq, Dv], pool (aliased).
ffi::Error paged_attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer pool, ffi::AnyBuffer page_table, ffi::AnyBuffer kv_lens,
                           ffi::AnyBuffer cu_q_lens, ffi::AnyBuffer prefix_lens, ffi::AnyBuffer sees_until, ffi::AnyBuffer sinks, ffi::AnyBuffer alibi, ffi::AnyBuffer k_scale,
                           ffi::AnyBuffer v_scale, ffi::AnyBuffer biases, float scale, float softcap, int64_t window, int64_t value_begin, int64_t reach, ffi::Result<ffi::AnyBuffer> out,
                           ffi::Result<ffi::AnyBuffer> pool_out) {
  Call call{};
  call.kv_lens = data_or_null<int32_t>(kv_lens), call.cu_q_lens = data_or_null<int32_t>(cu_q_lens), call.prefix_lens = data_or_null<int32_t>(prefix_lens);
  call.sees_until = data_or_null<int32_t>(sees_until), call.reach = reach;
  take_biases(call, biases);
  call.scale = scale, call.softcap = softcap, call.window = window, call.value_begin = value_begin;
  return run(threads, call, q, k, v, pool, page_table, sinks, alibi, k_scale, v_scale, out, pool_out);
}

// The same for one new token of each of B sequences, with the first visible position of each: starts[B].
ffi::Error decode_attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer pool, ffi::AnyBuffer page_table, ffi::AnyBuffer lens,
                            ffi::AnyBuffer starts, ffi::AnyBuffer sinks, ffi::AnyBuffer alibi, ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale, ffi::AnyBuffer biases, float scale, float softcap,
                            int64_t window, int64_t value_begin, int64_t reach, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> pool_out) {
  Call call{};
  call.kv_lens = data_or_null<int32_t>(lens), call.starts = data_or_null<int32_t>(starts), call.reach = reach;
  call.scale = scale, call.softcap = softcap, call.window = window, call.value_begin = value_begin;
  take_biases(call, biases);
  return run(threads, call, q, k, v, pool, page_table, sinks, alibi, k_scale, v_scale, out, pool_out);
}

// One query of each of B sequences over keys[P, H, page, D] and values[P, H, page, Dv] that are stored: lens[B] of them, none
// behind the query. Nothing is written.
ffi::Error cross_attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer page_table, ffi::AnyBuffer lens, ffi::AnyBuffer biases,
                            float scale, float softcap, ffi::Result<ffi::AnyBuffer> out) {
  Call call{};
  take_queries(call, q, page_table, out);
  take_biases(call, biases);
  call.kv_lens = data_or_null<int32_t>(lens), call.scale = scale, call.softcap = softcap, call.reads_only = true;
  const auto kd = keys.dimensions();
  const Shape shape{kd[1], call.query_heads / kd[1], kd[3], values.dimensions()[3], kd[2], kd[3], page_table.dimensions()[1], kd[0], kd[3], values.untyped_data()};
  return attend_pages(threads, call, shape, keys.element_type(), keys.untyped_data());
}

// T queries of each of B sequences over keys[B, H, S, D] and values[B, H, S, Dv], dense ones: all of them, or with `causal`,
// for T = S, those up to their own. q[B, T, Hq, D] biases[B or 1, Hq or 1, T or 1, S up to the end of its last block; or 0]
// sinks[Hq or 0] -> out[B, T, Hq, Dv].
ffi::Error dense_attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer biases, ffi::AnyBuffer sinks, float scale, float softcap,
                            bool causal, ffi::Result<ffi::AnyBuffer> out) {
  const auto qd = q.dimensions(), kd = keys.dimensions(), bd = biases.dimensions();
  const int64_t num_seqs = qd[0], num_queries = qd[1];
  std::vector<int32_t> pages(num_seqs), lens(num_seqs, int32_t(kd[2])), begins(num_seqs + 1);
  for (int64_t s = 0; s < num_seqs; s++) pages[s] = int32_t(s), begins[s + 1] = int32_t((s + 1) * num_queries);
  Call call{};
  call.q = rows_of(q), call.out = out->untyped_data(), call.page_table = pages.data(), call.kv_lens = lens.data(), call.cu_q_lens = begins.data();
  call.num_tokens = num_seqs * num_queries, call.num_seqs = num_seqs, call.query_heads = qd[2];
  call.scale = scale, call.softcap = softcap, call.reads_only = true, call.sees_all = !causal;
  call.sinks = data_or_null<float>(sinks), call.biases = data_or_null<float>(biases);
  if (call.biases) {
    const auto stride = [&](int axis, int64_t numbers) { return bd[axis] == 1 ? 0 : numbers; };
    call.bias_stride = stride(1, bd[2] * bd[3]), call.bias_token_stride = stride(2, bd[3]);
    call.bias_seq_stride = stride(0, bd[1] * bd[2] * bd[3]) - num_queries * call.bias_token_stride;  // tokens are counted on
  }
  const Shape shape{kd[1], call.query_heads / kd[1], kd[3], values.dimensions()[3], kd[2], kd[3], 1, num_seqs, kd[3], values.untyped_data()};
  return attend_pages(threads, call, shape, keys.element_type(), keys.untyped_data());
}

// Texts of many lengths one after the other: q[T, Hq, D] keys[H, T, D] values[H, T, Dv] cu_seqlens[S + 1] sees_until[T or 0]
// sinks[Hq or 0] -> out[T, Hq, Dv]. Blocks of positions begin with the text, so that no other text changes a sum.
ffi::Error varlen_attention(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer cu_seqlens, ffi::AnyBuffer sees_until,
                            ffi::AnyBuffer sinks, float scale, float softcap, int64_t window, ffi::Result<ffi::AnyBuffer> out) {
  const auto qd = q.dimensions(), kd = keys.dimensions();
  const int64_t num_seqs = cu_seqlens.dimensions()[0] - 1;
  const auto* begins = static_cast<const int32_t*>(cu_seqlens.untyped_data());
  const std::vector<int32_t> pages(num_seqs, 0);
  std::vector<int32_t> lens(num_seqs);
  for (int64_t s = 0; s < num_seqs; s++) lens[s] = std::max(0, std::min<int32_t>(begins[s + 1], qd[0]) - begins[s]);
  Call call{};
  call.q = rows_of(q), call.out = out->untyped_data(), call.page_table = pages.data(), call.kv_lens = lens.data(), call.cu_q_lens = begins;
  call.num_tokens = qd[0], call.num_seqs = num_seqs, call.query_heads = qd[1];
  call.scale = scale, call.softcap = softcap, call.window = window, call.reads_only = true, call.is_dense = true;
  call.sees_until = data_or_null<int32_t>(sees_until), call.sinks = data_or_null<float>(sinks);
  const Shape shape{kd[0], call.query_heads / kd[0], kd[2], values.dimensions()[2], kd[1], kd[2], 1, 1, kd[2], values.untyped_data()};
  return attend_pages(threads, call, shape, keys.element_type(), keys.untyped_data());
}

}  // namespace
}  // namespace tas

#define TAS_ARGS_6 Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>
#define TAS_OPTIONS Attr<float>("scale").Attr<float>("softcap").Attr<int64_t>("window").Attr<int64_t>("value_begin").Attr<int64_t>("reach").Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_paged_attention, tas::paged_attention, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().TAS_ARGS_6().TAS_ARGS_6().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().TAS_OPTIONS());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_decode_attention, tas::decode_attention, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().TAS_ARGS_6().TAS_ARGS_6().TAS_OPTIONS());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_cross_attention, tas::cross_attention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().TAS_ARGS_6().Attr<float>("scale").Attr<float>("softcap").Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_dense_attention, tas::dense_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<bool>("causal")
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_varlen_attention, tas::varlen_attention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().TAS_ARGS_6().Attr<float>("scale").Attr<float>("softcap").Attr<int64_t>("window").Ret<ffi::AnyBuffer>());

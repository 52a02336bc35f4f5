// Copies between pages of a pool and dense arrays. Pools are written in place if they are donated.
//
// Writes may have more operands, which they do not read: what computes these runs before. XLA keeps a pool in place only if it
// can prove that all reads of it come first.
#include <cstring>

#include "rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kBytesPerChunk = 64 << 10, kBytesPerWorker = 256 << 10;

// The result's memory, which holds the pool.
char* in_place(ffi::AnyBuffer& pool, ffi::Result<ffi::AnyBuffer>& out) {
  char* to = (char*)out->untyped_data();
  if (to != (const char*)pool.untyped_data()) std::memcpy(to, pool.untyped_data(), pool.size_bytes());
  return to;
}

// pool[P, ...], pages[n], values[n, ...] -> pool. Pages outside of the pool are not written.
ffi::Error write_pages(ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> pages, ffi::AnyBuffer values, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t num_pages = pool.dimensions()[0], n = pages.dimensions()[0];
  if (values.element_type() != pool.element_type() || int64_t(values.dimensions()[0]) != n) return ffi::Error::InvalidArgument("write_pages: values must be of the dtype of the pool, one for each page");
  char* to = in_place(pool, out);
  if (n == 0 || num_pages == 0) return ffi::Error::Success();
  const int64_t page_bytes = pool.size_bytes() / num_pages;
  if (int64_t(values.size_bytes()) != n * page_bytes) return ffi::Error::InvalidArgument("write_pages: values must have the shape of pages");
  const char* from = (const char*)values.untyped_data();
  for (int64_t i = 0; i < n; ++i) {
    const int64_t page = pages.typed_data()[i];
    if (page >= 0 && page < num_pages) std::memcpy(to + page * page_bytes, from + i * page_bytes, page_bytes);
  }
  return ffi::Error::Success();
}

// pool[P, H, page, W], table[S, n], rows[T], positions[T], tokens[T, H, w] with w <= W -> pool. Token t is written at its
// position of row rows[t] of the table, with zeros behind w. What has no place there is not written.
ffi::Error write_tokens(ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::S32> positions, ffi::AnyBuffer tokens, ffi::RemainingArgs,
                        ffi::Result<ffi::AnyBuffer> out) {
  const auto pd = pool.dimensions(), td = table.dimensions(), kd = tokens.dimensions();
  const int64_t num_pages = pd[0], heads = pd[1], page = pd[2], num_tokens = rows.dimensions()[0];
  if (tokens.element_type() != pool.element_type() || int64_t(kd[0]) != num_tokens || int64_t(kd[1]) != heads || kd[2] > pd[3] || int64_t(positions.dimensions()[0]) != num_tokens)
    return ffi::Error::InvalidArgument("write_tokens: tokens must be [T, heads, at most the pool's width] of the dtype of the pool, with T rows and positions");
  char* to = in_place(pool, out);
  if (pool.element_count() == 0 || tokens.element_count() == 0) return ffi::Error::Success();
  const int64_t itemsize = pool.size_bytes() / pool.element_count(), row_bytes = pd[3] * itemsize, bytes = kd[2] * itemsize;
  const char* from = (const char*)tokens.untyped_data();
  for (int64_t t = 0; t < num_tokens; t++) {
    const int64_t row = rows.typed_data()[t], position = positions.typed_data()[t];
    if (row < 0 || row >= int64_t(td[0]) || position < 0 || position / page >= int64_t(td[1])) continue;
    const int64_t at = table.typed_data()[row * td[1] + position / page];
    if (at < 0 || at >= num_pages) continue;
    for (int64_t h = 0; h < heads; h++) {
      char* place = to + ((at * heads + h) * page + position % page) * row_bytes;
      std::memcpy(place, from + (t * heads + h) * bytes, bytes);
      std::memset(place + bytes, 0, row_bytes - bytes);
    }
  }
  return ffi::Error::Success();
}

// pool[P, H, page, W], table[S, n], lens[S] -> out[S, H, c, w] with c <= n * page: columns [first_column, first_column + w) of
// the first lens[s] positions of each row of the table, and zeros behind them.
ffi::Error read_tokens(ffi::ThreadPool threads, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> lens, ffi::Result<ffi::AnyBuffer> out, int64_t first_column) {
  const auto pd = pool.dimensions(), td = table.dimensions();
  const int64_t num_pages = pd[0], heads = pd[1], page = pd[2], num_rows = td[0], pages_per_row = td[1], width = out->dimensions()[3];
  if (int64_t(lens.dimensions()[0]) != num_rows) return ffi::Error::InvalidArgument("read_tokens: expected a length for each row of the table");
  if (first_column < 0 || first_column + width > int64_t(pd[3])) return ffi::Error::InvalidArgument("read_tokens: expected columns of the pool");
  if (out->element_count() == 0) return ffi::Error::Success();
  const int64_t itemsize = pool.size_bytes() / pool.element_count(), row_bytes = pd[3] * itemsize, bytes = width * itemsize;
  const char* from = (const char*)pool.untyped_data() + first_column * itemsize;
  char* to = (char*)out->untyped_data();
  const int64_t capacity = out->dimensions()[2];
  if (capacity > pages_per_row * page) return ffi::Error::InvalidArgument("read_tokens: expected no more positions than the rows of the table have");
  for_rows(threads, num_rows * heads, capacity * bytes, kBytesPerChunk, kBytesPerWorker, [&](int64_t i) {
    const int64_t s = i / heads, h = i % heads, known = std::clamp<int64_t>(lens.typed_data()[s], 0, capacity);
    char* place = to + i * capacity * bytes;
    for (int64_t begin = 0; begin < known; begin += page) {
      const int64_t at = std::clamp<int64_t>(table.typed_data()[s * pages_per_row + begin / page], 0, num_pages - 1), count = std::min(page, known - begin);
      const char* rows = from + (at * heads + h) * page * row_bytes;
      if (bytes == row_bytes) std::memcpy(place + begin * bytes, rows, count * bytes);
      else
        for (int64_t t = 0; t < count; t++) std::memcpy(place + (begin + t) * bytes, rows + t * row_bytes, bytes);
    }
    std::memset(place + known * bytes, 0, (capacity - known) * bytes);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_write_pages, tas::write_pages,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_write_tokens, tas::write_tokens,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_read_tokens, tas::read_tokens,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("first_column"));

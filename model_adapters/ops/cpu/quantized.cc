// x[rows, k] times a quantized matrix (quantized.h) transposed, or times one of several that each row names.
//
// Numbers of the matrix are taken apart in registers, never in memory. `meeting_of` chooses how rows meet them: rounded to
// int8, whose sums are exact, or as floats, which are summed in one order for any number of rows if `in_order`. Rows that name
// one matrix are a group: the matrix is read for all of them, and chunks of all groups are one loop, so that threads do not
// wait at the end of each.
#include <memory>

#include "dtypes.h"
#include "quantized.h"
#include "repeated_rows.h"
#include "routed_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

template <class T>
ffi::Error run_quantized(ffi::ThreadPool& threads, const T* x, int64_t rows, const QuantizedMatrix& matrix, int64_t act_group, bool in_order, const float* bias, T* out) {
  const int64_t count = num_distinct_rows(x, rows, matrix.k);
  QuantizedRows held(count, matrix, meeting_of<T>(matrix, act_group > 0 ? count : rows, act_group > 0, in_order));
  held.take(threads, x, act_group);
  const QuantizedProduct product(held, count, matrix, bias, out, QuantizedProduct::store_as<T>);
  parallel_for(threads, product.num_chunks(), num_workers(count, matrix.n, matrix.k, 1), [&](int64_t c, int64_t next) { product.run(c, next); });
  repeat_last_row(threads, out, count, rows, matrix.n);
  return ffi::Error::Success();
}

// Rows of one group and the product of them; numbers of chunks count on over all groups.
struct GroupProduct {
  GroupProduct(int64_t rows, const QuantizedMatrix& matrix, Meeting how, const float* bias, void* out, QuantizedProduct::Store store, const int32_t* to, int64_t first_chunk)
      : held(rows, matrix, how), product(held, rows, matrix, bias, out, store, to), first_chunk(first_chunk) {}
  QuantizedRows held;
  QuantizedProduct product;
  int64_t first_chunk;
};

template <class T>
ffi::Error run_routed(ffi::ThreadPool& threads, const T* x, int64_t rows_per_token, const int32_t* ids, int64_t tokens, int64_t choices, const QuantizedMatrix& first, int64_t num_matrices,
                      int64_t act_group, bool in_order, const float* bias, T* out) {
  const RoutedRows rows(x, rows_per_token, first.k, ids, tokens, choices, num_matrices);
  const int64_t scale_bytes = first.num_blocks() * first.num_groups() * kBlockRows * (first.is_half ? 2 : 4);
  std::vector<std::unique_ptr<GroupProduct>> groups;
  int64_t num_chunks = 0;
  for (const auto& [e, begin, count] : rows.groups) {
    QuantizedMatrix matrix = first;
    matrix.values += e * first.num_blocks() * first.block_bytes();
    matrix.scale = (const char*)first.scale + e * scale_bytes;
    if (first.offset) matrix.offset = (const char*)first.offset + e * scale_bytes;
    groups.push_back(std::make_unique<GroupProduct>(count, matrix, meeting_of<T>(matrix, count, act_group > 0, in_order), bias ? bias + e * first.n : nullptr, out, QuantizedProduct::store_as<T>,
                                                    rows.to.data() + begin, num_chunks));
    groups.back()->held.take(threads, x, act_group, rows.at.data() + begin);
    num_chunks += groups.back()->product.num_chunks();
  }
  const int64_t bytes = first.num_blocks() * first.block_bytes();
  parallel_for(threads, num_chunks, 1 + int64_t(groups.size()) * bytes / (1 << 18) + int64_t(rows.at.size()) * first.n * first.k / (1 << 23), [&](int64_t c, int64_t) {
    const auto behind = std::upper_bound(groups.begin(), groups.end(), c, [](int64_t at, const auto& group) { return at < group->first_chunk; });
    const GroupProduct& group = **std::prev(behind);
    group.product.run(c - group.first_chunk, c - group.first_chunk + 1);
  });
  rows.complete(threads, out, tokens, first.n);
  return ffi::Error::Success();
}

// The matrix, or the first of `num_matrices`, of buffers; an error if they do not fit together.
ffi::ErrorOr<QuantizedMatrix> matrix_of(ffi::AnyBuffer values, ffi::AnyBuffer scale, ffi::AnyBuffer offset, int64_t num_matrices, int64_t n, int64_t k, int64_t kind, int64_t zero, int64_t group,
                                        ffi::Span<const float> table) {
  const bool is_half = scale.element_type() == ffi::F16;
  const auto numbers = Numbers(kind);
  const int64_t num_blocks = (n + kBlockRows - 1) / kBlockRows, padded_k = int64_t(values.size_bytes()) * 8 / bits_of(numbers) / (num_matrices * num_blocks * kBlockRows);
  const QuantizedMatrix matrix{(const uint8_t*)values.untyped_data(), scale.untyped_data(), offset.element_count() ? offset.untyped_data() : nullptr, is_half, numbers, int(zero),
                               table.begin(), n, k, padded_k, group};
  if (!is_half && scale.element_type() != ffi::F32) return ffi::Unexpected(ffi::Error::InvalidArgument("quantized product: scales must be float16 or float32"));
  if (int64_t(scale.element_count()) != num_matrices * num_blocks * matrix.num_groups() * kBlockRows || padded_k < k || padded_k % 32 || table.size() != 16)
    return ffi::Unexpected(ffi::Error::InvalidArgument("quantized product: values and scales do not fit together"));
  return matrix;
}

// x[rows, k], values [n / 16, ...], scale and offset [n / 16, groups, 16] (offset and bias may be empty) -> out[rows, n].
// `numbers`: what they are, as `Numbers` counts. `zero`: what of an integer of 4 bits is 0. `group`: columns that share a scale. `act_group`: columns of x that are rounded with one scale; 0: x is not rounded.
// `in_order`: whether sums of rows that are not rounded have one order for any number of rows. `table`: the 16 numbers that those of kTable4 stand for; any others else.
ffi::Error quantized_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer bias,
                            ffi::Result<ffi::AnyBuffer> out, int64_t numbers, int64_t zero, int64_t group, int64_t act_group, bool in_order, ffi::Span<const float> table) {
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1], n = out->dimensions()[1];
  const auto matrix = matrix_of(values, scale, offset, 1, n, k, numbers, zero, group, table);
  if (matrix.has_error()) return matrix.error();
  const auto* added = bias.element_count() ? (const float*)bias.untyped_data() : nullptr;
  return with_float_type("quantized_linear", x, [&](const auto* from) { return run_quantized(threads, from, rows, *matrix, act_group, in_order, added, same_type(from, *out)); });
}

// The same for rows that name one of several matrices: x[T, k] or [T, choices, k], ids[T, choices], values [E, n / 16, ...], scale and offset [E, n / 16, groups, 16], bias [E, n] or empty
// -> out[T, choices, n]: zeros where an id is no matrix.
ffi::Error quantized_routed_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer ids, ffi::AnyBuffer values, ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer bias,
                                   ffi::Result<ffi::AnyBuffer> out, int64_t numbers, int64_t zero, int64_t group, int64_t act_group, bool in_order, ffi::Span<const float> table) {
  const auto xd = x.dimensions();
  const int64_t tokens = ids.dimensions()[0], choices = ids.dimensions()[1], rows_per_token = xd.size() == 3 ? xd[1] : 1, k = xd.back(), n = out->dimensions()[2];
  const int64_t num_matrices = values.dimensions()[0];
  const auto matrix = matrix_of(values, scale, offset, num_matrices, n, k, numbers, zero, group, table);
  if (matrix.has_error()) return matrix.error();
  const auto* chosen = (const int32_t*)ids.untyped_data();
  const auto* added = bias.element_count() ? (const float*)bias.untyped_data() : nullptr;
  return with_float_type("quantized_routed_linear", x, [&](const auto* from) {
    return run_routed(threads, from, rows_per_token, chosen, tokens, choices, *matrix, num_matrices, act_group, in_order, added, same_type(from, *out));
  });
}

}  // namespace
}  // namespace tas

#define TAS_QUANTIZED(name, function, ...)                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                        \
                                ffi::Ffi::Bind()                       \
                                    .Ctx<ffi::ThreadPool>()            \
                                    __VA_ARGS__                        \
                                    .Arg<ffi::AnyBuffer>()             \
                                    .Arg<ffi::AnyBuffer>()             \
                                    .Arg<ffi::AnyBuffer>()             \
                                    .Arg<ffi::AnyBuffer>()             \
                                    .Arg<ffi::AnyBuffer>()             \
                                    .Ret<ffi::AnyBuffer>()             \
                                    .Attr<int64_t>("numbers")          \
                                    .Attr<int64_t>("zero")             \
                                    .Attr<int64_t>("group")            \
                                    .Attr<int64_t>("act_group")        \
                                    .Attr<bool>("in_order")            \
                                    .Attr<ffi::Span<const float>>("table"))

TAS_QUANTIZED(tas_quantized_linear, tas::quantized_linear);
TAS_QUANTIZED(tas_quantized_routed_linear, tas::quantized_routed_linear, .Arg<ffi::AnyBuffer>());

// x[rows, k] times a quantized matrix (quantized.h) transposed, or groups of rows times one of several.
#include <memory>

#include "dtypes.h"
#include "quantized.h"
#include "repeated_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

template <class T>
ffi::Error run_quantized(ffi::ThreadPool& threads, const T* x, int64_t rows, const QuantizedMatrix& matrix, int64_t act_group, const float* bias, T* out) {
  const int64_t count = num_distinct_rows(x, rows, matrix.k);
  QuantizedRows held(count, matrix, words_for<T>(matrix, act_group > 0));
  held.take(threads, x, act_group);
  const QuantizedProduct product(held, count, matrix, bias, out, QuantizedProduct::store_as<T>);
  parallel_for(threads, product.num_chunks(), num_workers(count, matrix.n, matrix.k, 1), [&](int64_t c, int64_t next) { product.run(c, next); });
  repeat_last_row(threads, out, count, rows, matrix.n);
  return ffi::Error::Success();
}

// Rows of one group and the product of them; numbers of chunks count on over all groups.
struct GroupProduct {
  GroupProduct(int64_t rows, const QuantizedMatrix& matrix, Words words, void* out, QuantizedProduct::Store store, int64_t first_chunk)
      : held(rows, matrix, words), product(held, rows, matrix, nullptr, out, store), first_chunk(first_chunk) {}
  QuantizedRows held;
  QuantizedProduct product;
  int64_t first_chunk;
};

template <class T>
ffi::Error run_quantized_groups(ffi::ThreadPool& threads, const T* x, int64_t rows, const QuantizedMatrix& first, const int32_t* sizes, int64_t num_groups, int64_t act_group, T* out) {
  const int64_t scale_bytes = first.num_blocks() * first.num_groups() * kBlockRows * (first.is_half ? 2 : 4);
  std::vector<std::unique_ptr<GroupProduct>> groups;
  int64_t begin = 0, num_chunks = 0;
  for (int64_t g = 0; g < num_groups && begin < rows; g++) {
    const int64_t count = std::clamp<int64_t>(sizes[g], 0, rows - begin);
    if (count == 0) continue;
    QuantizedMatrix matrix = first;
    matrix.values += g * first.num_blocks() * first.block_bytes();
    matrix.scale = (const char*)first.scale + g * scale_bytes;
    if (first.offset) matrix.offset = (const char*)first.offset + g * scale_bytes;
    groups.push_back(std::make_unique<GroupProduct>(count, matrix, words_for<T>(matrix, act_group > 0), out + begin * first.n, QuantizedProduct::store_as<T>, num_chunks));
    groups.back()->held.take(threads, x + begin * first.k, act_group);
    num_chunks += groups.back()->product.num_chunks();
    begin += count;
  }
  std::fill(out + begin * first.n, out + rows * first.n, T{});
  parallel_for(threads, num_chunks, num_workers(begin, first.n, first.k, 1), [&](int64_t c, int64_t) {
    const auto behind = std::upper_bound(groups.begin(), groups.end(), c, [](int64_t at, const auto& group) { return at < group->first_chunk; });
    const GroupProduct& group = **std::prev(behind);
    group.product.run(c - group.first_chunk, c - group.first_chunk + 1);
  });
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
// `table`: the 16 numbers that those of kTable4 stand for; any others else.
ffi::Error quantized_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer bias,
                            ffi::Result<ffi::AnyBuffer> out, int64_t numbers, int64_t zero, int64_t group, int64_t act_group, ffi::Span<const float> table) {
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1], n = out->dimensions()[1];
  const auto matrix = matrix_of(values, scale, offset, 1, n, k, numbers, zero, group, table);
  if (matrix.has_error()) return matrix.error();
  const auto* added = bias.element_count() ? (const float*)bias.untyped_data() : nullptr;
  return with_float_type("quantized_linear", x, [&](const auto* from) { return run_quantized(threads, from, rows, *matrix, act_group, added, same_type(from, *out)); });
}

// The same for groups of rows, each with its matrix: group_sizes[E], values [E, n / 16, ...], scale and offset [E, n / 16, groups, 16]. Rows after the last group are zero.
ffi::Error quantized_grouped_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer group_sizes,
                                    ffi::Result<ffi::AnyBuffer> out, int64_t numbers, int64_t zero, int64_t group, int64_t act_group, ffi::Span<const float> table) {
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1], n = out->dimensions()[1], num_groups = group_sizes.dimensions()[0];
  const auto matrix = matrix_of(values, scale, offset, num_groups, n, k, numbers, zero, group, table);
  if (matrix.has_error()) return matrix.error();
  const auto* sizes = (const int32_t*)group_sizes.untyped_data();
  return with_float_type("quantized_grouped_linear", x, [&](const auto* from) {
    return run_quantized_groups(threads, from, rows, *matrix, sizes, num_groups, act_group, same_type(from, *out));
  });
}

}  // namespace
}  // namespace tas

#define TAS_QUANTIZED(name, function)                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                        \
                                ffi::Ffi::Bind()                       \
                                    .Ctx<ffi::ThreadPool>()            \
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
                                    .Attr<ffi::Span<const float>>("table"))

TAS_QUANTIZED(tas_quantized_linear, tas::quantized_linear);
TAS_QUANTIZED(tas_quantized_grouped_linear, tas::quantized_grouped_linear);

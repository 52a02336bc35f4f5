// Rows of x times the matrices that they name: the experts of a layer.
//
// Rows that name one matrix are a group (routed_rows.h): matrices that no row names are not read, the others for all their rows
// at once. Chunks of all groups are one loop, so that threads do not wait at the end of each. With `in_order` a row has the
// same bits whatever the other rows name.
#include <memory>

#include "column_product.h"
#include "dtypes.h"
#include "packed_product.h"
#include "routed_rows.h"
#include "row_product.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kNumbersPerWorker = 64 << 10;  // of x, that are copied before another thread is awake

struct Sizes {
  int64_t tokens, choices, rows_per_token, num_matrices, n, k;
};

// The products of all groups, each as `make` has it.
template <class Product, class T, class Out, class Make>
ffi::Error run(ffi::ThreadPool& threads, const RoutedRows& rows, Out* out, const Sizes& s, const Make& make) {
  const int64_t num_groups = rows.groups.size();
  std::vector<std::unique_ptr<Product>> products(num_groups);
  parallel_for(threads, num_groups, 1 + int64_t(rows.at.size()) * s.k / kNumbersPerWorker, [&](int64_t g, int64_t) { products[g] = make(rows.groups[g]); });
  std::vector<int64_t> first_chunks;
  int64_t num_chunks = 0, workers = 0;
  for (int64_t g = 0; g < num_groups; g++) {
    first_chunks.push_back(num_chunks);
    num_chunks += products[g]->num_chunks();
    workers += num_workers(rows.groups[g].count, s.n, s.k, sizeof(T));
  }
  parallel_for(threads, num_chunks, workers, [&](int64_t c, int64_t next) {
    const int64_t g = std::upper_bound(first_chunks.begin(), first_chunks.end(), c) - first_chunks.begin() - 1;
    products[g]->run(c - first_chunks[g], next - first_chunks[g], out);
  });
  rows.complete(threads, out, s.tokens, s.n);
  return ffi::Error::Success();
}

template <class Product, class T, class Out>
ffi::Error run_plain(ffi::ThreadPool& threads, const T* x, const int32_t* ids, const T* weight, const float* bias, Out* out, const Sizes& s, bool in_order) {
  const RoutedRows rows(x, s.rows_per_token, s.k, ids, s.tokens, s.choices, s.num_matrices);
  return run<Product, T>(threads, rows, out, s, [&](const RoutedRows::Group& group) {
    const float* added = bias ? bias + group.matrix * s.n : nullptr;
    const T* matrix = weight + group.matrix * s.n * s.k;
    return std::make_unique<Product>(nullptr, x, matrix, added, group.count, s.n, s.k, in_order, rows.at.data() + group.begin, rows.to.data() + group.begin);
  });
}

// x[T, K] or [T, choices, K], ids[T, choices], weight[E, N, K], or [E, K, N] if `is_input_major`, bias[E, N] or empty (float32)
// -> out[T, choices, N] of x's dtype or float32: zeros where an id is no matrix. Rows are summed in one order for any number of them if `in_order`.
ffi::Error routed_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer ids, ffi::AnyBuffer weight, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out, bool in_order,
                         bool is_input_major) {
  if (x.element_type() != weight.element_type() || (x.element_type() != out->element_type() && out->element_type() != ffi::F32))
    return ffi::Error::InvalidArgument("routed_linear: x and weight must have one dtype, and the result that one or float32");
  const auto wd = weight.dimensions();
  const int64_t rows_per_token = x.dimensions().size() == 3 ? x.dimensions()[1] : 1;
  const Sizes s{ids.dimensions()[0], ids.dimensions()[1], rows_per_token, wd[0], wd[is_input_major ? 2 : 1], wd[is_input_major ? 1 : 2]};
  const auto* chosen = (const int32_t*)ids.untyped_data();
  const auto* added = bias.element_count() ? (const float*)bias.untyped_data() : nullptr;
  return with_float_type("routed_linear", x, [&](const auto* from) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
    const T* matrices = same_type(from, weight);
    const auto call = [&](auto* to) {
      if (is_input_major) return run_plain<ColumnProduct<T>>(threads, from, chosen, matrices, added, to, s, in_order);
      return run_plain<RowProduct<T>>(threads, from, chosen, matrices, added, to, s, in_order);
    };
    return out->element_type() == ffi::F32 ? call((float*)out->untyped_data()) : call((T*)out->untyped_data());
  });
}

#if defined(TAS_PACKS)
// Rows of x times a packed matrix.
class PackedRows {
 public:
  PackedRows(const bf16* x, int64_t count, const Packed& packed, const float* bias, const int32_t* at, const int32_t* to)
      : held_(nullptr, x, count, packed.k, PackedProduct::lanes(count), at), product_(held_, count, packed, packed.n, bias, to) {}

  int64_t num_chunks() const { return product_.num_chunks(); }

  void run(int64_t c, int64_t next, bf16* out) const { product_.run(c, next, out); }

 private:
  HeldRows<bf16> held_;
  PackedProduct product_;
};

// The same of bfloat16 and a packed stack, groups[E, N / 16, K / 8, 192] and its index: always in one order.
ffi::Error packed_routed_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer ids, ffi::AnyBuffer groups, ffi::AnyBuffer index, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out) {
  const Packed packed = packed_of(groups, index);
  const int64_t num_matrices = groups.dimensions()[0], rows_per_token = x.dimensions().size() == 3 ? x.dimensions()[1] : 1;
  const Sizes s{ids.dimensions()[0], ids.dimensions()[1], rows_per_token, num_matrices, packed.n / num_matrices, packed.k};
  const auto* from = (const bf16*)x.untyped_data();
  const auto* added = bias.element_count() ? (const float*)bias.untyped_data() : nullptr;
  const RoutedRows rows(from, s.rows_per_token, s.k, (const int32_t*)ids.untyped_data(), s.tokens, s.choices, num_matrices);
  return run<PackedRows, bf16>(threads, rows, (bf16*)out->untyped_data(), s, [&](const RoutedRows::Group& group) {
    const Packed matrix = packed.rows(group.matrix * s.n, s.n);
    return std::make_unique<PackedRows>(from, group.count, matrix, added ? added + group.matrix * s.n : nullptr, rows.at.data() + group.begin, rows.to.data() + group.begin);
  });
}
#else
ffi::Error packed_routed_linear(ffi::ThreadPool, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  return ffi::Error::Internal("packed weights are not for this processor");
}
#endif

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_packed_routed_linear, tas::packed_routed_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_routed_linear, tas::routed_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("in_order")
                                  .Attr<bool>("is_input_major"));

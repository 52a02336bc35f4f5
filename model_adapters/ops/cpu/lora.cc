// Products of rows with the low-rank matrices of their adapters, added to the rows of another product.
//
// A row is computed by itself, in an order that the sizes alone decide: it is the same to the last bit whatever other rows
// and adapters come along. Only the matrices of adapters that rows name are read.
#include <vector>

#include "dtypes.h"
#include "repeated_rows.h"
#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

constexpr int64_t kProductsPerWorker = 64 << 10;  // fewer are done before another thread is awake
constexpr int kRows = 4;      // of A at once: each number of x is loaded once for them
constexpr int kVectors = 8;   // of the result at once: each stays in a register for all rows of B

template <class T>
struct Lora {
  const T* x;          // [rows, in]
  const T* sums;       // [rows, out]
  const int32_t* ids;  // [rows]; 0: no adapter
  const T* a;          // [adapters, rank, in]
  const T* b;          // [adapters, rank, out]
  T* out;              // [rows, out], which may be `sums`
  int64_t num_in, num_out, rank, num_adapters;

  void row(int64_t r) const {
    const T* from = sums + r * num_out;
    T* to = out + r * num_out;
    const int64_t adapter = ids[r] - 1;
    if (adapter < 0 || adapter >= num_adapters) {
      if (to != from) std::memcpy(to, from, num_out * sizeof(T));
      return;
    }
    std::vector<float> hidden(rank);
    const T* own_a = a + adapter * rank * num_in;
    int64_t j = 0;
    for (; j + kRows <= rank; j += kRows) dots<kRows>(x + r * num_in, own_a + j * num_in, hidden.data() + j);
    for (; j < rank; j++) dots<1>(x + r * num_in, own_a + j * num_in, hidden.data() + j);
    const T* own_b = b + adapter * rank * num_out;
    int64_t i = 0;
    for (; i + kVectors * kLanes <= num_out; i += kVectors * kLanes) add<kVectors>(from + i, own_b + i, hidden.data(), to + i);
    for (; i + kLanes <= num_out; i += kLanes) add<1>(from + i, own_b + i, hidden.data(), to + i);
    if (i == num_out) return;
    const int rest = int(num_out - i);
    Vec sum = {};
    for (j = 0; j < rank; j++) sum = fma(load_first(own_b + i + j * num_out, rest), splat(hidden[j]), sum);
    store_first(to + i, load_first(from + i, rest) + sum, rest);
  }

 private:
  template <int kNum>
  void dots(const T* row, const T* rows, float* result) const {
    Vec sums[kNum][2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= num_in; i += 2 * kLanes)
      for (int half = 0; half < 2; half++) {
        const Vec v = load(row + i + half * kLanes);
        for (int n = 0; n < kNum; n++) sums[n][half] = fma(v, load(rows + n * num_in + i + half * kLanes), sums[n][half]);
      }
    for (; i < num_in; i += kLanes) {
      const int count = int(std::min<int64_t>(kLanes, num_in - i));
      const Vec v = load_first(row + i, count);
      for (int n = 0; n < kNum; n++) sums[n][0] = fma(v, load_first(rows + n * num_in + i, count), sums[n][0]);
    }
    for (int n = 0; n < kNum; n++) result[n] = sum(sums[n][0] + sums[n][1]);
  }

  template <int kNum>
  void add(const T* from, const T* rows, const float* hidden, T* to) const {
    Vec sums[kNum] = {};
    for (int64_t j = 0; j < rank; j++)
      for (int n = 0; n < kNum; n++) sums[n] = fma(load(rows + j * num_out + n * kLanes), splat(hidden[j]), sums[n]);
    for (int n = 0; n < kNum; n++) store(to + n * kLanes, load(from + n * kLanes) + sums[n]);
  }
};

template <class T>
int64_t num_distinct(const Lora<T>& lora, int64_t rows) {
  const int64_t count = std::max(num_distinct_rows(lora.x, rows, lora.num_in), num_distinct_rows(lora.sums, rows, lora.num_out));
  return std::max(count, num_distinct_rows(lora.ids, rows, 1));
}

template <class T>
ffi::Error run(ffi::ThreadPool& threads, const Lora<T>& lora, int64_t rows) {
  const int64_t count = num_distinct(lora, rows);
  const int64_t workers = 1 + count * lora.rank * (lora.num_in + lora.num_out) / kProductsPerWorker;
  parallel_for(threads, count, workers, [&](int64_t r, int64_t) { lora.row(r); });
  repeat_last_row(threads, lora.out, count, rows, lora.num_out);
  return ffi::Error::Success();
}

ffi::Error lora(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer sums, ffi::AnyBuffer ids, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> out) {
  const auto same = [&](const auto& part) { return part.element_type() == x.element_type(); };
  if (!same(sums) || !same(a) || !same(b) || !same(*out) || ids.element_type() != ffi::S32) return ffi::Error::InvalidArgument("lora: all must have the dtype of x, and ids int32");
  return with_float_type("lora", x, [&](const auto* from) {
    const Lora<std::decay_t<decltype(*from)>> all{from, same_type(from, sums), (const int32_t*)ids.untyped_data(), same_type(from, a), same_type(from, b),
                                                  same_type(from, *out), x.dimensions()[1], sums.dimensions()[1], a.dimensions()[1], a.dimensions()[0]};
    return run(threads, all, x.dimensions()[0]);
  });
}

}  // namespace
}  // namespace tas

// x[rows, in], sums[rows, out], ids[rows], a[adapters, rank, in], b[adapters, rank, out] -> out[rows, out].
XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_lora, tas::lora,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

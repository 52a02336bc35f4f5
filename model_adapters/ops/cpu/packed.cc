// Products with packed weights, and packing and unpacking them; nothing of it where the processor does not pack.
#include "packed_product.h"
#include "packer.h"
#include "repeated_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

#if defined(TAS_PACKS)
constexpr int64_t kNumbersPerUnpacker = 1 << 15;  // less is taken apart before another thread is awake

ffi::Error packed_linear(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer groups, ffi::AnyBuffer index, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out) {
  const Packed packed = packed_of(groups, index);
  const auto* from = (const bf16*)x.untyped_data();
  auto* to = (bf16*)out->untyped_data();
  const int64_t rows = x.dimensions()[0], n = out->dimensions()[1], count = num_distinct_rows(from, rows, packed.k);
  const HeldRows<bf16> held(&threads, from, count, packed.k, PackedProduct::lanes(count));
  const PackedProduct product(held, count, packed, n, bias.element_count() ? (const float*)bias.untyped_data() : nullptr);
  parallel_for(threads, product.num_chunks(), num_workers(count, packed.n, packed.k, sizeof(bf16)), [&](int64_t c, int64_t next) { product.run(c, next, to); });
  repeat_last_row(threads, to, count, rows, n);
  return ffi::Error::Success();
}

ffi::Error unpack_weight(ffi::ThreadPool threads, ffi::AnyBuffer groups, ffi::AnyBuffer index, ffi::Result<ffi::AnyBuffer> out) {
  const Packed packed = packed_of(groups, index);
  const PackedWeights weights(packed);
  auto* words = (float*)out->untyped_data();
  const int64_t stride = packed.k / 2;
  parallel_for(threads, packed.num_blocks(), num_workers(0, packed.n, packed.k, sizeof(bf16)), [&](int64_t block, int64_t next) {
    float* rows = words + block * kGroupRows * stride;
    weights.walk<1>(block, {block + 1, next}, [&](int64_t w, const auto& take) {
      float turned[kGroupWords][kGroupRows];
      for (int strip = 0; strip < kStrips; strip++) {
        Vec v[kGroupWords];
        take(0, strip, v);
        for (int j = 0; j < kGroupWords; j++) store(turned[j] + strip * kLanes, v[j]);
      }
      for (int r = 0; r < kGroupRows; r++)
        for (int j = 0; j < kGroupWords; j++) std::memcpy(rows + r * stride + w + j, &turned[j][r], sizeof(float));
    });
  });
  return ffi::Error::Success();
}
// Rows ids[t] of the matrix -> out[t, k]. A row is taken apart with the fifteen of its block, some microseconds in all.
ffi::Error unpack_rows(ffi::ThreadPool threads, ffi::Buffer<ffi::S32> ids, ffi::AnyBuffer groups, ffi::AnyBuffer index, ffi::Result<ffi::AnyBuffer> out) {
  const Packed packed = packed_of(groups, index);
  const PackedWeights weights(packed);
  auto* words = (float*)out->untyped_data();
  const int64_t rows = ids.element_count(), stride = packed.k / 2;
  parallel_for(threads, rows, 1 + rows * packed.k / kNumbersPerUnpacker, [&](int64_t t, int64_t) {
    const int64_t id = std::clamp<int64_t>(ids.typed_data()[t], 0, packed.n - 1), block = id / kGroupRows, row = id % kGroupRows;
    weights.walk<1>(block, {block + 1, block + 1}, [&](int64_t w, const auto& take) {
      Vec v[kGroupWords];
      take(0, int(row / kLanes), v);
      for (int j = 0; j < kGroupWords; j++) words[t * stride + w + j] = v[j][row % kLanes];
    });
  });
  return ffi::Error::Success();
}
#else
ffi::Error unpack_rows(ffi::ThreadPool, ffi::Buffer<ffi::S32>, ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  return ffi::Error::Internal("packed weights are not for this processor");
}
ffi::Error packed_linear(ffi::ThreadPool, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  return ffi::Error::Internal("packed weights are not for this processor");
}
ffi::Error unpack_weight(ffi::ThreadPool, ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Internal("packed weights are not for this processor"); }
#endif

}  // namespace
}  // namespace tas

// Whether products with packed weights are faster here than with weights as they are.
extern "C" int tas_packs() {
#if defined(TAS_PACKS)
  return 1;
#else
  return 0;
#endif
}

// Packs weight[n, k] (n of whole 16s, k of whole 8s): table[16], groups[n / 16, k / 8, 192], first[n / 16 + 1], and the list,
// at[most] and list[most, 256]. Returns how many groups go to the list; more than `most` are not written.
extern "C" int64_t tas_pack(const uint16_t* weight, int64_t n, int64_t k, int64_t most, uint8_t* table, uint8_t* groups, int32_t* first, int32_t* at, uint8_t* list) {
#if defined(TAS_PACKS)
  tas::Packer::choose_table(weight, n, k, table);
  return tas::Packer(weight, n, k, table).pack(groups, first, most, at, list);
#else
  return most + 1;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_packed_linear, tas::packed_linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_unpack, tas::unpack_weight,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_unpack_rows, tas::unpack_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

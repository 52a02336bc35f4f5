// Writes whole pages into a pool, in place if the pool is donated.
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tas {
namespace {

// pool[P, ...], pages[n], values[n, ...] -> pool. Pages outside of the pool are not written.
ffi::Error write_pages(ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> pages, ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t num_pages = pool.dimensions()[0], n = pages.dimensions()[0];
  if (values.element_type() != pool.element_type() || int64_t(values.dimensions()[0]) != n) return ffi::Error::InvalidArgument("write_pages: values must be of the dtype of the pool, one for each page");
  char* to = (char*)out->untyped_data();
  if (to != (const char*)pool.untyped_data()) std::memcpy(to, pool.untyped_data(), pool.size_bytes());
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

}  // namespace
}  // namespace tas

XLA_FFI_DEFINE_HANDLER_SYMBOL(tas_write_pages, tas::write_pages,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

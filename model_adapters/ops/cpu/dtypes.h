// From the dtype of a buffer to the C++ type of its numbers.
#pragma once
#include <string>

#include "simd.h"
#include "xla/ffi/api/ffi.h"

namespace tas {

// Calls run(numbers) with a pointer to the numbers of x, which are bfloat16, float16 or float32. The error names `op`.
template <class Run>
xla::ffi::Error with_float_type(const char* op, const xla::ffi::AnyBuffer& x, const Run& run) {
  switch (x.element_type()) {
    case xla::ffi::BF16: return run(static_cast<const bf16*>(x.untyped_data()));
    case xla::ffi::F16: return run(static_cast<const f16*>(x.untyped_data()));
    case xla::ffi::F32: return run(static_cast<const float*>(x.untyped_data()));
    default: return xla::ffi::Error::InvalidArgument(std::string(op) + ": x must be bfloat16, float16 or float32");
  }
}

// The numbers of a buffer as those of another one, whose dtype it has.
template <class T>
T* same_type(const T*, const xla::ffi::AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

}  // namespace tas

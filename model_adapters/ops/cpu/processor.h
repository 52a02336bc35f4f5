// What processor this is, where measurements differ and no instruction tells.
#pragma once
#if defined(__x86_64__) && defined(__AVX512F__)
#include <cpuid.h>
#endif
#include <cstring>

namespace tas {

// AMD's family 19h with AVX-512, which Zen 3 of the same family has not.
inline bool is_zen4() {
#if defined(__x86_64__) && defined(__AVX512F__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return false;
  char vendor[12];
  std::memcpy(vendor, &ebx, 4), std::memcpy(vendor + 4, &edx, 4), std::memcpy(vendor + 8, &ecx, 4);
  if (std::memcmp(vendor, "AuthenticAMD", 12) != 0 || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  return (eax >> 8 & 0xf) + (eax >> 20 & 0xff) == 0x19;
#else
  return false;
#endif
}

}  // namespace tas

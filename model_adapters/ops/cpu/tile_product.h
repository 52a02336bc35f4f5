// Products of bfloat16 in the tile registers of Intel's servers (AMX): 16 rows of 32 numbers times 16 columns of 32, summed in
// float.
//
// With weights [N, K] a tile of 16 weight rows is the left factor as it lies, and x, turned as `HeldRows` does it, the right
// one. Each output is a sum over K from front to back, for any number of rows; the order within a step of 32 is the
// processor's, so that other products give other bits.
#pragma once
#include <algorithm>
#include <cstdint>

#include "product.h"
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TAS_TILES
#endif

namespace tas {

#if defined(TAS_TILES)
// Linux gives a process the tile registers when it asks for them.
inline bool tiles_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return allowed;
}

constexpr int kTileRows = 16, kTileNumbers = 32;  // 64 bytes

// Tile registers by number. GCC 12's intrinsics take no template argument, and do not say that they read memory.
template <int kTile>
void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
void store_tile(void* rows) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(int64_t(64)), "i"(kTile) : "memory");
}
template <int kSums, int kLeft, int kRight>
void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kRight), "i"(kLeft), "i"(kSums));
}

// Of sums, 0 to 3.
inline void zero_tiles() { asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::); }

// The thread's tiles have their full size while this lives.
class TileRegisters {
 public:
  TileRegisters() {
    alignas(64) uint8_t config[64] = {1};  // the palette
    for (int t = 0; t < 8; t++) config[16 + 2 * t] = 64, config[48 + t] = kTileRows;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileRegisters() { asm volatile("tilerelease" ::); }
};

inline void store_numbers(Vec v, int64_t count, bf16* out) {
  if (count >= kLanes) return store(out, v);
  store_first(out, v, int(count));
}
inline void store_numbers(Vec v, int64_t count, float* out) {
  if (count >= kLanes) return store(out, v);
  store_first(out, v, int(count));
}
#else
inline bool tiles_allowed() { return false; }
#endif

// x[rows, K] weight[N, K] -> [rows, N].
template <class T>
class TileProduct {
 public:
  static constexpr bool kIsThere = false;
  int64_t num_chunks() const { return 0; }
  template <class Out>
  void run(int64_t, int64_t, Out*) const {}
};

#if defined(TAS_TILES)
template <>
class TileProduct<bf16> {
 public:
  static constexpr bool kIsThere = true;

  TileProduct(xla::ffi::ThreadPool* threads, const bf16* x, int64_t rows, const bf16* weight, int64_t n, int64_t k, const float* bias, const int32_t* at, const int32_t* to)
      : x_(threads, x, rows, k, kTileRows, at), rows_(rows), weight_(weight), n_(n), k_(k), bias_(bias), to_(to) {}

  int64_t num_chunks() const { return (n_ + chunk_rows() - 1) / chunk_rows(); }

  // out[r][i] for all rows and the weight rows i of chunk c; `next` is the chunk that this thread takes after it.
  //
  // Many rows of x are taken in blocks that stay in the second-level cache over all weight rows of the chunk, which are more then.
  template <class Out>
  void run(int64_t c, int64_t next, Out* out) const {
    const TileRegisters registers;
    const int64_t begin = c * chunk_rows(), end = std::min(n_, begin + chunk_rows()), num_groups = (rows_ + kTileRows - 1) / kTileRows;
    for (int64_t block = 0; block < num_groups; block += kBlockGroups) {
      const int64_t block_end = std::min(num_groups, block + kBlockGroups);
      for (int64_t i = begin; i < end; i += 2 * kTileRows) {
        const int64_t after = i + 2 * kTileRows < end ? i + 2 * kTileRows : next * chunk_rows();
        const bf16* then = block == 0 && after + 2 * kTileRows <= n_ ? weight_ + after * k_ : nullptr;
        for (int64_t g = block; g < block_end; g += 2, then = nullptr) {
          if (g + 1 < block_end) tiles<2>(i, g, then, out);
          else tiles<1>(i, g, then, out);
        }
      }
    }
  }

 private:
  static constexpr int64_t kBlockGroups = 16;  // of x: 256 rows

  int64_t chunk_rows() const { return rows_ > kBlockGroups * kTileRows ? 256 : 64; }

  // The outputs of two tiles of weight rows from i on and G of x from g on; weights at `then` are read after these.
  template <int G, class Out>
  void tiles(int64_t i, int64_t g, const bf16* then, Out* out) const {
    zero_tiles();
    const float *x0 = x_.data() + g * x_.num_words * kTileRows, *x1 = x0 + x_.num_words * kTileRows;
    for (int64_t d = 0; d < k_; d += kTileNumbers, x0 += kWords, x1 += kWords) {
      load_weights<4>(i, d);
      load_weights<5>(i + kTileRows, d);
      load_tile<6>(x0, 64);
      multiply_tiles<0, 4, 6>();
      multiply_tiles<1, 5, 6>();
      if constexpr (G == 2) {
        load_tile<7>(x1, 64);
        multiply_tiles<2, 4, 7>();
        multiply_tiles<3, 5, 7>();
      }
      if (then != nullptr)
        for (int j = 0; j < 2 * kTileRows; j++) __builtin_prefetch(then + j * k_ + d, 0, 2);
    }
    finish<0>(i, g, out);
    finish<1>(i + kTileRows, g, out);
    if constexpr (G == 2) {
      finish<2>(i, g + 1, out);
      finish<3>(i + kTileRows, g + 1, out);
    }
  }

  // Tile `kTile` with the weight rows from i on, columns from d on; zeros where there are none.
  template <int kTile>
  void load_weights(int64_t i, int64_t d) const {
    if (i + kTileRows <= n_ && d + kTileNumbers <= k_) {
      load_tile<kTile>(weight_ + i * k_ + d, k_ * sizeof(bf16));
      return;
    }
    alignas(64) bf16 part[kTileRows * kTileNumbers] = {};
    const int64_t count = std::min<int64_t>(kTileNumbers, k_ - d);
    for (int64_t j = 0; j < std::min<int64_t>(kTileRows, n_ - i); j++) std::copy_n(weight_ + (i + j) * k_ + d, count, part + j * kTileNumbers);
    load_tile<kTile>(part, 64);
  }

  // Writes tile `kTile` of sums, [weight rows][rows of x].
  template <int kTile, class Out>
  void finish(int64_t i, int64_t g, Out* out) const {
    const int64_t count = std::min<int64_t>(kTileRows, n_ - i), begin = g * kTileRows, end = std::min(rows_, begin + kTileRows);
    if (count <= 0) return;
    alignas(64) float sums[kTileRows * kLanes];
    store_tile<kTile>(sums);
    Vec v[kLanes];
    for (int64_t j = 0; j < kLanes; j++) v[j] = load(sums + j * kLanes) + (bias_ && j < count ? bias_[i + j] : 0.f);
    transpose_square(v);
    for (int64_t r = begin; r < end; r++) store_numbers(v[r - begin], count, out + (to_ ? to_[r] : r) * n_ + i);
  }

  static constexpr int64_t kWords = kTileRows * kTileRows;  // of x, in a tile

  HeldRows<bf16, PairsOfBf16> x_;
  int64_t rows_;
  const bf16* weight_;
  int64_t n_, k_;
  const float* bias_;
  const int32_t* to_;
};
#endif

}  // namespace tas

// A parallel loop on XLA's own threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace tas {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Calls f(i, next) for every i in [0, num_items), on at most `max_workers` threads, the caller among them; returns when all
// are done. `next` is what the same thread does after i, or num_items and more: it may be fetched meanwhile.
//
// The caller waits for items that another thread has begun, never for a task that is still queued: a pool whose threads are
// all inside such calls therefore always gets on, with one thread as well. A task that starts late finds no item left and
// touches nothing but the shared counters.
template <class F>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t num_items, int64_t max_workers, const F& f) {
  const int64_t workers = std::min({num_items, max_workers, pool.num_threads()});
  if (workers <= 1) {
    for (int64_t i = 0; i < num_items; i++) f(i, i + 1);
    return;
  }
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  const F* body = &f;
  auto work = [progress, body, num_items] {
    const auto take = [&] { return progress->next.fetch_add(1, std::memory_order_relaxed); };
    for (int64_t i = take(), next; i < num_items; i = next) {
      next = take();
      (*body)(i, next);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t w = 1; w < workers; w++) pool.Schedule(decltype(work)(work));
  work();
  for (int spins = 0; progress->done.load(std::memory_order_acquire) < num_items; spins++) {
    if (spins < 4096) relax();
    else std::this_thread::yield();
  }
}

}  // namespace tas

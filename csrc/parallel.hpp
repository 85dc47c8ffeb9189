// Runs loops on the threads of PyTorch's own operators, so that the two never compete
// for cores.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace das {

// Calls body(i) for i in [0, count). The OpenMP runtime is looked up in the process,
// not linked: PyTorch loads its own, and the threads of a second one would compete with
// it. Without one, or with threads < 2, the loop is serial.
template <typename Body>
void parallel_for(int64_t count, int threads, const Body& body) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto parallel =
      reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t count;
    int64_t chunk;
    const Body& body;
  };
  // About eight chunks a thread, so that threads end at about the same time.
  const int64_t chunk = count / (8 * (threads > 0 ? threads : 1)) + 1;
  Shared shared{{0}, count, chunk, body};
  const auto work = [](void* p) {
    auto& s = *static_cast<Shared*>(p);
    for (;;) {
      const int64_t begin = s.next.fetch_add(s.chunk);
      if (begin >= s.count) return;
      const int64_t end = std::min(s.count, begin + s.chunk);
      for (int64_t i = begin; i < end; ++i) s.body(i);
    }
  };
  if (parallel && threads > 1)
    parallel(work, &shared, static_cast<unsigned>(threads), 0);
  else
    work(&shared);
}

}  // namespace das

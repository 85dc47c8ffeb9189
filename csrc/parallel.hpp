// Runs loops on the threads of PyTorch's own operators, so that the two never compete
// for cores.
#pragma once

#include <dlfcn.h>

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
    int64_t count, chunk;
    const Body& body;
  } shared{{0}, count, count / (8 * (threads > 0 ? threads : 1)) + 1, body};
  const auto work = [](void* p) {
    auto& s = *static_cast<Shared*>(p);
    for (int64_t begin; (begin = s.next.fetch_add(s.chunk)) < s.count;)
      for (int64_t i = begin; i < s.count && i < begin + s.chunk; ++i) s.body(i);
  };
  if (parallel && threads > 1)
    parallel(work, &shared, static_cast<unsigned>(threads), 0);
  else
    work(&shared);
}

}  // namespace das

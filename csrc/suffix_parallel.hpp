// Runs independent items of work on as many threads as the caller asks for.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace das {

// Calls function(item) for every item below `count`, and returns when all are done: it does not wait for threads that
// have not begun by then. If items fail, one of the failures is rethrown.
template <class Function>
void parallel(size_t count, size_t threads, const Function& function) {
  struct Shared {
    std::atomic<size_t> next{0};
    std::mutex mutex;
    std::condition_variable done;
    size_t left;
    std::exception_ptr failure;
  };
  const auto shared = std::make_shared<Shared>();
  shared->left = count;
  const auto work = [shared, count, &function] {  // `function` is there as long as an item is left
    for (size_t i; (i = shared->next++) < count;) {
      std::exception_ptr failure;
      try {
        function(i);
      } catch (...) {
        failure = std::current_exception();
      }
      const std::lock_guard<std::mutex> lock(shared->mutex);
      if (failure) shared->failure = failure;
      if (!--shared->left) shared->done.notify_one();
    }
  };
  for (size_t worker = 1; worker < std::min(threads, count); ++worker) std::thread(work).detach();
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->done.wait(lock, [&] { return !shared->left; });
  if (shared->failure) std::rethrow_exception(shared->failure);
}

}  // namespace das

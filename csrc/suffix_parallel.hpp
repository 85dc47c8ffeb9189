// Runs independent items of work on as many threads as the caller asks for and the system gives.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace das {

// Calls function(item) for every item below `count`. If items fail, one of the failures is rethrown when all threads
// are done.
template <class Function>
void parallel(size_t count, size_t threads, Function&& function) {
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failing;
  const auto work = [&] {
    try {
      for (size_t i; (i = next++) < count;) function(i);
    } catch (...) {
      next = count;
      const std::lock_guard<std::mutex> lock(failing);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  try {
    for (size_t worker = 1; worker < std::min(threads, count); ++worker) others.emplace_back(work);
  } catch (const std::exception&) {  // the system gives no more of them: those that there are do all the work
  }
  work();
  for (auto& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace das

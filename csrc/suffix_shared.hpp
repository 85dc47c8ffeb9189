// The suffix index as several threads use it.
#pragma once

#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "suffix_index.hpp"

namespace das {

// Any thread may call, with or without Python's lock: calls wait for each other, and
// never for Python. This is the only way to an index that threads share.
class SharedIndex {
 public:
  explicit SharedIndex(bool others = true) : index_(others) {}
  ~SharedIndex() {
    finish();
    if (desk_) desk_->close();
  }

  // Returns call(index), when all calls before are done.
  template <class Call>
  auto use(Call&& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    finish();
    return call(index_);
  }

  // Begins call(index) in a thread; all later calls wait for it, and make it themselves
  // if the thread has not begun. `check(index)` is called at once, and may throw.
  // `wake`: whether the thread is woken, which takes as long as a draft or two; else
  // the next call makes it.
  template <class Check, class Call>
  std::shared_future<void> begin(Check&& check, bool wake, Call call) {
    return use([&](SuffixIndex& index) {
      check(index);
      if (!desk_) start();
      Work work([&index, call = std::move(call)]() mutable { call(index); });
      begun_ = work.get_future().share();
      desk_->put(std::move(work), wake);
      return begun_;
    });
  }

 private:
  using Work = std::packaged_task<void()>;

  // Where work lies until somebody does it: the thread, which is there as long as the
  // desk is open, or a caller that waits for the work.
  struct Desk {
    std::mutex mutex;
    std::condition_variable changed;
    Work work;
    bool open = true;

    void put(Work next, bool wake) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        work = std::move(next);
      }
      if (wake) changed.notify_one();
    }

    void close() {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        open = false;
      }
      changed.notify_one();
    }

    // Returns the work that nobody has begun; empty: there is none.
    Work remove() {
      const std::lock_guard<std::mutex> lock(mutex);
      return std::move(work);
    }

    void serve() {
      std::unique_lock<std::mutex> lock(mutex);
      for (;;) {
        changed.wait(lock, [this] { return work.valid() || !open; });
        if (!open) return;
        Work begun = std::move(work);
        lock.unlock();
        begun();
        lock.lock();
      }
    }
  };

  void start() {
    desk_ = std::make_shared<Desk>();
    try {
      std::thread([desk = desk_] { desk->serve(); }).detach();
    } catch (const std::system_error&) {
      // The system gives no thread: the caller that waits does the work.
    }
  }

  void finish() {
    if (!begun_.valid()) return;
    Work work = desk_->remove();
    if (work.valid()) work();
    std::exchange(begun_, {}).wait();
  }

  std::mutex mutex_;
  SuffixIndex index_;
  std::shared_ptr<Desk> desk_;
  std::shared_future<void> begun_;
};

}  // namespace das

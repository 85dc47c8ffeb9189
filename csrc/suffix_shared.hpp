// The suffix index as several threads use it.
#pragma once

#include <future>
#include <mutex>
#include <utility>
#include <vector>

#include "suffix_index.hpp"

namespace das {

// Any thread may call, with or without Python's lock: calls wait for each other, and never for Python. This is the only
// way to an index that threads share.
class SharedIndex {
 public:
  using Drafts = std::vector<SuffixIndex::Draft>;

  // Returns call(index), when all calls before are done.
  template <class Call>
  auto use(Call&& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (drafting_.valid()) std::exchange(drafting_, {}).wait();
    return call(index_);
  }

  // Begins draft(index), in a thread or, if `deferred`, where somebody waits for it; all later calls wait for it.
  // `check(index)` is called at once, and may throw.
  template <class Check, class Draft>
  std::shared_future<Drafts> begin(bool deferred, Check&& check, Draft draft) {
    return use([&](SuffixIndex& index) {
      check(index);
      const auto how = deferred ? std::launch::deferred : std::launch::async;
      drafting_ = std::async(how, [&index, draft = std::move(draft)] { return draft(index); }).share();
      return drafting_;
    });
  }

 private:
  std::mutex mutex_;
  SuffixIndex index_;
  std::shared_future<Drafts> drafting_;  // goes first: it waits
};

}  // namespace das

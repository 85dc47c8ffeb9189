// Threads that use one index at the same time, to be run under ThreadSanitizer; see
// tests/unit/test_native.py.
//
// Each of them does as in an engine: requests are opened, extended, drafted for and
// closed, problems are read for a device, guests come and go, and a newer generation is
// mapped.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <numeric>
#include <thread>

#include "suffix_shared.hpp"

namespace {

using namespace das;
constexpr uint64_t kProblems = 6;
constexpr uint64_t kGuests = 3;  // they follow the problems
constexpr size_t kTokens = 60;
constexpr size_t kRequests = 18;

void write(SuffixIndex& index, uint64_t first, uint64_t count, int64_t version) {
  for (uint64_t problem = first; problem < first + count; ++problem) {
    std::vector<Token> text(kTokens);
    for (size_t i = 0; i < text.size(); ++i)
      text[i] = static_cast<Token>((problem + i * i + version) % 11);
    index.add(problem, text.data(), text.size(), version);
  }
  index.seal(8, 0, UINT64_MAX);
}

// Opens requests, drafts for them in the thread of the index or where the next call
// comes, and closes them.
void draft(SharedIndex& shared, int rounds, std::atomic<int>& failures) {
  const Token text[] = {1, 2, 3, 5, 8};
  for (int round = 0; round < rounds; ++round) {
    std::vector<int64_t> handles;
    for (uint64_t i = 0; i < kRequests; ++i)
      handles.push_back(shared.use([&](SuffixIndex& index) {
        return index.open(i % (kProblems + kGuests), text, 3, text, 2);
      }));
    const std::vector<int64_t> budgets(handles.size(), 6);
    const auto check = [&](const SuffixIndex& index) {
      index.check_open(handles.data(), handles.size());
    };
    std::vector<SuffixIndex::Draft> drafts;
    const auto done = shared.begin(
        check, round % 2, [handles, budgets, &text, &drafts](SuffixIndex& index) {
          for (int64_t handle : handles) index.extend(handle, text, 5);
          drafts = index.draft(handles.data(), budgets.data(), handles.size(), 0);
        });
    for (size_t i = 0; i < handles.size(); ++i)  // what was begun before comes first
      shared.use([&](SuffixIndex& index) { index.close(handles[i], (round + i) % 2); });
    done.get();
    failures += drafts.size() != handles.size();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  const auto folder = std::filesystem::temp_directory_path() /
                      ("das-threads-" + std::to_string(getpid()));
  const std::string store = folder / "store", guests = folder / "guests";
  std::filesystem::create_directories(store);
  SuffixIndex writer, other;
  writer.attach(store, true);
  write(writer, 0, kProblems, 0);
  writer.publish(false);
  write(other, kProblems, kGuests, 0);
  SuffixIndex::Ids all;
  for (uint64_t problem = 0; problem < kProblems + kGuests; ++problem)
    all.insert(problem);
  other.give(guests, all);

  SharedIndex shared;
  shared.use([&](SuffixIndex& index) { index.attach(store, false); });
  std::atomic<int> failures{0}, going{4};
  const auto working = [&](auto&& work) {
    return std::thread([&, work] {
      for (int round = 0; round < rounds; ++round) work(round);
      --going;
    });
  };
  std::vector<std::thread> threads;
  for (int again = 0; again < 2; ++again)
    threads.emplace_back([&] {
      draft(shared, rounds, failures);
      --going;
    });
  threads.push_back(working([&](int round) {
    for (uint64_t problem : {round % kProblems, kProblems + round % kGuests}) {
      const auto history =
          shared.use([&](const SuffixIndex& index) { return index.history(problem); });
      const auto flat = SuffixIndex::flat(history, UINT64_MAX, true);
      failures += problem < kProblems ? flat.places.size() < kTokens
                                      : flat.places.size() % kTokens != 0;
    }
  }));
  threads.push_back(working([&](int) {
    shared.use([&](SuffixIndex& index) { index.map_guest_history(guests); });
    shared.use([](SuffixIndex& index) { index.clear_live(); });
  }));
  for (int version = 1; going; ++version) {  // a weight sync, and what an operator sees
    if (version <= 8) {
      write(writer, 0, kProblems, version);
      writer.publish(false);
    }
    shared.use([](SuffixIndex& index) { index.refresh(0); });
    failures += shared.use([](const SuffixIndex& index) {
      return index.problem_count();
    }) < kProblems;
    shared.use([](const SuffixIndex& index) { return index.live_bytes(); });
  }
  for (auto& thread : threads) thread.join();
  std::filesystem::remove_all(folder);
  std::printf("%d rounds, %d failures\n", rounds, failures.load());
  return failures ? 1 : 0;
}

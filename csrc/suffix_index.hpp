// Suffix index of a run: per problem its sealed history and the requests that are being answered now.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "suffix_draft.hpp"
#include "suffix_live.hpp"
#include "suffix_segment.hpp"

namespace das {

class SuffixIndex {
 public:
  SuffixIndex(uint32_t max_depth, double half_life);
  SuffixIndex(const SuffixIndex&) = delete;  // requests point into it
  SuffixIndex& operator=(const SuffixIndex&) = delete;

  void add(uint64_t problem, const Token* tokens, size_t count, int64_t version);
  void seal();
  uint64_t expire(int64_t before_version);
  uint64_t shrink(uint64_t max_bytes);
  void save(const std::string& path) const;
  void load(const std::string& path);  // into an index without history

  int64_t open(uint64_t problem, const Token* prompt, size_t count);
  void extend(int64_t handle, const Token* tokens, size_t count);
  void close(int64_t handle, bool keep);
  void clear_live();
  // Appends a draft of at most `budget` tokens and the chance that each is reached and accepted.
  void draft(int64_t handle, int64_t budget, double min_chance, Text& tokens, std::vector<float>& chances);

  bool is_open(int64_t handle) const { return requests_.count(handle); }
  uint64_t nbytes() const;
  uint64_t token_count() const;
  uint64_t problem_count() const;
  uint32_t max_depth() const { return depth_; }

 private:
  struct Problem {
    Segment history;
    Live live;
    std::vector<std::pair<int64_t, Text>> staged;
    std::weak_ptr<const Segment> prompt;  // of the request opened last: siblings share it
    bool empty() const { return history.empty() && live.streams.empty() && staged.empty(); }
  };
  struct Request {
    Problem* problem;
    Stream* stream;
    uint64_t problem_id;
    Text drafted;                 // since the last extend, and one token past the cut
    std::vector<uint16_t> kinds;  // of those tokens
  };

  Request& request(int64_t handle);
  template <class Visit>
  void search(const Request& request, Context response, Context whole, Visit&& visit) const;
  void gather(const Request& request);  // candidates for what follows its text and its draft
  void poll(uint32_t step);             // their votes, `step` tokens after the place they were found at
  template <class Function>
  void each_problem(Function&& function);  // dropping those that it left empty

  uint32_t depth_;
  int64_t newest_ = INT64_MIN;
  int64_t next_handle_ = 1;
  std::unordered_map<uint64_t, Problem> problems_;
  std::unordered_map<int64_t, Request> requests_;
  std::vector<uint32_t> fading_;  // weight of a trajectory by its age in versions
  Acceptance acceptance_;
  std::vector<Candidate> candidates_;
  std::vector<Vote> votes_;
  Text response_, whole_;
};

}  // namespace das

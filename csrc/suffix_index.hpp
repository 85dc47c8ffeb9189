// Suffix index of a run: for each problem its sealed history and its live requests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "suffix_draft.hpp"
#include "suffix_live.hpp"
#include "suffix_segment.hpp"
#include "suffix_store.hpp"

namespace das {

// A history as it is now, to be written to one file; other threads may change the index
// meanwhile.
struct Saving {
  FileHeader header;
  std::vector<std::pair<uint64_t, Segment>> segments;  // each with its problem

  void write(const std::string& path) const;
};

// One caller at a time: SharedIndex (suffix_shared.hpp) sees to that. Threads that a
// call starts end with it. Indexes share nothing that changes, even where they map the
// same files.
class SuffixIndex {
 public:
  SuffixIndex() = default;
  SuffixIndex(const SuffixIndex&) = delete;  // requests point into it
  SuffixIndex& operator=(const SuffixIndex&) = delete;

  // The history: made by calls, or mapped from a store's files.
  void add(uint64_t problem, const Token* tokens, size_t count, int64_t version);
  // Seals problems with at least `least` texts added, about so many tokens, and drops
  // their visits beyond the window; returns how many tokens.
  uint64_t seal(size_t window, size_t least, uint64_t tokens);
  uint64_t merge(uint64_t tokens);  // problems with several segments, about this many
                                    // tokens; returns how many
  struct Shrunk {
    uint64_t tokens, thinned,
        dropped;  // tokens that went, problems thinned out, and dropped whole
    uint64_t kept;  // tokens that those thinned out keep
  };
  // Thins the largest problems out until all take `max_bytes`, or about so many tokens
  // were read. Of one that is too large for that the oldest visits go.
  Shrunk shrink(uint64_t max_bytes, uint64_t tokens);
  // Whether the sealed history has this text, whole, of this version.
  bool has(uint64_t problem, const Token* tokens, size_t count, int64_t version) const;
  Saving saving() const;
  // Some problems' history, to be used by another index: written to a file for this
  // user alone, and taken in as older than what there is already.
  using Ids = std::unordered_set<uint64_t>;
  void give(const std::string& path, const Ids& problems) const;
  void absorb(const std::string& path, const Ids& problems);
  // Maps what `give` wrote for problems without history: they keep it while they have
  // live text.
  void visit(const std::string& path);
  void attach(const std::string& directory, bool write);
  void refresh(uint64_t generation);  // 0: the newest
  // Puts a file's bytes of what is in no file into one, and, without a `hurry`, of what
  // lies in files of which little counts, or in many small ones; returns how many.
  uint64_t write(bool hurry);
  void publish(
      bool hurry);  // where the caller is in a `hurry`, without what can be done later

  // Starts a request; `ahead`: what was written ahead with its noise. Drafts repeat
  // that as long as the request does. It is live text of a closed request, too.
  int64_t open(uint64_t problem, const Token* prompt, size_t count, const Token* ahead,
               size_t ahead_count);
  void extend(int64_t handle, const Token* tokens, size_t count);
  void close(int64_t handle, bool keep);
  void clear_live();
  struct Draft {
    std::vector<Token> tokens;
    std::vector<float> chances;  // that each token is reached and accepted
  };
  // Drafts of at most budgets[i] tokens; a handle may occur once.
  std::vector<Draft> draft(const int64_t* handles, const int64_t* budgets, size_t count,
                           double min_chance);

  // A problem's history, whatever becomes of the index.
  using History = std::vector<Segment>;
  History history(uint64_t problem) const;
  // A problem's history as a device searches it: one segment with the newest visits
  // that it can hold, or a part of a visit that it cannot, thinned out where it has too
  // much for `most` words of 32 bits. Empty where there is none. Takes long, and no
  // index.
  struct Flat {
    std::vector<Token> tokens;  // those of the segment
    std::vector<uint32_t>
        places;  // its places: 24 bits of position, 8 of the text's age in visits
  };
  static Flat flat(const History& history, uint64_t most);

  void check_open(const int64_t* handles,
                  size_t count) const;  // std::invalid_argument: one is not open
  // Versions from the newest text of the request's problem to the newest; -1: no text.
  int64_t age(int64_t handle) const;
  uint64_t generation() const { return store_ ? store_->generation() : 0; }
  uint64_t file_bytes() const { return store_ ? store_->file_bytes() : 0; }
  uint64_t nbytes() const { return bytes_; }
  uint64_t token_count() const { return tokens_; }
  uint64_t problem_count() const { return known_; }
  uint64_t staged_tokens() const;
  uint64_t live_bytes() const;
  size_t group() const {
    return group_;
  }  // most texts of a problem that were sealed at once for the last generation
  int64_t newest() const { return newest_; }  // the newest version that was ever sealed

 private:
  struct Problem {
    std::vector<Segment> history;  // oldest first, at most kSegments
    std::vector<int64_t>
        visits;  // versions that wrote it, newest first; known while requests are open
    Live live;
    std::vector<std::pair<int32_t, Text>> staged;
    std::weak_ptr<const std::vector<Segment>>
        prompt;  // of the request opened last: siblings share it
    bool empty() const {
      return history.empty() && live.streams.empty() && staged.empty();
    }
    void look();  // checks the history, and finds its visits
    uint64_t age(int64_t version) const;  // visits since
    int64_t fitting(uint64_t most)
        const;  // the oldest visit with which all since have at most so many tokens
  };
  struct Request {
    Problem* problem;
    Stream* stream;
    uint64_t problem_id;
    Text ahead;  // empty once the request has written something else, or all of it
    std::vector<Token>
        drafted;  // the last draft since `extend`, and one token more if there is one
    std::vector<uint16_t> kinds;  // `Acceptance` kinds of those tokens
  };

  // Working memory of drafting.
  struct Scratch {
    std::vector<Candidate> candidates;
    std::vector<Vote> votes;
    Text response, whole;
  };

  // Counts problems again when it ends, after their history was changed.
  class Change {
   public:
    Change(SuffixIndex& index, std::vector<uint64_t> problems)
        : index_(index), problems_(std::move(problems)) {
      for (uint64_t id : problems_) index_.count(index_.problems_[id], -1);
    }
    ~Change();
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

   private:
    SuffixIndex& index_;
    std::vector<uint64_t> problems_;
  };

  void count(const Problem& problem, int64_t sign);
  static uint64_t token_count(const History& history);
  static uint64_t nbytes(const History& history);
  const Request& request(int64_t handle) const;
  Request& request(int64_t handle) {
    return const_cast<Request&>(std::as_const(*this).request(handle));
  }
  void draft(Request& request, int64_t budget, double min_chance, Scratch& scratch,
             Draft& out) const;
  void drop_before(Problem& problem, int64_t from) const;
  // Thins a problem out to `max_bytes`, or drops its oldest visits where it is too
  // large for that; the newest may stay larger, to be thinned out next time.
  void thin(Problem& problem, uint64_t max_bytes) const;
  FileHeader header() const;
  void take(Store::Histories histories, bool whole, const FileHeader& header,
            const std::string& path);
  template <class Visit>
  void search(const Request& request, Context response, Context whole,
              Visit&& visit) const;
  void gather(const Request& request, Scratch& scratch)
      const;  // candidates for what follows its text and its draft
  void forget_if_empty(uint64_t problem);
  void clear_history(Problem& problem);

  int64_t newest_ = INT64_MIN;
  int64_t next_handle_ = 1;
  std::unordered_map<uint64_t, Problem> problems_;
  std::vector<uint64_t> staged_;  // problems with staged texts
  std::unordered_set<uint64_t> live_;  // problems with live text
  std::unordered_set<uint64_t> unmerged_;  // problems with several segments
  std::unordered_set<uint64_t> guests_;  // problems with a history that `visit` mapped
  std::unordered_set<uint64_t>
      changed_;  // problems with a history that is not published
  uint64_t bytes_ = 0, tokens_ = 0, known_ = 0,
           segments_ = 0;  // of the sealed history; `known_`: problems
  size_t group_ = 0, sealed_group_ = 0;
  uint64_t level_ = UINT64_MAX;  // bytes that the largest problems may take, from one
                                 // slice of shrinking to the next
  std::unordered_map<int64_t, Request> requests_;
  Acceptance acceptance_;
  std::unique_ptr<Store> store_;
};

}  // namespace das

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

// The problem whose history are texts of all problems: requests of every problem draft
// from it, too.
constexpr uint64_t kOthers = UINT64_MAX;

// Chooses the texts that all problems share: of each version a part, spread over its
// texts as far as the version before says how many there are.
class OthersSample {
 public:
  // Returns whether a text is taken, where those of a version have `most` tokens.
  bool takes(int32_t version, uint64_t tokens, uint64_t most) {
    if (version > version_) {
      const bool had_more = num_arrived_ > most;
      share_ = 1;
      if (had_more) share_ = static_cast<double>(most) / num_arrived_;
      version_ = version;
      num_arrived_ = 0;
      num_taken_ = 0;
    }
    const bool is_behind = num_taken_ <= share_ * num_arrived_;
    num_arrived_ += tokens;
    if (!is_behind || num_taken_ + tokens > most) return false;
    num_taken_ += tokens;
    return true;
  }

 private:
  int32_t version_ = INT32_MIN;
  double share_ = 1;  // of the version's tokens
  uint64_t num_arrived_ = 0;  // tokens of the version
  uint64_t num_taken_ = 0;    // of these
};

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
  // `others`: whether requests draft from texts of all problems.
  explicit SuffixIndex(bool others = true) : drafts_from_others_(others) {}
  SuffixIndex(const SuffixIndex&) = delete;  // requests point into it
  SuffixIndex& operator=(const SuffixIndex&) = delete;

  // The history: made by calls, or mapped from a store's files.
  // Keeps texts of all problems as the history of kOthers, too: the newest, so many
  // tokens at most; 0: none.
  void share_texts(uint64_t max_tokens);
  void add(uint64_t problem, const Token* tokens, size_t count, int64_t version);
  // Seals problems with at least `min_texts` texts added, about so many tokens, and
  // drops their visits beyond the window; returns how many tokens were sealed. Texts
  // that all problems share are sealed last.
  uint64_t seal(size_t window, size_t min_texts, uint64_t max_tokens);
  // Merges problems with several segments, about so many tokens; returns how many.
  uint64_t merge(uint64_t max_tokens);
  // Merges texts that all problems share; returns how many tokens.
  uint64_t merge_others() { return merge_newest(kOthers); }
  struct Shrunk {
    uint64_t tokens;   // that went
    uint64_t thinned;  // problems thinned out
    uint64_t dropped;  // problems dropped whole
    uint64_t kept;     // tokens that those thinned out keep
  };
  // Thins the largest problems out until all take `max_bytes`, or about so many tokens
  // were read. Of one that is too large for that the oldest visits go.
  Shrunk shrink(uint64_t max_bytes, uint64_t max_tokens);
  // Returns whether the sealed history has this text, whole, of this version.
  bool has(uint64_t problem, const Token* tokens, size_t count, int64_t version) const;
  Saving saving() const;
  // Whether requests draft from texts of all problems, and there are some.
  bool has_others() const {
    const auto others = problems_.find(kOthers);
    return drafts_from_others_ && others != problems_.end() &&
           !others->second.history.empty();
  }
  // Some problems' history, to be used by another index: `give` writes it to a file for
  // this user alone, `absorb` adds it as older than what there is already.
  using Ids = std::unordered_set<uint64_t>;
  void give(const std::string& path, const Ids& problems) const;
  void absorb(const std::string& path, const Ids& problems);
  // Maps what `give` wrote of problems without history here: they keep it while they
  // have live text.
  void map_guest_history(const std::string& path);
  void attach(const std::string& directory, bool write);
  void refresh(uint64_t generation);  // 0: the newest
  void forget_chances() { acceptance_.forget(); }  // at a weight sync
  // Puts a file's bytes of what is in no file into one, and, unless `hurry`, of what
  // lies in files of which little is used, or in many small ones; returns how many.
  uint64_t write(bool hurry);
  // Publishes a generation. `hurry`: without what can be done later.
  void publish(bool hurry);

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
  // Drafts at most budgets[i] tokens for each request; a handle may occur once.
  std::vector<Draft> draft(const int64_t* handles, const int64_t* budgets, size_t count,
                           double min_chance);

  // A problem's history, whatever becomes of the index.
  using History = std::vector<Segment>;
  History history(uint64_t problem) const;
  // A problem's history as a device searches it: one segment with the newest visits
  // that it can hold, or a part of a visit that it cannot. Where it has too much for
  // `max_words` words of 32 bits it is thinned out, or unless `thins` has the newest
  // visits that fit. Empty where there is none. Takes long, and no index.
  struct Flat {
    std::vector<Token> tokens;  // those of the segment
    // The segment's places: the position in the low 24 bits, the text's age in visits,
    // 255 at most, in the high 8.
    std::vector<uint32_t> places;
  };
  static Flat flat(const History& history, uint64_t max_words, bool thins);

  // Throws std::invalid_argument if a request is not open.
  void check_open(const int64_t* handles, size_t count) const;
  // Returns the versions from the newest text of the request's problem to the newest of
  // all; -1: no text.
  int64_t age(int64_t handle) const;
  uint64_t generation() const { return store_ ? store_->generation() : 0; }
  uint64_t file_bytes() const { return store_ ? store_->file_bytes() : 0; }
  // Bytes of the sealed history, and those that each problem takes beside its text.
  uint64_t nbytes() const { return sealed_.bytes; }
  uint64_t token_count() const { return sealed_.tokens; }
  uint64_t problem_count() const { return sealed_.problems; }
  uint64_t staged_tokens() const;
  uint64_t live_bytes() const;
  // Returns the most texts of a problem that were sealed at once for the last
  // generation.
  size_t group() const { return published_group_; }
  int64_t newest() const { return newest_; }  // the newest version that was ever sealed

 private:
  struct Problem {
    std::vector<Segment> history;  // oldest first, at most SEGMENTS_PER_PROBLEM
    // Versions that wrote it, newest first; known while requests are open.
    std::vector<int64_t> visits;
    Live live;
    std::vector<std::pair<int32_t, Text>> staged;  // texts, each with its version
    // The prompt of the request that was opened last: siblings share it.
    std::weak_ptr<const std::vector<Segment>> prompt;

    bool empty() const {
      return history.empty() && live.streams.empty() && staged.empty();
    }
    // Checks the history, and finds its visits.
    void find_visits();
    // Returns how many visits are newer than a version.
    uint64_t age(int64_t version) const;
    // Returns the oldest visit with which all since have at most so many tokens.
    int64_t oldest_fitting_visit(uint64_t max_tokens) const;
  };
  struct Request {
    Problem* problem;
    Stream* stream;
    uint64_t problem_id;
    Text ahead;  // empty once the request has written something else, or all of it
    // The last draft since `extend`, and one token more if there is one.
    std::vector<Token> drafted;
    std::vector<uint16_t> kinds;  // `Acceptance` kinds of those tokens
  };
  // The end of a request's text with its draft, as far as it is compared.
  struct Contexts {
    Context response;
    Context prompted;  // the same behind the prompt, without kStart

    Contexts without_last() const {
      return {response.without_last(), prompted.without_last()};
    }
  };
  // A place that a search has found.
  struct Found {
    Context context;  // that was searched for
    const Stored* last;  // last context token
    const Stored* end;  // of the text or segment
    uint32_t length;  // of the match
    uint32_t weight;
    bool own;
  };

  // Working memory of drafting.
  struct Scratch {
    std::vector<Candidate> candidates;
    std::vector<Candidate> others;  // in texts of other problems
    std::vector<Vote> votes;
    Text response;
    Text prompted;
  };

  // A problem that may be thinned out.
  struct Thinnable {
    Problem* problem;
    uint64_t id;
    uint64_t bytes;
    int64_t last_version;

    // Of two problems, the one seen later, or with the greater number.
    std::pair<int64_t, uint64_t> recency() const { return {last_version, id}; }
  };

  // Sizes of the sealed history.
  struct Sizes {
    uint64_t bytes = 0;
    uint64_t tokens = 0;
    uint64_t problems = 0;
    uint64_t segments = 0;
  };

  // Counts problems again when it ends, after their history was changed.
  class Change {
   public:
    Change(SuffixIndex& index, std::vector<uint64_t> problems)
        : index_(index), problems_(std::move(problems)) {
      for (uint64_t id : problems_) index_.count(id, -1);
    }
    ~Change();
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

   private:
    SuffixIndex& index_;
    std::vector<uint64_t> problems_;
  };

  // Adds a problem's history to the sizes, or (`sign` -1) removes it from them.
  void count(uint64_t problem, int64_t sign);
  static uint64_t token_count(const History& history);
  static uint64_t nbytes(const History& history);
  const Request& request(int64_t handle) const;
  Request& request(int64_t handle) {
    return const_cast<Request&>(std::as_const(*this).request(handle));
  }

  // Merges a problem's newest segments; returns how many tokens.
  uint64_t merge_newest(uint64_t problem);
  void stage(uint64_t problem, int32_t version, Text text);
  // Makes a problem's staged texts its newest history.
  static void seal_staged(Problem& problem);
  void drop_beyond(Problem& problem, size_t window) const;
  void drop_others_beyond_room(Problem& others) const;
  std::vector<Thinnable> thinnable();
  void drop_longest_unseen(std::vector<Thinnable>& problems, uint64_t max_bytes,
                           Shrunk& shrunk);
  static uint64_t fitting_level(const std::vector<Thinnable>& by_size,
                                uint64_t max_bytes);
  void drop_before(Problem& problem, int64_t from) const;
  // Thins a problem out to `max_bytes`, or drops its oldest visits where it is too
  // large for that; the newest may stay larger, to be thinned out next time.
  void thin(Problem& problem, uint64_t max_bytes) const;
  FileHeader header() const;
  void replace_histories(Store::Histories histories, bool whole,
                         const FileHeader& header, const std::string& path);
  void forget_if_empty(uint64_t problem);
  void clear_history(uint64_t problem);

  void draft(Request& request, int64_t budget, double min_chance, Scratch& scratch,
             Draft& out) const;
  Contexts contexts(const Request& request, Scratch& scratch) const;
  // Calls report(Found) for the places of the history, of live text and of the prompt.
  template <class Report>
  void search(const Request& request, const Contexts& contexts, Report&& report) const;
  // Collects candidates for what follows the request's text and its draft.
  void gather(const Request& request, Scratch& scratch) const;
  // The same, in texts of other problems.
  void gather_others(const Request& request, Scratch& scratch) const;
  // A token that candidates vote for.
  struct Elected {
    Token token = 0;
    uint16_t kind = 0;
    double chance = 0;  // 0: there is none
  };
  Elected elect(const std::vector<Candidate>& candidates, uint32_t step, bool others,
                Scratch& scratch) const;

  int64_t newest_ = INT64_MIN;
  int64_t next_handle_ = 1;
  std::unordered_map<uint64_t, Problem> problems_;
  const bool drafts_from_others_;
  uint64_t others_tokens_ = 0;  // see `share_texts`
  OthersSample others_sample_;
  std::vector<uint64_t> staged_;  // problems with staged texts
  std::unordered_set<uint64_t> live_;  // problems with live text
  std::unordered_set<uint64_t> unmerged_;  // problems with several segments
  std::unordered_set<uint64_t> guests_;  // problems with a mapped guest history
  std::unordered_set<uint64_t> changed_;  // problems with an unpublished history
  Sizes sealed_;
  size_t published_group_ = 0;  // see `group`
  size_t sealed_group_ = 0;  // the same since the last generation
  // Bytes that the largest problems may take, from one slice of shrinking to the next.
  uint64_t level_ = UINT64_MAX;
  std::unordered_map<int64_t, Request> requests_;
  Acceptance acceptance_;
  std::unique_ptr<Store> store_;
};

}  // namespace das

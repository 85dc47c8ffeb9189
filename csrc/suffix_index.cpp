// Suffix index: see suffix_index.hpp; das_adapter/core/index/ is its Python side,
// tests/unit/reference_index.py the same index in Python.
#include "suffix_index.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <map>
#include <stdexcept>
#include <tuple>

#include "suffix_build.hpp"
#include "suffix_thin.hpp"

namespace das {

namespace {

// Collects the votes on the next token, `step` tokens after the places at which the
// candidates were found.
void poll(const std::vector<Candidate>& candidates, uint32_t step,
          std::vector<Vote>& votes) {
  votes.clear();
  for (const Candidate& c : candidates) {
    if (c.ended()) continue;
    // A candidate gains strength with each drafted token that it agreed with.
    const uint32_t strength = std::min(c.strength + 2 * step, tuning::MOST_STRENGTH);
    const Token token = *c.next;
    auto vote = std::find_if(votes.begin(), votes.end(),
                             [token](const Vote& v) { return v.token == token; });
    if (vote == votes.end()) vote = votes.insert(vote, {token, 0, 0, 0, true});
    vote->votes += votes_by_strength()[strength] * c.weight;
    vote->num_places += 1;
    vote->strength = std::max(vote->strength, strength);
    vote->own &= c.own;
  }
}

// Returns the vote with the most votes; of equals the one for the lowest token.
const Vote& most_voted(const std::vector<Vote>& votes) {
  return *std::min_element(
      votes.begin(), votes.end(), [](const Vote& a, const Vote& b) {
        return a.votes != b.votes ? a.votes > b.votes : a.token < b.token;
      });
}

// Keeps the candidates that voted for a token, and moves them behind it.
void keep_voters(std::vector<Candidate>& candidates, Token token) {
  size_t num_kept = 0;
  for (const Candidate& c : candidates) {
    if (c.ended() || *c.next != token) continue;
    candidates[num_kept] = {c.next + 1, c.end, c.strength, c.weight, c.own};
    ++num_kept;
  }
  candidates.resize(num_kept);
}

// Returns the strength of a place at which so many tokens match a context.
uint32_t strength_of(Context context, const Stored* last, uint32_t length) {
  uint32_t beyond = 0;
  if (length < tuning::DEPTH_TOKENS)
    beyond = match_beyond(context, last, length, tuning::BEYOND_TOKENS);
  return match_strength(length, beyond);
}

// Drops the oldest segments of a history that has too many.
void keep_newest_segments(std::vector<Segment>& history) {
  if (history.size() > tuning::SEGMENTS_PER_PROBLEM)
    history.erase(history.begin(), history.end() - tuning::SEGMENTS_PER_PROBLEM);
}

uint64_t token_count(const std::vector<std::pair<int32_t, Text>>& texts) {
  uint64_t sum = 0;
  for (const auto& [version, text] : texts) sum += text.size();
  return sum;
}

// Returns the whole text as a context.
Context ending(const Text& text) {
  return {text.data() + text.size(), static_cast<uint32_t>(text.size())};
}

}  // namespace

void SuffixIndex::add(uint64_t problem, const Token* tokens, size_t count,
                      int64_t version) {
  const auto narrow = static_cast<int32_t>(version);
  if (narrow != version)
    throw std::invalid_argument("version: found " + std::to_string(version) +
                                ", allowed: 32 bits");
  if (count > Segment::kCapacity - 3)
    throw std::invalid_argument("tokens: found 2^24 or more, allowed: fewer");
  if (!count) return;
  Text text(tokens, tokens + count);
  if (others_sample_.takes(narrow, count, others_tokens_ / 2))
    stage(kOthers, narrow, text);
  stage(problem, narrow, std::move(text));
}

void SuffixIndex::stage(uint64_t problem, int32_t version, Text text) {
  auto& staged = problems_[problem].staged;
  if (staged.empty()) staged_.push_back(problem);
  staged.emplace_back(version, std::move(text));
}

void SuffixIndex::share_texts(uint64_t max_tokens) {
  others_tokens_ = max_tokens;
  const auto others = problems_.find(kOthers);
  if (max_tokens || others == problems_.end()) return;
  const Change change(*this, {kOthers});
  others->second.history.clear();
}

uint64_t SuffixIndex::staged_tokens() const {
  uint64_t sum = 0;
  for (uint64_t id : staged_)
    if (id != kOthers) sum += das::token_count(problems_.at(id).staged);
  return sum;
}

uint64_t SuffixIndex::token_count(const History& history) {
  uint64_t sum = 0;
  for (const Segment& segment : history) sum += segment.token_count();
  return sum;
}

uint64_t SuffixIndex::nbytes(const History& history) {
  uint64_t sum = 0;
  for (const Segment& segment : history) sum += segment.nbytes();
  return sum;
}

void SuffixIndex::count(uint64_t id, int64_t sign) {
  const Problem& problem = problems_[id];
  for (const Segment& segment : problem.history) {
    sealed_.bytes += sign * segment.nbytes();
    sealed_.segments += sign;
    if (segment.file) segment.file->used_bytes += sign * segment.nbytes();
  }
  if (id == kOthers || problem.history.empty()) return;  // texts of other problems
  sealed_.bytes += sign * tuning::PROBLEM_BYTES;
  sealed_.tokens += sign * token_count(problem.history);
  sealed_.problems += sign;
}

SuffixIndex::Change::~Change() {
  for (uint64_t id : problems_) {
    Problem& problem = index_.problems_[id];
    index_.count(id, 1);
    if (index_.store_) index_.changed_.insert(id);
    if (id != kOthers && problem.history.size() > 1) index_.unmerged_.insert(id);
    index_.forget_if_empty(id);
  }
}

void SuffixIndex::forget_if_empty(uint64_t problem) {
  const auto it = problems_.find(problem);
  if (it != problems_.end() && it->second.empty()) problems_.erase(it);
}

void SuffixIndex::Problem::find_visits() {
  visits.clear();
  for (const Segment& segment : history) {
    check(segment);
    for (const auto& run : segment.runs) visits.push_back(run.version);
  }
  std::sort(visits.rbegin(), visits.rend());
  visits.erase(std::unique(visits.begin(), visits.end()), visits.end());
}

uint64_t SuffixIndex::Problem::age(int64_t version) const {
  const auto not_newer =
      std::lower_bound(visits.begin(), visits.end(), version, std::greater<>());
  return not_newer - visits.begin();
}

int64_t SuffixIndex::Problem::oldest_fitting_visit(uint64_t max_tokens) const {
  std::map<int64_t, uint64_t, std::greater<>> tokens_by_visit;  // newest first
  for (const Segment& segment : history)
    for (const auto& run : segment.runs)
      tokens_by_visit[run.version] += segment.end(run) - run.start;
  int64_t oldest = tokens_by_visit.begin()->first;
  uint64_t sum = 0;
  for (const auto& [version, num_tokens] : tokens_by_visit) {
    sum += num_tokens;
    if (sum > max_tokens) break;
    oldest = version;
  }
  return oldest;
}

uint64_t SuffixIndex::seal(size_t window, size_t min_texts, uint64_t max_tokens) {
  std::vector<uint64_t> chosen;
  uint64_t num_sealed = 0;
  const auto choose = [&](uint64_t id) {
    chosen.push_back(id);
    num_sealed += das::token_count(problems_.at(id).staged);
  };
  bool others = false;
  for (uint64_t id : staged_) {
    const auto& staged = problems_.at(id).staged;
    others |= id == kOthers;
    if (id == kOthers || staged.empty() || num_sealed >= max_tokens ||
        staged.size() < min_texts)
      continue;
    choose(id);
    sealed_group_ = std::max(sealed_group_, staged.size());
    for (const auto& [version, text] : staged)
      newest_ = std::max<int64_t>(newest_, version);
  }
  if (others) {
    const uint64_t num_others = das::token_count(problems_.at(kOthers).staged);
    uint64_t least = 0;
    if (min_texts > 1) least = others_tokens_ / tuning::OTHERS_SEALED_PARTS;
    // At a weight sync `min_texts` is 0: only what fits is sealed, since engines wait.
    const bool fits = num_sealed + num_others <= max_tokens;
    const bool has_time = min_texts ? num_sealed < max_tokens : fits;
    if (num_others >= least && has_time) choose(kOthers);
  }
  // At the end, whatever is thrown, problems without staged texts are forgotten.
  const auto is_sealed = [&](uint64_t id) { return problems_.at(id).staged.empty(); };
  const auto forget_sealed = [&](void*) {
    staged_.erase(std::remove_if(staged_.begin(), staged_.end(), is_sealed),
                  staged_.end());
  };
  const std::unique_ptr<void, decltype(forget_sealed)> at_end(this, forget_sealed);
  {
    const Change change(*this, chosen);
    for (uint64_t id : chosen) {
      Problem& problem = problems_.at(id);
      seal_staged(problem);
      if (id == kOthers)
        drop_others_beyond_room(problem);
      else
        drop_beyond(problem, window);
    }
  }
  return num_sealed;
}

void SuffixIndex::seal_staged(Problem& problem) {
  auto& history = problem.history;
  for (const Segment& segment : history) check(segment);  // before anything changes
  Builder fresh;
  for (const auto& [version, text] : problem.staged) {
    if (!fresh.fits(text.size() + 1)) {
      history.push_back(fresh.build());
      fresh = Builder();
    }
    fresh.add(text.data(), text.size(), version);
  }
  history.push_back(fresh.build());
  problem.staged = {};
  problem.find_visits();
}

// Drops visits beyond the window.
void SuffixIndex::drop_beyond(Problem& problem, size_t window) const {
  auto& history = problem.history;
  problem.visits.resize(std::min(problem.visits.size(), window));
  const int64_t oldest_visit = problem.visits.back();
  if (history.size() > tuning::SEGMENTS_PER_PROBLEM)
    history = merged(history, oldest_visit);
  else
    drop_before(problem, oldest_visit);
  keep_newest_segments(history);
}

// Drops the oldest visits, some more than are too much, so that a large segment is not
// built anew every time.
void SuffixIndex::drop_others_beyond_room(Problem& others) const {
  auto& history = others.history;
  if (token_count(history) > others_tokens_)
    drop_before(others, others.oldest_fitting_visit(others_tokens_ / 4 * 3));
  if (history.size() > tuning::SEGMENTS_PER_PROBLEM) history = merged(history);
}

void SuffixIndex::drop_before(Problem& problem, int64_t from) const {
  std::vector<Segment> kept;
  for (const Segment& segment : problem.history) {
    const auto& runs = segment.runs;
    const auto is_old = [from](const Segment::Run& run) { return run.version < from; };
    if (std::none_of(runs.begin(), runs.end(), is_old)) {
      kept.push_back(segment);
    } else if (!std::all_of(runs.begin(), runs.end(), is_old)) {
      Builder rest;
      rest.add(segment, from);
      kept.push_back(rest.build());
    }
  }
  problem.history = std::move(kept);
}

uint64_t SuffixIndex::merge(uint64_t max_tokens) {
  uint64_t num_merged = 0;
  while (!unmerged_.empty() && num_merged < max_tokens) {
    const uint64_t id = *unmerged_.begin();
    num_merged += merge_newest(id);
    unmerged_.erase(id);
  }
  return num_merged;
}

uint64_t SuffixIndex::merge_newest(uint64_t id) {
  const auto it = problems_.find(id);
  const size_t count = it == problems_.end() ? 0 : mergeable(it->second.history);
  if (count < 2) return 0;
  const Change change(*this, {id});
  auto& history = it->second.history;
  const auto first = history.end() - static_cast<ptrdiff_t>(count);
  uint64_t num_merged = 0;
  for (auto segment = first; segment != history.end(); ++segment) {
    check(*segment);
    num_merged += segment->token_count();
  }
  *first = das::merged({first, history.end()}).front();
  history.erase(first + 1, history.end());
  return num_merged;
}

SuffixIndex::Shrunk SuffixIndex::shrink(uint64_t max_bytes, uint64_t max_tokens) {
  Shrunk shrunk{0, 0, 0, 0};
  if (sealed_.bytes <= max_bytes) {
    level_ = UINT64_MAX;
    return shrunk;
  }
  const auto others = problems_.find(kOthers);
  uint64_t others_bytes =
      others == problems_.end() ? 0 : nbytes(others->second.history);
  if (others_bytes > max_bytes / 4) {
    const Change change(*this, {kOthers});
    others->second.history.clear();
    others_bytes = 0;
  }
  const uint64_t problems_bytes = max_bytes - others_bytes;
  const uint64_t tokens_before = sealed_.tokens;
  std::vector<Thinnable> problems = thinnable();
  drop_longest_unseen(problems, problems_bytes, shrunk);
  std::sort(problems.begin(), problems.end(),
            [](const Thinnable& a, const Thinnable& b) {
              return std::make_pair(a.bytes, a.recency()) <
                     std::make_pair(b.bytes, b.recency());
            });
  level_ = std::min(level_, fitting_level(problems, problems_bytes));
  // The largest are thinned out to less than that, so that a problem is not thinned out
  // every time.
  const uint64_t thinned_bytes = level_ / 4 * tuning::THINNED_QUARTERS;
  const uint64_t target_bytes =
      thinned_bytes - std::min<uint64_t>(thinned_bytes, tuning::PROBLEM_BYTES);
  uint64_t num_read = 0;
  while (sealed_.bytes > max_bytes && num_read < max_tokens && !problems.empty()) {
    {
      const Thinnable& largest = problems.back();
      const Change change(*this, {largest.id});
      num_read += token_count(largest.problem->history);
      thin(*largest.problem, target_bytes);
      shrunk.kept += token_count(largest.problem->history);
      shrunk.thinned += 1;
    }
    problems.pop_back();
  }
  if (sealed_.bytes <= max_bytes) level_ = UINT64_MAX;
  shrunk.tokens = tokens_before - sealed_.tokens;
  return shrunk;
}

// Returns the problems with a history.
std::vector<SuffixIndex::Thinnable> SuffixIndex::thinnable() {
  std::vector<Thinnable> found;
  for (auto& [id, problem] : problems_) {
    if (id == kOthers || problem.history.empty()) continue;
    const uint64_t bytes = tuning::PROBLEM_BYTES + nbytes(problem.history);
    Thinnable thinnable{&problem, id, bytes, INT64_MIN};
    for (const Segment& segment : problem.history)
      for (const auto& run : segment.runs)
        thinnable.last_version = std::max<int64_t>(thinnable.last_version, run.version);
    found.push_back(thinnable);
  }
  return found;
}

// Drops whole problems, those not seen for longest first, until the others can keep
// LEAST_PROBLEM_BYTES of text each.
void SuffixIndex::drop_longest_unseen(std::vector<Thinnable>& problems,
                                      uint64_t max_bytes, Shrunk& shrunk) {
  const auto least_bytes = [](const Thinnable& problem) {
    constexpr uint64_t kLeast = tuning::PROBLEM_BYTES + tuning::LEAST_PROBLEM_BYTES;
    return std::min(problem.bytes, kLeast);
  };
  uint64_t least = 0;
  for (const Thinnable& problem : problems) least += least_bytes(problem);
  if (least <= max_bytes) return;
  std::sort(
      problems.begin(), problems.end(),
      [](const Thinnable& a, const Thinnable& b) { return a.recency() > b.recency(); });
  while (least > max_bytes) {
    const Thinnable& unseen = problems.back();
    least -= least_bytes(unseen);
    shrunk.dropped += 1;
    {
      const Change change(*this, {unseen.id});
      unseen.problem->history.clear();
      unseen.problem->visits.clear();
    }
    problems.pop_back();
  }
}

// Returns the most bytes of a problem with which all fit; they come smallest first.
uint64_t SuffixIndex::fitting_level(const std::vector<Thinnable>& by_size,
                                    uint64_t max_bytes) {
  uint64_t level = 0;
  uint64_t smaller_bytes = 0;  // of the problems below the level
  for (size_t i = 0; i < by_size.size(); ++i) {
    const size_t num_larger = by_size.size() - i;
    level = (max_bytes - smaller_bytes) / num_larger;
    if (level <= by_size[i].bytes) break;
    smaller_bytes += by_size[i].bytes;
  }
  return level;
}

void SuffixIndex::thin(Problem& problem, uint64_t max_bytes) const {
  problem.find_visits();
  const uint64_t num_tokens = token_count(problem.history);
  if (num_tokens > tuning::THINNED_TOKENS && problem.visits.size() > 1) {
    const double share =
        static_cast<double>(max_bytes) / static_cast<double>(nbytes(problem.history));
    const auto max_tokens =
        static_cast<uint64_t>(share * static_cast<double>(num_tokens));
    drop_before(problem, problem.oldest_fitting_visit(max_tokens));
  } else {
    const std::vector<Segment> segments = merged(problem.history);
    const uint64_t all_bytes = nbytes(segments);
    problem.history.clear();
    for (const Segment& segment : segments) {
      const double own_bytes =
          static_cast<double>(max_bytes) * segment.nbytes() / all_bytes;
      Builder rest;
      Thinning(segment).add_kept_to(rest, static_cast<uint64_t>(own_bytes));
      if (!rest.empty()) problem.history.push_back(rest.build());
    }
  }
  problem.find_visits();
}

SuffixIndex::History SuffixIndex::history(uint64_t id) const {
  const auto it = problems_.find(id);
  return it == problems_.end() ? History() : it->second.history;
}

SuffixIndex::Flat SuffixIndex::flat(const History& history, uint64_t max_words,
                                    bool thins) {
  const auto num_words = [](const Segment& s) { return s.tokens.size + s.places.size; };
  Flat out;
  if (history.empty()) return out;
  Problem problem;
  problem.history = history;
  problem.find_visits();
  uint64_t most = Segment::kCapacity - 2;
  if (!thins) most = std::min(most, max_words / 2);
  problem.history = merged(history, problem.oldest_fitting_visit(most));
  // There are several where the newest visit alone is too large.
  Segment segment = *std::max_element(
      problem.history.begin(), problem.history.end(),
      [](const auto& a, const auto& b) { return a.tokens.size < b.tokens.size; });
  if (num_words(segment) > max_words) {
    if (!thins) return out;
    const double share =
        static_cast<double>(max_words) / static_cast<double>(num_words(segment));
    const double max_bytes =
        tuning::FLAT_FILL_SHARE * share * static_cast<double>(segment.nbytes());
    Builder rest;
    Thinning(segment).add_kept_to(rest, static_cast<uint64_t>(max_bytes));
    if (rest.empty()) return out;
    segment = rest.build();
    if (num_words(segment) > max_words) return out;
  }
  out.tokens.assign(segment.tokens.begin(), segment.tokens.end());
  std::vector<uint32_t> age_of_run;
  for (const Segment::Run& run : segment.runs) {
    const uint64_t age = std::min<uint64_t>(problem.age(run.version), UINT8_MAX);
    age_of_run.push_back(static_cast<uint32_t>(age));
  }
  out.places.reserve(segment.places.size);
  for (const Segment::Place& p : segment.places) {
    const size_t run = &segment.run(p.position) - segment.runs.begin();
    out.places.push_back(p.position | age_of_run[run] << 24);
  }
  return out;
}

int64_t SuffixIndex::open(uint64_t id, const Token* prompt, size_t count,
                          const Token* ahead, size_t ahead_count) {
  Problem& problem = problems_[id];
  problem.find_visits();
  if (ahead_count) {
    problem.live.streams.push_back(std::make_unique<Stream>());
    Stream& written = *problem.live.streams.back();
    written.state = Stream::kClosed;
    problem.live.extend(written, ahead, ahead_count);
  }
  auto stream = std::make_unique<Stream>();
  if (count) {
    stream->prompt = problem.prompt.lock();
    // A prompt's segment has kStart, the prompt, and kStart.
    const auto* sibling = stream->prompt ? &stream->prompt->front().tokens : nullptr;
    const bool is_same = sibling && std::equal(sibling->begin() + 1, sibling->end() - 1,
                                               prompt, prompt + count);
    if (!is_same) {
      Builder text;
      text.add(prompt, count, 0);
      stream->prompt = std::make_shared<std::vector<Segment>>(1, text.build());
    }
    problem.prompt = stream->prompt;
  }
  live_.insert(id);
  const int64_t handle = next_handle_;
  ++next_handle_;
  requests_[handle] = {&problem, stream.get(), id, Text(ahead, ahead + ahead_count), {},
                       {}};
  problem.live.streams.push_back(std::move(stream));
  return handle;
}

const SuffixIndex::Request& SuffixIndex::request(int64_t handle) const {
  const auto it = requests_.find(handle);
  if (it == requests_.end())
    throw std::invalid_argument("request handle " + std::to_string(handle) +
                                ": not open");
  return it->second;
}

void SuffixIndex::check_open(const int64_t* handles, size_t count) const {
  for (size_t i = 0; i < count; ++i) request(handles[i]);
}

void SuffixIndex::extend(int64_t handle, const Token* tokens, size_t count) {
  Request& r = request(handle);
  for (size_t i = 0; i < std::min(count, r.drafted.size()); ++i) {
    const bool accepted = tokens[i] == r.drafted[i];
    acceptance_.learn(r.kinds[i], accepted);
    if (!accepted) break;
  }
  if (count) {
    r.drafted.clear();
    r.kinds.clear();
  }
  const size_t num_written = r.stream->text.size() - 1;
  const size_t num_ahead = r.ahead.size() - std::min(r.ahead.size(), num_written);
  const bool repeats_ahead =
      count < num_ahead &&
      std::equal(tokens, tokens + count, r.ahead.begin() + num_written);
  if (!repeats_ahead) r.ahead = {};
  r.problem->live.extend(*r.stream, tokens, count);
}

int64_t SuffixIndex::age(int64_t handle) const {
  const auto& visits = request(handle).problem->visits;
  if (visits.empty()) return -1;
  return std::max<int64_t>(0, newest_ - visits.front());  // a guest's may be newer
}

void SuffixIndex::close(int64_t handle, bool keep) {
  const Request r = request(handle);
  requests_.erase(handle);
  r.stream->prompt.reset();
  if (keep) {
    r.stream->state = Stream::kClosed;
  } else {
    r.problem->live.forget(*r.stream);
    forget_if_empty(r.problem_id);
  }
}

void SuffixIndex::clear_live() {
  for (auto it = live_.begin(); it != live_.end();) {
    const uint64_t id = *it;
    const auto problem = problems_.find(id);
    if (problem != problems_.end()) problem->second.live.forget_closed();
    const bool stays =
        problem != problems_.end() && !problem->second.live.streams.empty();
    it = stays ? std::next(it) : live_.erase(it);
    if (!stays) forget_if_empty(id);
  }
  for (auto it = guests_.begin(); it != guests_.end();) {
    const uint64_t id = *it;
    const bool stays = live_.count(id);
    it = stays ? std::next(it) : guests_.erase(it);
    if (stays) continue;
    clear_history(id);
    forget_if_empty(id);
  }
}

void SuffixIndex::clear_history(uint64_t id) {
  count(id, -1);
  Problem& problem = problems_.at(id);
  problem.history.clear();
  problem.visits.clear();
}

uint64_t SuffixIndex::live_bytes() const {
  uint64_t sum = 0;
  for (uint64_t id : live_)
    if (const auto it = problems_.find(id); it != problems_.end())
      sum += it->second.live.nbytes();
  return sum;
}

template <class Report>
void SuffixIndex::search(const Request& request, const Contexts& contexts,
                         Report&& report) const {
  const Context response = contexts.response;
  const auto report_sealed = [&](const Segment& segment, const Segment::Place& place,
                                 uint32_t length) {
    const uint64_t age = request.problem->age(segment.run(place.position).version);
    const uint64_t oldest = weights_by_age().size() - 1;
    const uint32_t weight = weights_by_age()[std::min(age, oldest)];
    report(Found{response, &segment.tokens[place.position], segment.tokens.end(),
                 length, weight, false});
  };
  const auto report_live = [&](const Stream& stream, uint32_t position,
                               uint32_t length) {
    const bool own = &stream == request.stream;
    const uint32_t weight = own ? tuning::OWN_WEIGHT : tuning::SIBLING_WEIGHT;
    const Stored* const end = stream.text.data() + stream.text.size();
    report(Found{response, &stream.text[position], end, length, weight, own});
  };
  const auto report_prompt = [&](const Segment& prompt, const Segment::Place& place,
                                 uint32_t length) {
    report(Found{contexts.prompted, &prompt.tokens[place.position], prompt.tokens.end(),
                 length, tuning::PROMPT_WEIGHT, true});
  };
  das::search(request.problem->history, response, report_sealed);
  request.problem->live.search(response, report_live);
  if (request.stream->prompt)
    das::search(*request.stream->prompt, contexts.prompted, report_prompt);
}

SuffixIndex::Contexts SuffixIndex::contexts(const Request& request,
                                            Scratch& scratch) const {
  const size_t most = tuning::DEPTH_TOKENS + tuning::BEYOND_TOKENS + 2;
  const Text& text = request.stream->text;
  Text& response = scratch.response;
  response.assign(text.end() - std::min(text.size(), most), text.end());
  response.insert(response.end(), request.drafted.begin(), request.drafted.end());
  Text& prompted = scratch.prompted;
  prompted.clear();
  if (!request.stream->prompt) return {ending(response), ending(response)};
  const auto& prompt = request.stream->prompt->front().tokens;
  if (text.size() <= most) {
    const Stored* const prompt_end = prompt.end() - 1;  // in front of kStart
    prompted.assign(prompt_end - std::min(prompt.size - 2, most), prompt_end);
  }
  const bool starts = response.front() == kStart;
  prompted.insert(prompted.end(), response.begin() + starts, response.end());
  return {ending(response), prompted.empty() ? ending(response) : ending(prompted)};
}

void SuffixIndex::gather(const Request& request, Scratch& scratch) const {
  auto& candidates = scratch.candidates;
  candidates.clear();
  const Contexts contexts = this->contexts(request, scratch);
  uint32_t strongest = 0;
  search(request, contexts, [&](const Found& found) {
    const uint32_t strength = strength_of(found.context, found.last, found.length);
    strongest = std::max(strongest, strength);
    candidates.push_back(
        {found.last + 1, found.end, strength, found.weight, found.own});
  });
  if (strongest >= tuning::SURE_STRENGTH || contexts.response.size < 2) return;
  const Token written = contexts.response[0];
  search(request, contexts.without_last(), [&](const Found& found) {
    const Token differing = found.last[1];
    if (differing == written) return;  // found by the search above
    candidates.push_back({found.last + 2, found.end, differing_strength(found.length),
                          found.weight, found.own});
  });
}

void SuffixIndex::gather_others(const Request& request, Scratch& scratch) const {
  if (!has_others()) return;
  const Context context = contexts(request, scratch).response;
  const auto report = [&](const Segment& segment, const Segment::Place& place,
                          uint32_t length) {
    const Stored* const last = &segment.tokens[place.position];
    const uint32_t strength = strength_of(context, last, length);
    scratch.others.push_back({last + 1, segment.tokens.end(), strength, 1, false});
  };
  das::search(problems_.at(kOthers).history, context, report);
}

SuffixIndex::Elected SuffixIndex::elect(const std::vector<Candidate>& candidates,
                                        uint32_t step, bool others,
                                        Scratch& scratch) const {
  auto& votes = scratch.votes;
  poll(candidates, step, votes);
  if (votes.empty()) return {};
  uint64_t all_votes = 0;
  for (const Vote& vote : votes) all_votes += vote.votes;
  const Vote& best = most_voted(votes);
  auto source = best.own ? Acceptance::kOwn : Acceptance::kProblem;
  if (others) source = Acceptance::kOthers;
  const uint16_t kind =
      Acceptance::kind(best.votes, all_votes, best.strength, best.num_places, source);
  return {best.token, kind, acceptance_.chance(kind)};
}

std::vector<SuffixIndex::Draft> SuffixIndex::draft(const int64_t* handles,
                                                   const int64_t* budgets, size_t count,
                                                   double min_chance) {
  std::vector<Draft> drafts(count);
  Scratch scratch;
  for (size_t i = 0; i < count; ++i)
    draft(request(handles[i]), budgets[i], min_chance, scratch, drafts[i]);
  return drafts;
}

void SuffixIndex::draft(Request& r, int64_t budget, double min_chance, Scratch& scratch,
                        Draft& out) const {
  r.drafted.clear();
  r.kinds.clear();
  if (budget <= 0) return;
  double chance = 1;
  // Adds a token to what was drafted; returns whether the draft goes on.
  const auto add = [&](Token token, uint16_t kind) {
    r.drafted.push_back(token);
    r.kinds.push_back(kind);
    chance *= acceptance_.chance(kind);
    const bool is_full = r.drafted.size() > static_cast<size_t>(budget);
    if (is_full || chance < min_chance) return false;
    out.tokens.push_back(token);
    out.chances.push_back(std::max(static_cast<float>(chance), FLT_MIN));
    return true;
  };
  for (size_t i = r.stream->text.size() - 1; i < r.ahead.size(); ++i)
    if (!add(r.ahead[i], Acceptance::kAhead)) return;
  auto& candidates = scratch.candidates;
  auto& others = scratch.others;
  gather(r, scratch);
  others.clear();
  bool asked_others = false;
  // Tokens drafted since the last search.
  uint32_t step = 0;
  uint32_t others_step = 0;
  for (;;) {
    Elected best = elect(candidates, step, false, scratch);
    if (!best.chance && step) {
      // All candidates ended here: search with the draft, too.
      gather(r, scratch);
      step = 0;
      best = elect(candidates, step, false, scratch);
    }
    if (best.chance < tuning::OTHERS_CHANCE) {
      Elected other = elect(others, others_step, true, scratch);
      const bool is_new = !asked_others || others_step;
      if (!other.chance && is_new) {
        gather_others(r, scratch);
        asked_others = true;
        others_step = 0;
        other = elect(others, others_step, true, scratch);
      }
      if (other.chance > best.chance) best = other;
    }
    if (!best.chance || !add(best.token, best.kind)) return;
    keep_voters(candidates, best.token);
    keep_voters(others, best.token);
    ++step;
    ++others_step;
  }
}

bool SuffixIndex::has(uint64_t problem, const Token* tokens, size_t count,
                      int64_t version) const {
  const auto it = problems_.find(problem);
  if (it == problems_.end()) return false;
  const auto begins_text = [](Token token) { return token < 0; };
  for (const Segment& segment : it->second.history) {
    check(segment);
    for (const Segment::Run& run : segment.runs) {
      if (run.version != version) continue;
      const Stored* const end = &segment.tokens[segment.end(run)];
      const Stored* start = &segment.tokens[run.start];
      while (start != end) {
        const Stored* const next = std::find_if(start + 1, end, begins_text);
        const bool is_whole = *start == kStart;
        if (is_whole && std::equal(start + 1, next, tokens, tokens + count))
          return true;
        start = next;
      }
    }
  }
  return false;
}

Saving SuffixIndex::saving() const {
  Saving found{header(), {}};
  for (const auto& [id, problem] : problems_)
    for (const Segment& segment : problem.history)
      found.segments.emplace_back(id, segment);
  return found;
}

void Saving::write(const std::string& path) const {
  Store::Table all;
  for (const auto& [id, segment] : segments) {
    check(segment);
    all.emplace_back(id, &segment);
  }
  write_segments(path, true, header, all);
}

void SuffixIndex::give(const std::string& path, const Ids& problems) const {
  Store::Table given;
  for (uint64_t id : problems) {
    const auto it = problems_.find(id);
    if (it == problems_.end()) continue;
    for (const Segment& segment : it->second.history) {
      check(segment);
      given.emplace_back(id, &segment);
    }
  }
  write_segments(path, false, header(), given);
}

void SuffixIndex::absorb(const std::string& path, const Ids& problems) {
  const auto file = std::make_shared<SegmentFile>(path, false, false);
  const FileHeader& found = file->header();
  Store::Histories histories;
  for (size_t i = 0; i < found.count; ++i) {
    const uint64_t id = file->entry(i).problem;
    const bool is_wanted = id == kOthers ? others_tokens_ > 0 : problems.count(id) > 0;
    if (!is_wanted) continue;
    file->check(i);
    Segment segment = SegmentFile::segment(file, i);
    segment.file = nullptr;  // it is in memory only, so that a store writes it
    histories[id].push_back(std::move(segment));
  }
  std::vector<uint64_t> absorbed;
  for (const auto& [id, segments] : histories) absorbed.push_back(id);
  newest_ = std::max(newest_, found.newest);
  const Change change(*this, absorbed);
  for (uint64_t id : absorbed) {
    auto& history = problems_.at(id).history;
    const auto& older = histories.at(id);
    history.insert(history.begin(), older.begin(), older.end());
    if (history.size() <= tuning::SEGMENTS_PER_PROBLEM) continue;
    for (const Segment& segment : history) check(segment);
    history = das::merged(history);
    keep_newest_segments(history);
  }
}

void SuffixIndex::map_guest_history(const std::string& path) {
  const auto file = std::make_shared<SegmentFile>(path, true, true);
  Store::Histories histories;
  for (size_t i = 0; i < file->header().count; ++i) {
    file->check(i);
    histories[file->entry(i).problem].push_back(SegmentFile::segment(file, i));
  }
  for (auto& [id, segments] : histories) {
    Problem& problem = problems_[id];
    if (!problem.history.empty() || segments.size() > tuning::SEGMENTS_PER_PROBLEM)
      continue;
    problem.history = std::move(segments);
    count(id, 1);
    problem.find_visits();
    guests_.insert(id);
  }
}

void SuffixIndex::attach(const std::string& directory, bool write) {
  store_ = std::make_unique<Store>(directory);
  refresh(0);
  if (!write) return;
  store_->take_over();
  for (const auto& [id, problem] : problems_)
    if (id != kOthers && problem.history.size() > 1) unmerged_.insert(id);
}

void SuffixIndex::refresh(uint64_t generation) {
  if (!store_) return;
  const bool nothing_published =
      !generation && !store_->generation() && !store_->exists();
  if (nothing_published) return;
  auto read = store_->read(generation);
  replace_histories(std::move(read.histories), read.whole, read.header, "manifest");
  read.histories.clear();
  store_->keep(read);
}

uint64_t SuffixIndex::write(bool hurry) {
  std::vector<std::pair<uint64_t, Segment*>> moving;
  uint64_t num_bytes = 0;
  const auto move_segments = [&](uint64_t id, auto&& is_wanted) {
    const auto it = problems_.find(id);
    if (it == problems_.end()) return;
    for (Segment& segment : it->second.history) {
      if (!is_wanted(segment)) continue;
      moving.emplace_back(id, &segment);
      num_bytes += segment.nbytes();
    }
  };
  const auto is_unwritten = [](const Segment& segment) { return !segment.file; };
  for (uint64_t id : changed_) {
    if (num_bytes >= tuning::FILE_BYTES) break;
    move_segments(id, is_unwritten);
  }
  // Files that are not full, by the power of FILES_ALIKE that their bytes are.
  std::map<int, uint64_t> num_alike;
  const auto power = [](const SegmentFile& file) {
    return std::ilogb(file.used_bytes) / std::ilogb(tuning::FILES_ALIKE);
  };
  for (const auto& [number, file] : store_->files())
    if (file->used_bytes && file->used_bytes < tuning::FILE_BYTES)
      num_alike[power(*file)] += 1;
  for (const auto& [number, file] : store_->files()) {
    if (hurry || !file->used_bytes) continue;
    const bool many_small = file->used_bytes < tuning::FILE_BYTES &&
                            num_alike[power(*file)] >= tuning::FILES_ALIKE;
    const bool well_used =
        100 * file->used_bytes >= tuning::FILE_USED_PERCENT * file->body();
    if (!many_small && well_used) continue;
    for (size_t i = 0; i < file->header().count; ++i) {
      if (num_bytes >= tuning::FILE_BYTES) break;
      const auto is_entry = [i, file = file.get()](const Segment& segment) {
        return segment.file == file && segment.entry == i;
      };
      move_segments(file->entry(i).problem, is_entry);
    }
  }
  if (moving.empty()) return 0;
  for (const auto& [id, segment] : moving) check(*segment);
  for (const auto& [id, segment] : moving) changed_.insert(id);
  store_->write(moving, header());
  return num_bytes;
}

void SuffixIndex::publish(bool hurry) {
  while (write(hurry) >= tuning::FILE_BYTES) {
  }
  const auto list = [](Store::Table& table, uint64_t id, const History& history) {
    if (history.empty()) table.emplace_back(id, nullptr);
    for (const Segment& segment : history) table.emplace_back(id, &segment);
  };
  const History none;
  Store::Table changed;
  for (uint64_t id : changed_) {
    const auto it = problems_.find(id);
    list(changed, id, it == problems_.end() ? none : std::as_const(it->second.history));
  }
  const auto all = [&] {
    Store::Table table;
    for (const auto& [id, problem] : problems_)
      if (!problem.history.empty()) list(table, id, problem.history);
    return table;
  };
  store_->publish(changed, sealed_.segments, all, header());
  changed_.clear();
  if (sealed_group_) published_group_ = sealed_group_;
  sealed_group_ = 0;
}

FileHeader SuffixIndex::header() const {
  FileHeader header;
  header.newest = newest_;
  return header;
}

// Replaces histories by segments from files: all of them, or none if one is damaged.
void SuffixIndex::replace_histories(Store::Histories histories, bool whole,
                                    const FileHeader& header, const std::string& path) {
  for (const auto& [id, segments] : histories) {
    if (segments.size() > tuning::SEGMENTS_PER_PROBLEM)
      throw FileError(path, "problem " + std::to_string(id) + " has too many segments");
    const auto it = problems_.find(id);
    const bool has_requests = it != problems_.end() && !it->second.live.streams.empty();
    if (id != kOthers && !has_requests) continue;
    for (const Segment& segment : segments) check(segment);
  }
  newest_ = header.newest;
  if (whole)
    for (auto it = problems_.begin(); it != problems_.end();) {
      if (!guests_.count(it->first)) clear_history(it->first);
      it = it->second.empty() ? problems_.erase(it) : std::next(it);
    }
  for (auto& [id, segments] : histories) {
    Problem& problem = problems_[id];
    guests_.erase(id);
    count(id, -1);
    problem.history = std::move(segments);
    count(id, 1);
    if (!problem.live.streams.empty()) problem.find_visits();
    forget_if_empty(id);
  }
}

}  // namespace das

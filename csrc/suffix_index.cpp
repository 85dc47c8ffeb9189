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

constexpr uint64_t kWritten = 1 << 24;  // bytes of a file, about
constexpr uint64_t kCounts =
    75;  // percent of a file's bytes that count, or the others are written again
constexpr uint64_t kAlike =
    16;  // files of about one size, or they are written again as one
constexpr uint64_t kLeast =
    256;  // bytes that a problem keeps before whole problems are dropped
constexpr uint64_t kThinned =
    1 << 20;  // most tokens of a problem that are thinned out, which takes a second

// Collects the votes on the next token, `step` tokens after the places at which the
// candidates were found.
void poll(const std::vector<Candidate>& candidates, uint32_t step,
          std::vector<Vote>& votes) {
  votes.clear();
  for (const Candidate& c : candidates) {
    if (c.over()) continue;
    const uint32_t strength =
        std::min<uint32_t>(c.strength + 2 * step, vote_table().size() - 1);
    auto it = std::find_if(votes.begin(), votes.end(),
                           [&](const Vote& v) { return v.token == *c.next; });
    if (it == votes.end()) it = votes.insert(it, {*c.next, 0, 0, 0, true});
    it->votes += vote_table()[strength] * c.weight, ++it->count,
        it->strength = std::max(it->strength, strength);
    it->own &= c.own;
  }
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
  auto& staged = problems_[problem].staged;
  if (staged.empty()) staged_.push_back(problem);
  staged.emplace_back(narrow, Text(tokens, tokens + count));
}

uint64_t SuffixIndex::staged_tokens() const {
  uint64_t sum = 0;
  for (uint64_t id : staged_)
    for (const auto& [version, text] : problems_.at(id).staged) sum += text.size();
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

void SuffixIndex::count(const Problem& problem, int64_t sign) {
  for (const Segment& segment : problem.history) {
    bytes_ += sign * segment.nbytes(), tokens_ += sign * segment.token_count(),
        segments_ += sign;
    if (segment.file) segment.file->alive += sign * segment.nbytes();
  }
  known_ += problem.history.empty() ? 0 : sign;
}

SuffixIndex::Change::~Change() {
  for (uint64_t id : problems_) {
    Problem& problem = index_.problems_[id];
    index_.count(problem, 1);
    if (index_.store_) index_.changed_.insert(id);
    if (problem.history.size() > 1) index_.unmerged_.insert(id);
    index_.forget_if_empty(id);
  }
}

void SuffixIndex::forget_if_empty(uint64_t problem) {
  const auto it = problems_.find(problem);
  if (it != problems_.end() && it->second.empty()) problems_.erase(it);
}

void SuffixIndex::Problem::look() {
  visits.clear();
  for (const Segment& segment : history) {
    check(segment);
    for (const auto& run : segment.runs) visits.push_back(run.version);
  }
  std::sort(visits.rbegin(), visits.rend());
  visits.erase(std::unique(visits.begin(), visits.end()), visits.end());
}

uint64_t SuffixIndex::Problem::age(int64_t version) const {
  return std::lower_bound(visits.begin(), visits.end(), version, std::greater<>()) -
         visits.begin();
}

int64_t SuffixIndex::Problem::fitting(uint64_t most) const {
  std::map<int64_t, uint64_t, std::greater<>> sizes;
  for (const Segment& segment : history)
    for (const auto& run : segment.runs)
      sizes[run.version] += segment.end(run) - run.start;
  int64_t from = sizes.begin()->first;
  uint64_t sum = 0;
  for (const auto& [version, tokens] : sizes) {
    if ((sum += tokens) > most) break;
    from = version;
  }
  return from;
}

uint64_t SuffixIndex::seal(size_t window, size_t least, uint64_t tokens) {
  std::vector<uint64_t> chosen;
  uint64_t sealed = 0;
  for (uint64_t id : staged_) {
    const auto& staged = problems_.at(id).staged;
    if (staged.empty() || sealed >= tokens || staged.size() < least) continue;
    chosen.push_back(id);
    sealed_group_ = std::max(sealed_group_, staged.size());
    for (const auto& [version, text] : staged)
      sealed += text.size(), newest_ = std::max<int64_t>(newest_, version);
  }
  const auto waits = [&](uint64_t id) { return !problems_.at(id).staged.empty(); };
  const auto forget = [&](void*) {
    staged_.erase(std::remove_if(staged_.begin(), staged_.end(), std::not_fn(waits)),
                  staged_.end());
  };
  const std::unique_ptr<void, decltype(forget)> forgets(this,
                                                        forget);  // whatever is thrown
  {
    const Change change(*this, chosen);
    for (uint64_t id : chosen) {
      Problem& problem = problems_.at(id);
      auto& history = problem.history;
      for (const Segment& segment : history) check(segment);  // before anything changes
      Builder fresh;
      for (const auto& [version, text] : problem.staged) {
        if (!fresh.fits(text.size() + 1))
          history.push_back(fresh.build()), fresh = Builder();
        fresh.add(text.data(), text.size(), version);
      }
      history.push_back(fresh.build());
      problem.staged = {};
      problem.look();
      problem.visits.resize(std::min(problem.visits.size(), window));
      if (history.size() > kSegments)
        history = merged(history, problem.visits.back());
      else
        drop_before(problem, problem.visits.back());
      if (history.size() > kSegments)
        history.erase(history.begin(), history.end() - kSegments);
    }
  }
  return sealed;
}

void SuffixIndex::drop_before(Problem& problem, int64_t from) const {
  std::vector<Segment> kept;
  for (const Segment& segment : problem.history) {
    const auto old = [&](const Segment::Run& run) { return run.version < from; };
    if (std::none_of(segment.runs.begin(), segment.runs.end(), old)) {
      kept.push_back(segment);
    } else if (!std::all_of(segment.runs.begin(), segment.runs.end(), old)) {
      Builder rest;
      rest.add(segment, from);
      kept.push_back(rest.build());
    }
  }
  problem.history = std::move(kept);
}

uint64_t SuffixIndex::merge(uint64_t tokens) {
  uint64_t merged = 0;
  while (!unmerged_.empty() && merged < tokens) {
    const uint64_t id = *unmerged_.begin();
    const auto it = problems_.find(id);
    const size_t count = it == problems_.end() ? 0 : mergeable(it->second.history);
    if (count > 1) {
      const Change change(*this, {id});
      auto& history = it->second.history;
      const auto first = history.end() - static_cast<ptrdiff_t>(count);
      for (auto segment = first; segment != history.end(); ++segment)
        check(*segment), merged += segment->token_count();
      *first = das::merged({first, history.end()}).front();
      history.erase(first + 1, history.end());
    }
    unmerged_.erase(id);
  }
  return merged;
}

SuffixIndex::Shrunk SuffixIndex::shrink(uint64_t max_bytes, uint64_t tokens) {
  struct Owner {
    Problem* problem;
    uint64_t bytes;
    std::pair<int64_t, uint64_t> seen;  // last version, and the problem
  };
  if (bytes_ <= max_bytes) return level_ = UINT64_MAX, Shrunk{0, 0, 0, 0};
  std::vector<Owner> owners;
  uint64_t least = 0;
  for (auto& [id, problem] : problems_) {
    if (problem.history.empty()) continue;
    Owner owner{&problem, nbytes(problem.history), {INT64_MIN, id}};
    for (const Segment& segment : problem.history)
      for (const auto& run : segment.runs)
        owner.seen.first = std::max<int64_t>(owner.seen.first, run.version);
    least += std::min(owner.bytes, kLeast);
    owners.push_back(owner);
  }
  Shrunk shrunk{token_count(), 0, 0, 0};
  if (least > max_bytes) {  // not all problems can keep something
    std::sort(owners.begin(), owners.end(),
              [](const Owner& a, const Owner& b) { return a.seen > b.seen; });
    for (; least > max_bytes; owners.pop_back(), ++shrunk.dropped) {
      Owner& owner = owners.back();
      least -= std::min(owner.bytes, kLeast);
      const Change change(*this, {owner.seen.second});
      owner.problem->history.clear(), owner.problem->visits.clear();
    }
  }
  std::sort(owners.begin(), owners.end(), [](const Owner& a, const Owner& b) {
    return std::tie(a.bytes, a.seen) < std::tie(b.bytes, b.seen);
  });
  uint64_t level = 0, below = 0;  // the most bytes of a problem with which all fit;
                                  // bytes of the problems below it
  for (size_t i = 0; i < owners.size(); below += owners[i++].bytes) {
    level = (max_bytes - below) / (owners.size() - i);
    if (level <= owners[i].bytes) break;
  }
  level_ = std::min(level_, level);
  // The largest are thinned out to less than that, so that a problem is not thinned out
  // every time.
  const uint64_t to = level_ / 4 * 3;
  for (uint64_t read = 0; bytes_ > max_bytes && read < tokens && !owners.empty();
       owners.pop_back(), ++shrunk.thinned) {
    Problem& problem = *owners.back().problem;
    const Change change(*this, {owners.back().seen.second});
    read += token_count(problem.history);
    thin(problem, to);
    shrunk.kept += token_count(problem.history);
  }
  if (bytes_ <= max_bytes) level_ = UINT64_MAX;
  shrunk.tokens -= token_count();
  return shrunk;
}

void SuffixIndex::thin(Problem& problem, uint64_t max_bytes) const {
  problem.look();
  const uint64_t tokens = token_count(problem.history);
  if (tokens > kThinned && problem.visits.size() > 1) {
    const double share =
        static_cast<double>(max_bytes) / static_cast<double>(nbytes(problem.history));
    drop_before(
        problem,
        problem.fitting(static_cast<uint64_t>(share * static_cast<double>(tokens))));
  } else {
    const std::vector<Segment> all = merged(problem.history);
    const uint64_t bytes = nbytes(all);
    problem.history.clear();
    for (const Segment& segment : all) {
      Builder rest;
      Thinning(segment).into(rest,
                             static_cast<uint64_t>(static_cast<double>(max_bytes) *
                                                   segment.nbytes() / bytes));
      if (!rest.empty()) problem.history.push_back(rest.build());
    }
  }
  problem.look();
}

SuffixIndex::History SuffixIndex::history(uint64_t id) const {
  const auto it = problems_.find(id);
  return it == problems_.end() ? History() : it->second.history;
}

SuffixIndex::Flat SuffixIndex::flat(const History& history, uint64_t most) {
  const auto words = [](const Segment& s) { return s.tokens.size + s.places.size; };
  Flat out;
  if (history.empty()) return out;
  Problem problem;
  problem.history = history;
  problem.look();
  if (history.size() > 1)
    problem.history = merged(history, problem.fitting(Segment::kCapacity - 2));
  // There are several where the newest visit alone is too large.
  Segment segment = *std::max_element(
      problem.history.begin(), problem.history.end(),
      [](const auto& a, const auto& b) { return a.tokens.size < b.tokens.size; });
  if (words(segment) > most) {
    Builder rest;
    const double share =
        static_cast<double>(most) / static_cast<double>(words(segment));
    Thinning(segment).into(
        rest,
        static_cast<uint64_t>(0.9 * share * static_cast<double>(segment.nbytes())));
    if (rest.empty()) return out;
    segment = rest.build();
    if (words(segment) > most) return out;
  }
  out.tokens.assign(segment.tokens.begin(), segment.tokens.end());
  std::vector<uint32_t> ages;
  for (const Segment::Run& run : segment.runs)
    ages.push_back(
        static_cast<uint32_t>(std::min<uint64_t>(problem.age(run.version), UINT8_MAX)));
  out.places.reserve(segment.places.size);
  for (const Segment::Place& p : segment.places)
    out.places.push_back(p.position |
                         ages[&segment.run(p.position) - segment.runs.begin()] << 24);
  return out;
}

int64_t SuffixIndex::open(uint64_t id, const Token* prompt, size_t count,
                          const Token* ahead, size_t ahead_count) {
  Problem& problem = problems_[id];
  problem.look();
  if (ahead_count) {
    problem.live.streams.push_back(std::make_unique<Stream>());
    Stream& written = *problem.live.streams.back();
    written.state = Stream::kClosed;
    problem.live.extend(written, ahead, ahead_count);
  }
  auto stream = std::make_unique<Stream>();
  if (count) {
    stream->prompt = problem.prompt.lock();
    const auto* known = stream->prompt ? &stream->prompt->front().tokens
                                       : nullptr;  // kStart, the prompt, kStart
    if (!known ||
        !std::equal(known->begin() + 1, known->end() - 1, prompt, prompt + count)) {
      Builder text;
      text.add(prompt, count, 0);
      stream->prompt = std::make_shared<std::vector<Segment>>(1, text.build());
    }
    problem.prompt = stream->prompt;
  }
  live_.insert(id);
  requests_[next_handle_] = {
      &problem, stream.get(), id, Text(ahead, ahead + ahead_count), {}, {}};
  problem.live.streams.push_back(std::move(stream));
  return next_handle_++;
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
  if (count) r.drafted.clear(), r.kinds.clear();
  const size_t at = r.stream->text.size() - 1,
               rest = r.ahead.size() - std::min(r.ahead.size(), at);
  if (count >= rest || !std::equal(tokens, tokens + count, r.ahead.begin() + at))
    r.ahead = {};
  r.problem->live.extend(*r.stream, tokens, count);
}

int64_t SuffixIndex::age(int64_t handle) const {
  const auto& visits = request(handle).problem->visits;
  return visits.empty() ? -1
                        : std::max<int64_t>(
                              0, newest_ - visits.front());  // a guest's may be newer
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
    if (!stays) clear_history(problems_.at(id)), forget_if_empty(id);
  }
}

void SuffixIndex::clear_history(Problem& problem) {
  count(problem, -1);
  problem.history.clear(), problem.visits.clear();
}

uint64_t SuffixIndex::live_bytes() const {
  uint64_t sum = 0;
  for (uint64_t id : live_)
    if (const auto it = problems_.find(id); it != problems_.end())
      sum += it->second.live.nbytes();
  return sum;
}

template <class Visit>
void SuffixIndex::search(const Request& request, Context response, Context whole,
                         Visit&& visit) const {
  das::search(
      request.problem->history, response,
      [&](const Segment& segment, const Segment::Place& p, uint32_t length) {
        const uint64_t age = request.problem->age(segment.run(p.position).version);
        const uint32_t weight = fading()[std::min<uint64_t>(age, fading().size() - 1)];
        visit(response, &segment.tokens[p.position], segment.tokens.end(), length,
              weight, false);
      });
  request.problem->live.search(
      response, [&](const Stream& stream, uint32_t position, uint32_t length) {
        const bool own = &stream == request.stream;
        visit(response, &stream.text[position], stream.text.data() + stream.text.size(),
              length, own ? kOwn : kSibling, own);
      });
  if (request.stream->prompt)
    das::search(*request.stream->prompt, whole,
                [&](const Segment& prompt, const Segment::Place& p, uint32_t length) {
                  visit(whole, &prompt.tokens[p.position], prompt.tokens.end(), length,
                        kPrompt, true);
                });
}

void SuffixIndex::gather(const Request& request, Scratch& scratch) const {
  // The end of the response with its draft, as far as it is compared; and the same
  // after the prompt, without kStart.
  auto& [candidates, votes, response_text, whole_text] = scratch;
  const size_t window = kDepth + kBeyond + 2;
  const Text& text = request.stream->text;
  response_text.assign(text.end() - std::min(text.size(), window), text.end());
  response_text.insert(response_text.end(), request.drafted.begin(),
                       request.drafted.end());
  whole_text.clear();
  if (request.stream->prompt) {
    const auto& prompt = request.stream->prompt->front().tokens;
    if (text.size() <= window)
      whole_text.assign(prompt.end() - 1 - std::min(prompt.size - 2, window),
                        prompt.end() - 1);
    whole_text.insert(whole_text.end(),
                      response_text.begin() + (response_text.front() == kStart),
                      response_text.end());
  }
  const auto ending = [](const Text& t) {
    return Context{t.data() + t.size(), static_cast<uint32_t>(t.size())};
  };
  const Context response = ending(response_text),
                whole = whole_text.empty() ? response : ending(whole_text);

  candidates.clear();
  uint32_t strongest = 0;
  search(request, response, whole,
         [&, out = &candidates](Context context, const Stored* last, const Stored* end,
                                uint32_t length, uint32_t weight, bool own) {
           const uint32_t beyond =
               length < kDepth ? match_beyond(context, last, length, kBeyond) : 0;
           out->push_back({last + 1, end, strength(length, beyond), weight, own});
           strongest = std::max(strongest, out->back().strength);
         });
  if (strongest >= kSure || response.size < 2) return;
  const Token written = response[0];
  search(request, response.without_last(), whole.without_last(),
         [&, out = &candidates](Context, const Stored* last, const Stored* end,
                                uint32_t length, uint32_t weight, bool own) {
           if (last[1] == written) return;  // found by the search above
           out->push_back(
               {last + 2, end, strength(0, std::min(length, kBeyond)), weight, own});
         });
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
  auto& candidates = scratch.candidates;
  r.drafted.clear(), r.kinds.clear();
  if (budget <= 0) return;
  double chance = 1;
  // Adds a token to what was drafted; returns whether the draft goes on.
  const auto add = [&](Token token, uint16_t kind) {
    r.drafted.push_back(token), r.kinds.push_back(kind);
    chance *= acceptance_.chance(kind);
    if (r.drafted.size() > static_cast<size_t>(budget) || chance < min_chance)
      return false;
    out.tokens.push_back(token);
    out.chances.push_back(std::max(static_cast<float>(chance), FLT_MIN));
    return true;
  };
  for (size_t at = r.stream->text.size() - 1; at < r.ahead.size(); ++at)
    if (!add(r.ahead[at], Acceptance::kAhead)) return;
  gather(r, scratch);
  const auto repeated = static_cast<uint32_t>(r.drafted.size());
  for (uint32_t step = repeated, searched = repeated;; ++step) {
    poll(candidates, step - searched, scratch.votes);
    if (scratch.votes.empty() &&
        step > searched) {  // all candidates ended here: search with the draft too
      gather(r, scratch);
      poll(candidates, 0, scratch.votes);
      searched = step;
    }
    if (scratch.votes.empty()) return;
    uint64_t all = 0;
    for (const Vote& v : scratch.votes) all += v.votes;
    const Vote best = *std::min_element(
        scratch.votes.begin(), scratch.votes.end(), [](const Vote& a, const Vote& b) {
          return a.votes != b.votes ? a.votes > b.votes : a.token < b.token;
        });
    const uint16_t kind =
        Acceptance::kind(best.votes, all, best.strength, best.count, best.own);
    if (!add(best.token, kind)) return;
    size_t agreeing = 0;
    for (const Candidate& c : candidates)
      if (!c.over() && *c.next == best.token)
        candidates[agreeing++] = {c.next + 1, c.end, c.strength, c.weight, c.own};
    candidates.resize(agreeing);
  }
}

bool SuffixIndex::has(uint64_t problem, const Token* tokens, size_t count,
                      int64_t version) const {
  const auto it = problems_.find(problem);
  if (it == problems_.end()) return false;
  for (const Segment& s : it->second.history) {
    check(s);
    for (const Segment::Run& run : s.runs) {
      if (run.version != version) continue;
      const Stored* const end = &s.tokens[s.end(run)];
      for (const Stored *text = &s.tokens[run.start], *next; text != end; text = next) {
        next = std::find_if(text + 1, end, [](Token token) { return token < 0; });
        if (*text == kStart && std::equal(text + 1, next, tokens, tokens + count))
          return true;
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
  for (const auto& [id, segment] : segments)
    check(segment), all.emplace_back(id, &segment);
  write_segments(path, true, header, all);
}

void SuffixIndex::give(const std::string& path, const Ids& problems) const {
  std::vector<std::pair<uint64_t, const Segment*>> all;
  for (uint64_t id : problems)
    if (const auto it = problems_.find(id); it != problems_.end())
      for (const Segment& segment : it->second.history)
        check(segment), all.emplace_back(id, &segment);
  write_segments(path, false, header(), all);
}

void SuffixIndex::absorb(const std::string& path, const Ids& problems) {
  const auto file = std::make_shared<SegmentFile>(path, false, false);
  const FileHeader& found = file->header();
  Store::Histories histories;
  for (size_t i = 0; i < found.count; ++i) {
    const uint64_t id = file->entry(i).problem;
    if (!problems.count(id)) continue;
    file->check(i);
    histories[id].push_back(SegmentFile::segment(file, i));
    histories[id].back().file =
        nullptr;  // it is in memory only, so that a store writes it
  }
  std::vector<uint64_t> taken;
  for (const auto& [id, list] : histories) taken.push_back(id);
  newest_ = std::max(newest_, found.newest);
  const Change change(*this, taken);
  for (uint64_t id : taken) {
    auto& history = problems_.at(id).history;
    const auto& older = histories.at(id);
    history.insert(history.begin(), older.begin(), older.end());
    if (history.size() <= kSegments) continue;
    for (const Segment& segment : history) check(segment);
    history = das::merged(history);
    if (history.size() > kSegments)
      history.erase(history.begin(), history.end() - kSegments);
  }
}

void SuffixIndex::visit(const std::string& path) {
  const auto file = std::make_shared<SegmentFile>(path, true, true);
  Store::Histories histories;
  for (size_t i = 0; i < file->header().count; ++i) {
    file->check(i);
    histories[file->entry(i).problem].push_back(SegmentFile::segment(file, i));
  }
  for (auto& [id, list] : histories) {
    Problem& problem = problems_[id];
    if (!problem.history.empty() || list.size() > kSegments) continue;
    problem.history = std::move(list);
    count(problem, 1);
    problem.look();
    guests_.insert(id);
  }
}

void SuffixIndex::attach(const std::string& directory, bool write) {
  store_ = std::make_unique<Store>(directory);
  refresh(0);
  if (!write) return;
  store_->take_over();
  for (const auto& [id, problem] : problems_)
    if (problem.history.size() > 1) unmerged_.insert(id);
}

void SuffixIndex::refresh(uint64_t generation) {
  if (!store_ || (!generation && !store_->generation() && !store_->exists()))
    return;  // nothing is published yet
  auto read = store_->read(generation);
  take(std::move(read.histories), read.whole, read.header, "manifest");
  read.histories.clear();
  store_->keep(read);
}

uint64_t SuffixIndex::write(bool hurry) {
  std::vector<std::pair<uint64_t, Segment*>> moving;
  uint64_t bytes = 0;
  const auto move = [&](uint64_t id, auto&& wanted) {
    const auto it = problems_.find(id);
    if (it == problems_.end()) return;
    for (Segment& segment : it->second.history)
      if (wanted(segment)) moving.emplace_back(id, &segment), bytes += segment.nbytes();
  };
  for (auto it = changed_.begin(); it != changed_.end() && bytes < kWritten; ++it)
    move(*it, [](const Segment& segment) { return !segment.file; });
  std::map<int, uint64_t>
      alike;  // files that are not full, by the power of kAlike that their bytes are
  const auto power = [](const SegmentFile& file) {
    return std::ilogb(file.alive) / std::ilogb(kAlike);
  };
  for (const auto& [number, file] : store_->files())
    if (file->alive && file->alive < kWritten) ++alike[power(*file)];
  for (const auto& [number, file] : store_->files()) {
    if (hurry || !file->alive) continue;
    const bool small = file->alive < kWritten && alike[power(*file)] >= kAlike;
    if (!small && 100 * file->alive >= kCounts * file->body()) continue;
    for (size_t i = 0; i < file->header().count && bytes < kWritten; ++i)
      move(file->entry(i).problem, [&, at = file.get()](const Segment& s) {
        return s.file == at && s.entry == i;
      });
  }
  if (moving.empty()) return 0;
  for (const auto& [id, segment] : moving) check(*segment);
  for (const auto& [id, segment] : moving) changed_.insert(id);
  store_->write(moving, header());
  return bytes;
}

void SuffixIndex::publish(bool hurry) {
  while (write(hurry) >= kWritten) {
  }
  const auto list = [&](Store::Table& table, uint64_t id,
                        const std::vector<Segment>& history) {
    if (history.empty()) table.emplace_back(id, nullptr);
    for (const Segment& segment : history) table.emplace_back(id, &segment);
  };
  const std::vector<Segment> none;
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
  store_->publish(changed, segments_, all, header());
  changed_.clear();
  if (sealed_group_) group_ = sealed_group_;
  sealed_group_ = 0;
}

FileHeader SuffixIndex::header() const {
  FileHeader header;
  header.newest = newest_;
  return header;
}

// Replaces histories by segments from files: all of them, or none if one is damaged.
void SuffixIndex::take(Store::Histories histories, bool whole, const FileHeader& header,
                       const std::string& path) {
  for (const auto& [id, list] : histories) {
    if (list.size() > kSegments)
      throw FileError(path, "problem " + std::to_string(id) + " has too many segments");
    const auto it = problems_.find(id);
    if (it == problems_.end() || it->second.live.streams.empty()) continue;
    for (const Segment& segment : list) check(segment);
  }
  newest_ = header.newest;
  if (whole)
    for (auto it = problems_.begin(); it != problems_.end();) {
      if (!guests_.count(it->first)) clear_history(it->second);
      it = it->second.empty() ? problems_.erase(it) : std::next(it);
    }
  for (auto& [id, list] : histories) {
    Problem& problem = problems_[id];
    guests_.erase(id);
    count(problem, -1);
    problem.history = std::move(list);
    count(problem, 1);
    if (!problem.live.streams.empty()) problem.look();
    forget_if_empty(id);
  }
}

}  // namespace das

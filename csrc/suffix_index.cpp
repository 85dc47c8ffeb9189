// Suffix index: see suffix_index.hpp, and das_adapter/core/index/ for the Python face and the reference.
#include "suffix_index.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cfloat>
#include <cmath>
#include <stdexcept>

#include "suffix_file.hpp"

namespace nb = nanobind;

namespace das {

namespace {
constexpr uint32_t kExact = 16;  // places taken per source with the context itself
constexpr uint32_t kSkip = 8;    // places looked at per source with the context less its last token
constexpr uint32_t kOwn = 512, kSibling = 256, kPrompt = 64;
}  // namespace

SuffixIndex::SuffixIndex(uint32_t max_depth, double half_life) : depth_(max_depth), fading_(256) {
  for (size_t age = 0; age < fading_.size(); ++age)
    fading_[age] = std::max<uint32_t>(1, std::lround(kSibling * std::exp2(-static_cast<double>(age) / half_life)));
}

void SuffixIndex::add(uint64_t problem, const Token* tokens, size_t count, int64_t version) {
  if (count) problems_[problem].staged.emplace_back(version, Text(tokens, tokens + count));
}

void SuffixIndex::seal() {
  for (auto& [id, problem] : problems_) {
    if (problem.staged.empty()) continue;
    problem.history.append(problem.staged, depth_);
    for (const auto& [version, text] : problem.staged) newest_ = std::max(newest_, version);
    problem.staged = {};
  }
}

template <class Function>
void SuffixIndex::each_problem(Function&& function) {
  for (auto it = problems_.begin(); it != problems_.end();) {
    function(it->second);
    it = it->second.empty() ? problems_.erase(it) : std::next(it);
  }
}

uint64_t SuffixIndex::expire(int64_t before) {
  uint64_t dropped = 0;
  each_problem([&](Problem& problem) {
    dropped += problem.history.expire(before);
    auto& staged = problem.staged;
    staged.erase(std::remove_if(staged.begin(), staged.end(),
                                [&](const auto& s) {
                                  if (s.first < before) dropped += s.second.size();
                                  return s.first < before;
                                }),
                 staged.end());
  });
  return dropped;
}

uint64_t SuffixIndex::shrink(uint64_t max_bytes) {
  uint64_t dropped = 0;
  while (nbytes() > max_bytes) {
    int64_t oldest = INT64_MAX;
    for (const auto& [id, problem] : problems_)
      for (const auto& t : problem.history.trajectories()) oldest = std::min(oldest, t.version);
    dropped += expire(oldest + 1);
  }
  return dropped;
}

int64_t SuffixIndex::open(uint64_t id, const Token* prompt, size_t count) {
  Problem& problem = problems_[id];
  auto stream = std::make_unique<Stream>();
  if (count) {
    const Text& known = problem.prompt ? problem.prompt->tokens() : Text{};
    if (known.size() != count + 2 || !std::equal(prompt, prompt + count, known.begin() + 1)) {
      auto segment = std::make_shared<Segment>();
      segment->append({{0, Text(prompt, prompt + count)}}, depth_);
      problem.prompt = std::move(segment);
    }
    stream->prompt = problem.prompt;
  }
  requests_[next_handle_] = {&problem, stream.get(), id, {}, {}};
  problem.live.streams.push_back(std::move(stream));
  return next_handle_++;
}

SuffixIndex::Request& SuffixIndex::request(int64_t handle) { return requests_.at(handle); }

void SuffixIndex::extend(int64_t handle, const Token* tokens, size_t count) {
  Request& r = request(handle);
  for (size_t i = 0; i < std::min(count, r.drafted.size()); ++i) {
    const bool accepted = tokens[i] == r.drafted[i];
    acceptance_.learn(r.kinds[i], accepted);
    if (!accepted) break;
  }
  if (count) r.drafted.clear(), r.kinds.clear();
  r.problem->live.extend(*r.stream, tokens, count);
}

void SuffixIndex::close(int64_t handle, bool keep) {
  const Request r = request(handle);
  requests_.erase(handle);
  r.stream->prompt.reset();
  if (keep) {
    r.stream->state = Stream::kClosed;
  } else {
    r.problem->live.forget(*r.stream);
    if (r.problem->empty()) problems_.erase(r.problem_id);
  }
}

void SuffixIndex::clear_live() {
  each_problem([](Problem& problem) { problem.live.forget_closed(); });
}

void SuffixIndex::gather(const Request& request) {
  candidates_.clear();
  const auto exact = [&](Context context, const Text& text, uint32_t position, uint32_t length, uint32_t weight) {
    const uint32_t beyond = length < depth_ ? match_beyond(context, &text[position], length, kBeyond) : 0;
    candidates_.push_back({&text[position] + 1, text.data() + text.size(), strength(length, beyond), weight});
  };
  const auto skip = [&](Token last, const Text& text, uint32_t position, uint32_t length, uint32_t weight) {
    if (text[position + 1] == last) return;  // an exact match
    const uint32_t beyond = std::min(length, kBeyond);
    candidates_.push_back({&text[position] + 2, text.data() + text.size(), strength(0, beyond), weight});
  };
  const auto segment = [&](const Segment& segment, Context context, auto&& weight) {
    const Text& text = segment.tokens();
    segment.search(context, depth_, kExact, [&](const Segment::Place& p, uint32_t length) {
      exact(context, text, p.position, length, weight(p));
    });
    if (context.size < 2) return;
    segment.search(context.without_last(), depth_, kSkip, [&](const Segment::Place& p, uint32_t length) {
      skip(context[0], text, p.position, length, weight(p));
    });
  };

  const Stream& own = *request.stream;
  const Context context{own.text.data() + own.text.size(), static_cast<uint32_t>(own.text.size())};
  const Segment& history = request.problem->history;
  segment(history, context, [&](const Segment::Place& p) {
    const int64_t age = newest_ - history.trajectories()[p.trajectory].version;
    return fading_[std::min<uint64_t>(age, fading_.size() - 1)];
  });
  const Live& live = request.problem->live;
  const auto weight = [&](const Stream& stream) { return &stream == &own ? kOwn : kSibling; };
  live.search(context, depth_, [&](const Stream& stream, uint32_t position, uint32_t length) {
    exact(context, stream.text, position, length, weight(stream));
  });
  if (context.size >= 2)
    live.search(context.without_last(), depth_, [&](const Stream& stream, uint32_t position, uint32_t length) {
      skip(context[0], stream.text, position, length, weight(stream));
    });
  if (!own.prompt) return;
  // The prompt is searched with the request's whole text, prompt included, in place of kStart.
  const uint32_t window = depth_ + kBeyond + 2, written = context.size - 1;
  const Text& prompt = own.prompt->tokens();
  context_.assign(context.end - std::min(written, window), context.end);
  if (written < window) {
    const auto tail = std::min<size_t>(window - written, prompt.size() - 2);
    context_.insert(context_.begin(), prompt.end() - 1 - tail, prompt.end() - 1);
  }
  segment(*own.prompt, {context_.data() + context_.size(), static_cast<uint32_t>(context_.size())},
          [](const Segment::Place&) { return kPrompt; });
}

void SuffixIndex::draft(int64_t handle, int64_t budget, double min_chance, Text& tokens, std::vector<float>& chances) {
  Request& r = request(handle);
  r.drafted.clear(), r.kinds.clear();
  if (budget <= 0) return;
  gather(r);
  struct Vote {
    Token token;
    uint32_t count, strength;
    uint64_t votes;
  };
  static thread_local std::vector<Vote> poll;
  double chance = 1;
  for (uint32_t step = 0;; ++step) {
    poll.clear();
    uint64_t all = 0;
    for (const Candidate& c : candidates_) {
      if (c.over()) continue;
      const uint32_t strength = std::min<uint32_t>(c.strength + 2 * step, votes().size() - 1);
      const uint64_t vote = votes()[strength] * c.weight;
      all += vote;
      auto it = std::find_if(poll.begin(), poll.end(), [&](const Vote& v) { return v.token == *c.next; });
      if (it == poll.end()) it = poll.insert(it, {*c.next, 0, 0, 0});
      it->votes += vote, ++it->count, it->strength = std::max(it->strength, strength);
    }
    if (poll.empty()) return;
    const Vote best = *std::min_element(poll.begin(), poll.end(), [](const Vote& a, const Vote& b) {
      return a.votes != b.votes ? a.votes > b.votes : a.token < b.token;
    });
    const uint16_t kind = Acceptance::kind(best.votes, all, best.strength, best.count);
    r.drafted.push_back(best.token), r.kinds.push_back(kind);
    chance *= acceptance_.chance(kind);
    if (step == budget || chance < min_chance) return;
    tokens.push_back(best.token);
    chances.push_back(std::max(static_cast<float>(chance), FLT_MIN));
    size_t agreeing = 0;
    for (const Candidate& c : candidates_)
      if (!c.over() && *c.next == best.token) candidates_[agreeing++] = {c.next + 1, c.end, c.strength, c.weight};
    candidates_.resize(agreeing);
  }
}

uint64_t SuffixIndex::nbytes() const {
  uint64_t sum = 0;
  for (const auto& [id, problem] : problems_) sum += problem.history.nbytes();
  return sum;
}

uint64_t SuffixIndex::token_count() const {
  uint64_t sum = 0;
  for (const auto& [id, problem] : problems_) sum += problem.history.token_count();
  return sum;
}

uint64_t SuffixIndex::problem_count() const {
  uint64_t sum = 0;
  for (const auto& [id, problem] : problems_) sum += !problem.history.empty();
  return sum;
}

void SuffixIndex::save(const std::string& path) const {
  Writer file(path);
  file.value<uint64_t>(depth_);
  file.value<uint64_t>(problem_count());
  for (const auto& [id, problem] : problems_) {
    if (problem.history.empty()) continue;
    file.value<uint64_t>(id);
    file.array(problem.history.tokens());
    file.array(problem.history.places());
    file.array(problem.history.trajectories());
  }
  file.finish();
}

void SuffixIndex::load(const std::string& path) {
  Reader file(path);
  depth_ = static_cast<uint32_t>(file.value<uint64_t>());
  for (auto left = file.value<uint64_t>(); left; --left) {
    Segment& history = problems_[file.value<uint64_t>()].history;
    auto tokens = file.array<Token>();
    auto places = file.array<Segment::Place>();
    auto trajectories = file.array<Segment::Trajectory>();
    for (const auto& t : trajectories) newest_ = std::max(newest_, t.version);
    if (!history.assign(std::move(tokens), std::move(places), std::move(trajectories)))
      throw FileError("its arrays contradict each other");
  }
  file.finish();
}

namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_tokens(const Array<Token>& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens.data()[i] < 0)
      throw nb::value_error(("token id " + std::to_string(tokens.data()[i]) + " at position " + std::to_string(i) +
                             ": token ids are >= 0").c_str());
}

void check_handle(const SuffixIndex& index, int64_t handle) {
  if (!index.is_open(handle)) throw nb::key_error(std::to_string(handle).c_str());
}

template <class T>
nb::object owned(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

void extend_many(SuffixIndex& index, const Array<int64_t>& handles, const Array<Token>& tokens,
                 const Array<int64_t>& offsets) {
  const size_t n = handles.size();
  const int64_t *h = handles.data(), *o = offsets.data();
  bool sound = offsets.size() == n + 1 && o[0] == 0 && o[n] == static_cast<int64_t>(tokens.size());
  for (size_t i = 0; sound && i < n; ++i) sound = o[i] <= o[i + 1];
  if (!sound) throw nb::value_error("offsets: expected len(handles) + 1 ascending numbers from 0 to len(tokens)");
  check_tokens(tokens);
  for (size_t i = 0; i < n; ++i) check_handle(index, h[i]);
  nb::gil_scoped_release unlocked;
  for (size_t i = 0; i < n; ++i) index.extend(h[i], tokens.data() + o[i], static_cast<size_t>(o[i + 1] - o[i]));
}

nb::tuple draft_flat(SuffixIndex& index, const Array<int64_t>& handles, const Array<int64_t>& budgets,
                     double min_chance) {
  const size_t n = handles.size();
  if (budgets.size() != n) throw nb::value_error("budgets: expected one per handle");
  for (size_t i = 0; i < n; ++i) check_handle(index, handles.data()[i]);
  Text tokens;
  std::vector<float> chances;
  std::vector<int64_t> offsets{0};
  {
    nb::gil_scoped_release unlocked;
    offsets.reserve(n + 1);
    for (size_t i = 0; i < n; ++i) {
      index.draft(handles.data()[i], budgets.data()[i], min_chance, tokens, chances);
      offsets.push_back(static_cast<int64_t>(tokens.size()));
    }
  }
  return nb::make_tuple(owned(std::move(tokens)), owned(std::move(chances)), owned(std::move(offsets)));
}

}  // namespace
}  // namespace das

void bind_suffix_index(nb::module_& m) {
  using das::SuffixIndex;
  using Tokens = das::Array<das::Token>;
  nb::exception<das::FileError>(m, "SuffixFileError");
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const std::system_error& e) {
      errno = e.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    }
  });
  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def(nb::init<uint32_t, double>())
      .def("add", [](SuffixIndex& index, uint64_t problem, const Tokens& tokens, int64_t version) {
        das::check_tokens(tokens);
        index.add(problem, tokens.data(), tokens.size(), version);
      })
      .def("seal", &SuffixIndex::seal, nb::call_guard<nb::gil_scoped_release>())
      .def("expire", &SuffixIndex::expire, nb::call_guard<nb::gil_scoped_release>())
      .def("shrink", &SuffixIndex::shrink, nb::call_guard<nb::gil_scoped_release>())
      .def("save", &SuffixIndex::save, nb::call_guard<nb::gil_scoped_release>())
      .def("load", &SuffixIndex::load, nb::call_guard<nb::gil_scoped_release>())
      .def("open", [](SuffixIndex& index, uint64_t problem, const Tokens& prompt, const Tokens& prefix) {
        das::check_tokens(prompt);
        das::check_tokens(prefix);
        const int64_t handle = index.open(problem, prompt.data(), prompt.size());
        index.extend(handle, prefix.data(), prefix.size());
        return handle;
      })
      .def("extend", [](SuffixIndex& index, int64_t handle, const Tokens& tokens) {
        das::check_handle(index, handle);
        das::check_tokens(tokens);
        index.extend(handle, tokens.data(), tokens.size());
      })
      .def("extend_many", &das::extend_many)
      .def("draft_flat", &das::draft_flat)
      .def("close", [](SuffixIndex& index, int64_t handle, bool keep) {
        das::check_handle(index, handle);
        index.close(handle, keep);
      })
      .def("clear_live", &SuffixIndex::clear_live)
      .def_prop_ro("max_depth", &SuffixIndex::max_depth)
      .def_prop_ro("nbytes", &SuffixIndex::nbytes)
      .def_prop_ro("tokens", &SuffixIndex::token_count)
      .def_prop_ro("problems", &SuffixIndex::problem_count);
}

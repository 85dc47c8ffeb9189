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
constexpr uint32_t kSure = 8;  // strength of a match from which on places that differ in the last token don't matter
constexpr uint32_t kOwn = 512, kSibling = 256, kPrompt = 64;  // weights; newest history weighs as much as a sibling
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
    stream->prompt = problem.prompt.lock();
    const Text* known = stream->prompt ? &stream->prompt->tokens() : nullptr;  // kStart, the prompt, kStart
    if (!known || !std::equal(known->begin() + 1, known->end() - 1, prompt, prompt + count)) {
      auto segment = std::make_shared<Segment>();
      segment->append({{0, Text(prompt, prompt + count)}}, depth_);
      stream->prompt = std::move(segment);
    }
    problem.prompt = stream->prompt;
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

template <class Visit>
void SuffixIndex::search(const Request& request, Context response, Context whole, Visit&& visit) const {
  const Segment& history = request.problem->history;
  history.search(response, depth_, [&](const Segment::Place& p, uint32_t length) {
    const int64_t age = newest_ - history.trajectories()[p.trajectory].version;
    visit(response, history.tokens(), p.position, length, fading_[std::min<uint64_t>(age, fading_.size() - 1)]);
  });
  request.problem->live.search(response, depth_, [&](const Stream& stream, uint32_t position, uint32_t length) {
    visit(response, stream.text, position, length, &stream == request.stream ? kOwn : kSibling);
  });
  if (const Segment* prompt = request.stream->prompt.get())
    prompt->search(whole, depth_, [&](const Segment::Place& p, uint32_t length) {
      visit(whole, prompt->tokens(), p.position, length, kPrompt);
    });
}

void SuffixIndex::gather(const Request& request) {
  // What can be compared of the response with its draft, and of the same with the prompt in place of kStart.
  const size_t window = depth_ + kBeyond + 2;
  const Text& text = request.stream->text;
  response_.assign(text.end() - std::min(text.size(), window), text.end());
  response_.insert(response_.end(), request.drafted.begin(), request.drafted.end());
  whole_.clear();
  if (request.stream->prompt) {
    const Text& prompt = request.stream->prompt->tokens();
    if (text.size() <= window) whole_.assign(prompt.end() - 1 - std::min(prompt.size() - 2, window), prompt.end() - 1);
    whole_.insert(whole_.end(), response_.begin() + (response_.front() == kStart), response_.end());
  }
  const Context response{response_.data() + response_.size(), static_cast<uint32_t>(response_.size())};
  const Context whole =
      whole_.empty() ? response : Context{whole_.data() + whole_.size(), static_cast<uint32_t>(whole_.size())};

  candidates_.clear();
  uint32_t strongest = 0;
  search(request, response, whole,
         [&](Context context, const Text& text, uint32_t position, uint32_t length, uint32_t weight) {
           const uint32_t beyond = length < depth_ ? match_beyond(context, &text[position], length, kBeyond) : 0;
           candidates_.push_back({&text[position] + 1, text.data() + text.size(), strength(length, beyond), weight});
           strongest = std::max(strongest, candidates_.back().strength);
         });
  if (strongest >= kSure || response.size < 2) return;
  const Token last = response[0];
  search(request, response.without_last(), whole.without_last(),
         [&](Context, const Text& text, uint32_t position, uint32_t length, uint32_t weight) {
           if (text[position + 1] == last) return;  // matches as it is
           const uint32_t known = strength(0, std::min(length, kBeyond));
           candidates_.push_back({&text[position] + 2, text.data() + text.size(), known, weight});
         });
}

void SuffixIndex::poll(uint32_t step) {
  votes_.clear();
  for (const Candidate& c : candidates_) {
    if (c.over()) continue;
    const uint32_t strength = std::min<uint32_t>(c.strength + 2 * step, vote_table().size() - 1);
    auto it = std::find_if(votes_.begin(), votes_.end(), [&](const Vote& v) { return v.token == *c.next; });
    if (it == votes_.end()) it = votes_.insert(it, {*c.next, 0, 0, 0});
    it->votes += vote_table()[strength] * c.weight, ++it->count, it->strength = std::max(it->strength, strength);
  }
}

void SuffixIndex::draft(int64_t handle, int64_t budget, double min_chance, Text& tokens, std::vector<float>& chances) {
  Request& r = request(handle);
  r.drafted.clear(), r.kinds.clear();
  if (budget <= 0) return;
  gather(r);
  double chance = 1;
  for (uint32_t step = 0, searched = 0;; ++step) {
    poll(step - searched);
    if (votes_.empty() && step > searched) {  // every occurrence ended here: look for others of what is drafted now
      gather(r);
      poll(0);
      searched = step;
    }
    if (votes_.empty()) return;
    uint64_t all = 0;
    for (const Vote& v : votes_) all += v.votes;
    const Vote best = *std::min_element(votes_.begin(), votes_.end(), [](const Vote& a, const Vote& b) {
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

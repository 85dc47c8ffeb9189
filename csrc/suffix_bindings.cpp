// Python bindings of the suffix index: they check arguments, take numpy arrays and
// return them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "columns.hpp"
#include "suffix_shared.hpp"

namespace nb = nanobind;

namespace das {
namespace {

// Calls a function without Python's lock; with an index, in its turn.
template <class F>
auto unlocked(F&& call) {
  nb::gil_scoped_release released;
  return call();
}

template <class F>
auto unlocked(SharedIndex& shared, F&& call) {
  return unlocked([&] { return shared.use(call); });
}

// A method of the index, for Python.
template <class R, class... A>
auto method(R (SuffixIndex::*call)(A...)) {
  return [call](SharedIndex& shared, A... given) {
    return shared.use([&](SuffixIndex& index) { return (index.*call)(given...); });
  };
}

template <class R, class... A>
auto method(R (SuffixIndex::*call)(A...) const) {
  return [call](SharedIndex& shared, A... given) {
    return shared.use(
        [&](const SuffixIndex& index) { return (index.*call)(given...); });
  };
}

void check_problem(uint64_t problem) {
  if (problem == kOthers)
    throw nb::value_error("problem: found 2^64 - 1, allowed: less");
}

void check_tokens(const Token* tokens, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] > kMaxToken)
      throw nb::value_error(("token id " + std::to_string(tokens[i]) + " at position " +
                             std::to_string(i) + ": token ids are 0 to " +
                             std::to_string(kMaxToken))
                                .c_str());
}

void check_tokens(const In<Token>& tokens) {
  check_tokens(tokens.data(), tokens.size());
}

SuffixIndex::Ids ids(const In<uint64_t>& problems) {
  return SuffixIndex::Ids(problems.data(), problems.data() + problems.size());
}

// Drafts one after the other: request i's are the tokens from offsets[i] to offsets[i +
// 1].
struct FlatDrafts {
  std::vector<Token> tokens;
  std::vector<float> chances;
  std::vector<int64_t> offsets{0};

  explicit FlatDrafts(const std::vector<SuffixIndex::Draft>& drafts = {}) {
    offsets.reserve(drafts.size() + 1);
    for (const auto& draft : drafts) {
      tokens.insert(tokens.end(), draft.tokens.begin(), draft.tokens.end());
      chances.insert(chances.end(), draft.chances.begin(), draft.chances.end());
      offsets.push_back(static_cast<int64_t>(tokens.size()));
    }
  }
};

// Drafts that the index's thread makes.
struct Drafting {
  SharedIndex& shared;
  std::shared_ptr<const FlatDrafts> drafts;
  std::shared_future<void> done;

  const FlatDrafts& wait() const {
    unlocked(shared, [](const SuffixIndex&) {});
    done.get();
    return *drafts;
  }

  nb::tuple result() const {
    FlatDrafts copy = wait();
    return nb::make_tuple(owned(std::move(copy.tokens)), owned(std::move(copy.chances)),
                          owned(std::move(copy.offsets)));
  }

  void put(const In<int64_t>& rows, const In<int64_t>& keep, Token largest,
           nb::list lists) const {
    const FlatDrafts& all = wait();
    if (keep.size() + 1 != all.offsets.size() || rows.size() != keep.size())
      throw nb::value_error("rows, keep: expected one per draft");
    for (size_t i = 0; i < keep.size(); ++i) {
      const Token* tokens = all.tokens.data() + all.offsets[i];
      const int64_t length = all.offsets[i + 1] - all.offsets[i];
      const int64_t num_kept = std::clamp<int64_t>(keep.data()[i], 0, length);
      nb::object list = nb::steal(PyList_New(num_kept));
      for (int64_t j = 0; j < num_kept; ++j)
        PyList_SetItem(list.ptr(), j, PyLong_FromLong(std::min(tokens[j], largest)));
      lists[rows.data()[i]] = list;
    }
  }
};

using TokenRows = nb::ndarray<const Token, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Tokens of a batch, one request's after the other's.
struct Written {
  std::vector<Token> tokens;
  std::vector<size_t> counts;
};

// Copies tokens[rows[i], begins[i]:ends[i]] of each request.
Written written_tokens(const TokenRows& tokens, const In<int64_t>& rows,
                       const In<int64_t>& begins, const In<int64_t>& ends, size_t n) {
  const auto height = static_cast<int64_t>(tokens.shape(0));
  const auto width = static_cast<int64_t>(tokens.shape(1));
  bool sound = rows.size() == n && begins.size() == n && ends.size() == n;
  for (size_t i = 0; sound && i < n; ++i) {
    const int64_t row = rows.data()[i];
    const int64_t begin = begins.data()[i];
    const int64_t end = ends.data()[i];
    const bool in_rows = 0 <= row && row < height;
    sound = in_rows && 0 <= begin && begin <= end && end <= width;
  }
  if (!sound)
    throw nb::value_error(
        "rows, begins, ends: expected one per handle, and stretches of rows of tokens");
  Written written;
  for (size_t i = 0; i < n; ++i) {
    const Token* row = tokens.data() + rows.data()[i] * width;
    const Token* begin = row + begins.data()[i];
    const Token* end = row + ends.data()[i];
    check_tokens(begin, end - begin);
    written.counts.push_back(end - begin);
    written.tokens.insert(written.tokens.end(), begin, end);
  }
  return written;
}

Drafting draft_rows(SharedIndex& shared, const In<int64_t>& handles,
                    const TokenRows& tokens, const In<int64_t>& rows,
                    const In<int64_t>& begins, const In<int64_t>& ends,
                    const In<int64_t>& budgets, double min_chance) {
  const size_t n = handles.size();
  if (budgets.size() != n) throw nb::value_error("budgets: expected one per handle");
  const auto copied = [](const auto& array) {
    return std::vector(array.data(), array.data() + array.size());
  };
  const auto check = [&](const SuffixIndex& index) {
    index.check_open(handles.data(), n);
  };
  const auto drafts = std::make_shared<FlatDrafts>();
  auto work =
      [drafts, min_chance, written = written_tokens(tokens, rows, begins, ends, n),
       handles = copied(handles), budgets = copied(budgets)](SuffixIndex& index) {
        const Token* next = written.tokens.data();
        for (size_t i = 0; i < handles.size(); ++i) {
          if (written.counts[i]) index.extend(handles[i], next, written.counts[i]);
          next += written.counts[i];
        }
        *drafts = FlatDrafts(
            index.draft(handles.data(), budgets.data(), handles.size(), min_chance));
      };
  const bool wake = n > tuning::INLINE_REQUESTS;
  return {shared, drafts, shared.begin(check, wake, std::move(work))};
}

// The rules of drafting, which the kernels of vLLM's V2 runner take from here.
nb::dict rules() {
  const std::initializer_list<std::pair<const char*, int64_t>> numbers{
      {"START", kStart},
      {"PLACES", tuning::PLACES_PER_SEARCH},
      {"DEPTH", tuning::DEPTH_TOKENS},
      {"BEYOND", tuning::BEYOND_TOKENS},
      {"SURE", tuning::SURE_STRENGTH},
      {"STRONGEST", tuning::MOST_STRENGTH},
      {"OWN", tuning::OWN_WEIGHT},
      {"SIBLING", tuning::SIBLING_WEIGHT},
      {"PROMPT", tuning::PROMPT_WEIGHT},
      {"COUNTS", Acceptance::kCounts},
      {"PRIOR", static_cast<int64_t>(tuning::PRIOR_TOKENS)},
      {"DOUBT", static_cast<int64_t>(tuning::SOURCE_PRIOR_TOKENS)},
      {"MEMORY", tuning::MEMORY_TOKENS},
      {"KEPT", tuning::SYNC_TOKENS}};
  nb::dict found;
  for (const auto& [name, value] : numbers) found[name] = value;
  const auto& shares = tuning::SHARE_STEPS;
  const auto& strengths = tuning::STRENGTH_STEPS;
  const auto& weights = weights_by_age();
  found["SHARES"] = nb::cast(std::vector<double>(shares.begin(), shares.end()));
  found["STRENGTHS"] =
      nb::cast(std::vector<int64_t>(strengths.begin(), strengths.end()));
  found["FADING"] = owned(std::vector<int32_t>(weights.begin(), weights.end()));
  const Acceptance fresh;
  const auto& chances = fresh.prior_chance;
  found["CHANCES"] = owned(std::vector<double>(chances.begin(), chances.end()));
  return found;
}

void check_kinds(const In<uint16_t>& kinds) {
  for (size_t i = 0; i < kinds.size(); ++i)
    if (kinds.data()[i] > Acceptance::kAhead)
      throw std::invalid_argument("Acceptance: no such kind of token");
}

}  // namespace
}  // namespace das

void bind_suffix_index(nb::module_& m) {
  using das::SharedIndex, das::SuffixIndex, das::method;
  using Tokens = In<das::Token>;
  using unlocked = nb::call_guard<nb::gil_scoped_release>;
  m.def("drafting_rules", &das::rules);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const das::FileError& e) {
      PyErr_SetString(nb::module_::import_("das_adapter.core.index.errors")
                          .attr("IndexFileError")
                          .ptr(),
                      e.what());
    } catch (const std::filesystem::filesystem_error& e) {
      errno = e.code().value();
      PyErr_SetFromErrnoWithFilename(PyExc_OSError, e.path1().c_str());
    }
  });
  m.def("read_index_file", [](const std::string& path, bool check) {
    das::SegmentFile file(path, false, false);
    const auto check_segment = [&file](size_t i) {
      file.check(i);
      file.forget(i);
    };
    std::vector<uint64_t> problems;
    for (size_t i = 0; i < file.header().count; ++i) {
      if (check) das::unlocked([&] { check_segment(i); });
      problems.push_back(file.entry(i).problem);
    }
    return nb::make_tuple(owned(std::move(problems)), file.header().newest);
  });
  nb::class_<das::Acceptance>(m, "Acceptance")
      .def(nb::init<>())
      .def(
          "chances",
          [](const das::Acceptance& acceptance, const In<uint16_t>& kinds) {
            das::check_kinds(kinds);
            std::vector<float> chances(kinds.size());
            for (size_t i = 0; i < kinds.size(); ++i)
              chances[i] = static_cast<float>(acceptance.chance(kinds.data()[i]));
            return owned(std::move(chances));
          },
          "Return the chance of a token of each kind, float32 [n].")
      .def(
          "learn",
          [](das::Acceptance& acceptance, const In<uint16_t>& kinds,
             const In<bool>& accepted) {
            das::check_kinds(kinds);
            if (accepted.size() != kinds.size())
              throw std::invalid_argument("learn: kinds and accepted differ in length");
            for (size_t i = 0; i < kinds.size(); ++i) {
              acceptance.learn(kinds.data()[i], accepted.data()[i]);
              if (!accepted.data()[i]) break;
            }
          },
          "Learn from a draft up to its first token that was not accepted.")
      .def("forget", &das::Acceptance::forget, "Reduce the counts, at a weight sync.");
  nb::class_<das::Drafting>(m, "Drafting")
      .def("result", &das::Drafting::result)
      .def("put", &das::Drafting::put);
  nb::class_<das::Saving>(m, "Saving").def("write", &das::Saving::write, unlocked());
  nb::class_<SharedIndex>(m, "SuffixIndex")
      .def(nb::init<bool>(), nb::arg("others") = true)
      .def("add",
           [](SharedIndex& shared, uint64_t problem, const Tokens& tokens,
              int64_t version) {
             das::check_problem(problem);
             das::check_tokens(tokens);
             shared.use([&](SuffixIndex& index) {
               index.add(problem, tokens.data(), tokens.size(), version);
             });
           })
      .def("share_texts", method(&SuffixIndex::share_texts))
      .def("seal", method(&SuffixIndex::seal), unlocked(), nb::arg("window"),
           nb::arg("min_texts") = 0, nb::arg("max_tokens") = UINT64_MAX)
      .def("merge", method(&SuffixIndex::merge), unlocked())
      .def("merge_others", method(&SuffixIndex::merge_others), unlocked())
      .def("shrink",
           [](SharedIndex& shared, uint64_t max_bytes, uint64_t max_tokens) {
             const auto shrunk = das::unlocked(shared, [&](SuffixIndex& index) {
               return index.shrink(max_bytes, max_tokens);
             });
             return nb::make_tuple(shrunk.tokens, shrunk.thinned, shrunk.dropped,
                                   shrunk.kept);
           })
      .def("saving", method(&SuffixIndex::saving), unlocked())
      .def("give",
           [](SharedIndex& shared, const std::string& path,
              const In<uint64_t>& problems) {
             das::unlocked(shared, [&](const SuffixIndex& index) {
               index.give(path, das::ids(problems));
             });
           })
      .def("absorb",
           [](SharedIndex& shared, const std::string& path,
              const In<uint64_t>& problems) {
             das::unlocked(shared, [&](SuffixIndex& index) {
               index.absorb(path, das::ids(problems));
             });
           })
      .def("map_guest_history", method(&SuffixIndex::map_guest_history), unlocked())
      .def("attach", method(&SuffixIndex::attach), unlocked())
      .def("refresh", method(&SuffixIndex::refresh), unlocked())
      .def("forget_chances", method(&SuffixIndex::forget_chances), unlocked())
      .def("write", method(&SuffixIndex::write), unlocked(), nb::arg("hurry") = false)
      .def("has",
           [](SharedIndex& shared, uint64_t problem, const Tokens& tokens,
              int64_t version) {
             return das::unlocked(shared, [&](const SuffixIndex& index) {
               return index.has(problem, tokens.data(), tokens.size(), version);
             });
           })
      .def("publish", method(&SuffixIndex::publish), unlocked(),
           nb::arg("hurry") = false)
      .def("open",
           [](SharedIndex& shared, uint64_t problem, const Tokens& prompt,
              const Tokens& prefix, const Tokens& ahead) {
             das::check_problem(problem);
             for (const auto* tokens : {&prompt, &prefix, &ahead})
               das::check_tokens(*tokens);
             return shared.use([&](SuffixIndex& index) {
               const int64_t handle = index.open(problem, prompt.data(), prompt.size(),
                                                 ahead.data(), ahead.size());
               index.extend(handle, prefix.data(), prefix.size());
               return handle;
             });
           })
      .def("extend",
           [](SharedIndex& shared, int64_t handle, const Tokens& tokens) {
             das::check_tokens(tokens);
             shared.use([&](SuffixIndex& index) {
               index.extend(handle, tokens.data(), tokens.size());
             });
           })
      .def("draft_rows", &das::draft_rows, nb::keep_alive<0, 1>())
      .def("close", method(&SuffixIndex::close))
      .def("age", method(&SuffixIndex::age))
      .def("flat",
           [](SharedIndex& shared, uint64_t problem, uint64_t max_words) {
             const bool thins = problem != das::kOthers;
             const auto history = das::unlocked(shared, [&](const SuffixIndex& index) {
               return index.history(problem);
             });
             auto flat = das::unlocked(
                 [&] { return SuffixIndex::flat(history, max_words, thins); });
             return nb::make_tuple(owned(std::move(flat.tokens)),
                                   owned(std::move(flat.places)));
           })
      .def("clear_live", method(&SuffixIndex::clear_live))
      .def_prop_ro("has_others", method(&SuffixIndex::has_others))
      .def_prop_ro("generation", method(&SuffixIndex::generation))
      .def_prop_ro("file_bytes", method(&SuffixIndex::file_bytes))
      .def_prop_ro("nbytes", method(&SuffixIndex::nbytes))
      .def_prop_ro("tokens", method(&SuffixIndex::token_count))
      .def_prop_ro("problems", method(&SuffixIndex::problem_count))
      .def_prop_ro("newest", method(&SuffixIndex::newest))
      .def_prop_ro("staged_tokens", method(&SuffixIndex::staged_tokens))
      .def_prop_ro("live_bytes", method(&SuffixIndex::live_bytes))
      .def_prop_ro("group", method(&SuffixIndex::group));
}

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
struct Flat {
  std::vector<Token> tokens;
  std::vector<float> chances;
  std::vector<int64_t> offsets{0};

  explicit Flat(const std::vector<SuffixIndex::Draft>& drafts = {}) {
    offsets.reserve(drafts.size() + 1);
    for (const auto& draft : drafts) {
      tokens.insert(tokens.end(), draft.tokens.begin(), draft.tokens.end());
      chances.insert(chances.end(), draft.chances.begin(), draft.chances.end());
      offsets.push_back(static_cast<int64_t>(tokens.size()));
    }
  }
};

constexpr size_t kFew = 4;  // requests that are drafted for before a thread has woken

// Drafts that the index's thread makes.
struct Drafting {
  SharedIndex& shared;
  std::shared_ptr<const Flat> found;
  std::shared_future<void> done;

  const Flat& wait() const {
    unlocked(shared, [](const SuffixIndex&) {});
    done.get();
    return *found;
  }

  nb::tuple result() const {
    Flat all = wait();
    return nb::make_tuple(owned(std::move(all.tokens)), owned(std::move(all.chances)),
                          owned(std::move(all.offsets)));
  }

  void put(const In<int64_t>& rows, const In<int64_t>& keep, Token largest,
           nb::list lists) const {
    const Flat& all = wait();
    if (keep.size() + 1 != all.offsets.size() || rows.size() != keep.size())
      throw nb::value_error("rows, keep: expected one per draft");
    for (size_t i = 0; i < keep.size(); ++i) {
      const Token* tokens = all.tokens.data() + all.offsets[i];
      const size_t count =
          std::clamp<int64_t>(keep.data()[i], 0, all.offsets[i + 1] - all.offsets[i]);
      nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(count)));
      for (size_t j = 0; j < count; ++j)
        PyList_SetItem(list.ptr(), static_cast<Py_ssize_t>(j),
                       PyLong_FromLong(std::min(tokens[j], largest)));
      lists[rows.data()[i]] = list;
    }
  }
};

Drafting draft_rows(
    SharedIndex& shared, const In<int64_t>& handles,
    const nb::ndarray<const Token, nb::ndim<2>, nb::c_contig, nb::device::cpu>& tokens,
    const In<int64_t>& rows, const In<int64_t>& begins, const In<int64_t>& ends,
    const In<int64_t>& budgets, double min_chance) {
  const size_t n = handles.size();
  const auto height = static_cast<int64_t>(tokens.shape(0)),
             width = static_cast<int64_t>(tokens.shape(1));
  if (budgets.size() != n) throw nb::value_error("budgets: expected one per handle");
  bool sound = rows.size() == n && begins.size() == n && ends.size() == n;
  for (size_t i = 0; sound && i < n; ++i) {
    const int64_t row = rows.data()[i], begin = begins.data()[i], end = ends.data()[i];
    sound = 0 <= row && row < height && 0 <= begin && begin <= end && end <= width;
  }
  if (!sound)
    throw nb::value_error(
        "rows, begins, ends: expected one per handle, and stretches of rows of tokens");
  std::vector<Token> written;
  std::vector<size_t> counts;
  for (size_t i = 0; i < n; ++i) {
    const Token* row = tokens.data() + rows.data()[i] * width;
    counts.push_back(static_cast<size_t>(ends.data()[i] - begins.data()[i]));
    check_tokens(row + begins.data()[i], counts.back());
    written.insert(written.end(), row + begins.data()[i], row + ends.data()[i]);
  }
  const auto copied = [](const auto& array) {
    return std::vector(array.data(), array.data() + array.size());
  };
  const auto check = [&](const SuffixIndex& index) {
    index.check_open(handles.data(), n);
  };
  const auto found = std::make_shared<Flat>();
  auto work = [found, min_chance, written = std::move(written),
               counts = std::move(counts), handles = copied(handles),
               budgets = copied(budgets)](SuffixIndex& index) {
    const Token* next = written.data();
    for (size_t i = 0; i < counts.size(); next += counts[i++])
      if (counts[i]) index.extend(handles[i], next, counts[i]);
    *found =
        Flat(index.draft(handles.data(), budgets.data(), handles.size(), min_chance));
  };
  return {shared, found, shared.begin(check, n > kFew, std::move(work))};
}

// The rules of drafting, which the kernels of vLLM's V2 runner take from here.
nb::dict rules() {
  using A = Acceptance;
  nb::dict found;
  for (const auto& [name, value] :
       std::initializer_list<std::pair<const char*, int64_t>>{
           {"START", kStart},
           {"PLACES", kMost},
           {"DEPTH", kDepth},
           {"BEYOND", kBeyond},
           {"SURE", kSure},
           {"STRONGEST", static_cast<int64_t>(vote_table().size() - 1)},
           {"OWN", kOwn},
           {"SIBLING", kSibling},
           {"PROMPT", kPrompt},
           {"COUNTS", A::kCounts},
           {"PRIOR", static_cast<int64_t>(A::kPrior)},
           {"DOUBT", static_cast<int64_t>(A::kDoubt)},
           {"MEMORY", A::kMemory}})
    found[name] = value;
  found["SHARES"] =
      nb::cast(std::vector<double>(A::kShareSteps.begin(), A::kShareSteps.end()));
  found["STRENGTHS"] = nb::cast(
      std::vector<int64_t>(A::kStrengthSteps.begin(), A::kStrengthSteps.end()));
  found["FADING"] = owned(std::vector<int32_t>(fading().begin(), fading().end()));
  const A fresh;
  found["CHANCES"] = owned(std::vector<double>(fresh.start.begin(), fresh.start.end()));
  return found;
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
  m.def("read_index_file", [](const std::string& path, bool whole) {
    das::SegmentFile file(path, false, false);
    std::vector<uint64_t> found;
    for (size_t i = 0; i < file.header().count; ++i) {
      if (whole) das::unlocked([&] { file.check(i), file.forget(i); });
      found.push_back(file.entry(i).problem);
    }
    return nb::make_tuple(owned(std::move(found)), file.header().newest);
  });
  nb::class_<das::Drafting>(m, "Drafting")
      .def("result", &das::Drafting::result)
      .def("put", &das::Drafting::put);
  nb::class_<das::Saving>(m, "Saving").def("write", &das::Saving::write, unlocked());
  nb::class_<SharedIndex>(m, "SuffixIndex")
      .def(nb::init<>())
      .def("add",
           [](SharedIndex& shared, uint64_t problem, const Tokens& tokens,
              int64_t version) {
             das::check_tokens(tokens);
             shared.use([&](SuffixIndex& index) {
               index.add(problem, tokens.data(), tokens.size(), version);
             });
           })
      .def("seal", method(&SuffixIndex::seal), unlocked(), nb::arg("window"),
           nb::arg("least") = 0, nb::arg("tokens") = UINT64_MAX)
      .def("merge", method(&SuffixIndex::merge), unlocked())
      .def("shrink",
           [](SharedIndex& shared, uint64_t max_bytes, uint64_t tokens) {
             const auto shrunk = das::unlocked(shared, [&](SuffixIndex& index) {
               return index.shrink(max_bytes, tokens);
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
      .def("visit", method(&SuffixIndex::visit), unlocked())
      .def("attach", method(&SuffixIndex::attach), unlocked())
      .def("refresh", method(&SuffixIndex::refresh), unlocked())
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
           [](SharedIndex& shared, uint64_t problem, uint64_t most) {
             const auto history = das::unlocked(shared, [&](const SuffixIndex& index) {
               return index.history(problem);
             });
             auto flat =
                 das::unlocked([&] { return SuffixIndex::flat(history, most); });
             return nb::make_tuple(owned(std::move(flat.tokens)),
                                   owned(std::move(flat.places)));
           })
      .def("clear_live", method(&SuffixIndex::clear_live))
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

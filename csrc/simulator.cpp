// Decode steps of simulated engines between two questions to their drafters; das_adapter/sim/fleet.py explains it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "columns.hpp"

namespace nb = nanobind;

namespace {

template <class T>
using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct Draft {
  int64_t tokens, hits;
};

// The columns of das_adapter/sim/requests.py that a step reads and writes.
struct Columns {
  const In<int64_t>&length, &most, &prompt;
  Out<int64_t>&written, &forwards, &drafted, &accepted, &draft, &hits;

  void check(size_t rows) const {
    for (const auto* column : {&length, &most, &prompt})
      if (column->size() != rows) throw std::invalid_argument("walk: the columns differ in length");
    for (const auto* column : {&written, &forwards, &drafted, &accepted, &draft, &hits})
      if (column->size() != rows) throw std::invalid_argument("walk: the columns differ in length");
  }
};

// Drafts as a trace has them (das_adapter/sim/sources.py, Trace): token i survives with first * ratio ** i.
struct Traced {
  const int64_t *text, *ends;
  const uint8_t *drafted, *hits;
  const float *log_first, *log_ratio;
  int64_t size;

  Draft of(int64_t row, int64_t written, int64_t limit, double least) const {
    const int64_t at = std::min(ends[text[row]] + written, size - 1);
    int64_t count = std::min<int64_t>(limit, drafted[at]);
    if (count > 0 && std::isfinite(least)) {  // least: logarithm of the chance under which a draft ends
      const double room = log_first[at] - least;
      if (room < 0)
        count = 0;
      else if (log_ratio[at] < 0)
        count = std::min(count, static_cast<int64_t>(std::min(255.0, room / -log_ratio[at])) + 1);
    } else if (least > 0) {
      count = 0;
    }
    return {count, std::min<int64_t>(count, hits[at])};
  }
};

uint64_t mixed(uint64_t x) {  // SplitMix64
  x *= 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// Drafts that survive with given chances, by visit (das_adapter/sim/sources.py, Given).
struct Given {
  const int64_t* visit;
  const double* survival;
  int64_t visits, longest;
  double coverage;
  uint64_t seed;

  Draft of(int64_t row, int64_t written, int64_t limit, double least) const {
    const uint64_t key = mixed(mixed(static_cast<uint64_t>(row) + (seed << 32)) + static_cast<uint64_t>(written));
    const auto uniform = [](uint64_t bits) { return (static_cast<double>(bits) + 0.5) * 0x1p-32; };
    int64_t count = std::min(limit, longest);
    if (count <= 0 || uniform(key >> 32) >= coverage || (least > 0 && !std::isfinite(least))) return {0, 0};
    const double* chance = survival + std::min(visit[row], visits - 1) * longest;
    const double luck = uniform(key & 0xFFFFFFFFULL), lowest = std::exp(least);
    int64_t hit = 0;
    while (hit < longest && chance[hit] > luck) ++hit;
    while (count > 0 && chance[count - 1] < lowest) --count;
    return {count, std::min(hit, count)};
  }
};

// Steps each engine so often, or until one of its requests ends.
template <class Source>
void walk(const Source& source, const In<int64_t>& rows, const In<int64_t>& bounds, const In<int64_t>& steps,
          const In<double>& least, const In<int64_t>& limit, const Columns& of, Out<int64_t>& taken,
          Table<double>& tokens, Table<double>& context) {
  const size_t engines = taken.size(), width = tokens.shape(1), height = of.written.size();
  of.check(height);
  if (bounds.size() != engines + 1 || steps.size() != engines || tokens.shape(0) != engines ||
      context.shape(0) != engines || context.shape(1) != width || least.size() != rows.size() ||
      limit.size() != rows.size() || bounds.data()[0] != 0 ||
      bounds.data()[engines] != static_cast<int64_t>(rows.size()) ||
      !std::is_sorted(bounds.data(), bounds.data() + engines + 1))
    throw std::invalid_argument("walk: bounds, steps, taken, tokens and context differ in their number of engines");
  for (size_t i = 0; i < rows.size(); ++i)
    if (static_cast<size_t>(rows.data()[i]) >= height) throw std::out_of_range("walk: no such row");
  int64_t* written = of.written.data();
  for (size_t engine = 0; engine < engines; ++engine) {
    const int64_t begin = bounds.data()[engine], end = bounds.data()[engine + 1];
    const int64_t most = std::min<int64_t>(steps.data()[engine], static_cast<int64_t>(width));
    bool ended = false;
    int64_t step = 0;
    for (; step < most && !ended; ++step) {
      int64_t inside = 0, known = 0;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = rows.data()[i], draft = of.draft.data()[row], length = of.length.data()[row];
        inside += 1 + draft;
        known += of.prompt.data()[row] + written[row];
        const int64_t got = std::min(1 + std::min(draft, of.hits.data()[row]), length - written[row]);
        written[row] += got;
        of.forwards.data()[row] += 1;
        of.drafted.data()[row] += draft;
        of.accepted.data()[row] += got - 1;
        Draft next{0, 0};
        if (written[row] >= length) {
          ended = true;
        } else {
          const int64_t room = std::min(length, of.most.data()[row]) - 1 - written[row];
          if (room > 0) next = source.of(row, written[row], std::min(limit.data()[i], room), least.data()[i]);
        }
        of.draft.data()[row] = next.tokens;
        of.hits.data()[row] = next.hits;
      }
      tokens.data()[engine * width + step] = static_cast<double>(inside);
      context.data()[engine * width + step] = static_cast<double>(known);
    }
    taken.data()[engine] = step;
  }
}

}  // namespace

#define DAS_STEPS                                                                                                   \
  In<int64_t> rows, In<int64_t> bounds, In<int64_t> steps, In<double> least, In<int64_t> limit, In<int64_t> length, \
      In<int64_t> most, In<int64_t> prompt, Out<int64_t> written, Out<int64_t> forwards, Out<int64_t> drafted,      \
      Out<int64_t> accepted, Out<int64_t> draft, Out<int64_t> hits, Out<int64_t> taken, Table<double> tokens,       \
      Table<double> context
#define DAS_STEP_NAMES                                                                                         \
  nb::arg("rows"), nb::arg("bounds"), nb::arg("steps"), nb::arg("least"), nb::arg("limit"), nb::arg("length"), \
      nb::arg("most"), nb::arg("prompt"), nb::arg("written"), nb::arg("forwards"), nb::arg("drafted"),         \
      nb::arg("accepted"), nb::arg("draft"), nb::arg("hits"), nb::arg("taken"), nb::arg("tokens"), nb::arg("context")

void bind_simulator(nb::module_& m) {
  m.def(
      "walk_traced",
      [](DAS_STEPS, In<int64_t> text, In<int64_t> ends, In<uint8_t> trace_drafted, In<uint8_t> trace_hits,
         In<float> log_first, In<float> log_ratio) {
        const auto size = static_cast<int64_t>(trace_drafted.size());
        for (const int64_t i : {static_cast<int64_t>(trace_hits.size()), static_cast<int64_t>(log_first.size()),
                                static_cast<int64_t>(log_ratio.size())})
          if (i != size || !size) throw std::invalid_argument("walk: the parts of the trace differ in length");
        if (text.size() != written.size()) throw std::invalid_argument("walk: the columns differ in length");
        for (size_t i = 0; i < rows.size(); ++i)
          if (static_cast<size_t>(rows.data()[i]) >= text.size() ||
              static_cast<size_t>(text.data()[rows.data()[i]]) + 1 >= ends.size())
            throw std::out_of_range("walk: no such text");
        const Traced source{text.data(),      ends.data(), trace_drafted.data(), trace_hits.data(), log_first.data(),
                            log_ratio.data(), size};
        walk(source, rows, bounds, steps, least, limit,
             Columns{length, most, prompt, written, forwards, drafted, accepted, draft, hits}, taken, tokens, context);
      },
      DAS_STEP_NAMES, nb::arg("text"), nb::arg("ends"), nb::arg("trace_drafted"), nb::arg("trace_hits"),
      nb::arg("log_first"), nb::arg("log_ratio"),
      "Step engines with drafts from a trace: columns int64 [requests] change in place; taken int64 [engines] steps, "
      "and "
      "tokens and context of each, float64 [engines, steps], come out.");
  m.def(
      "walk_given",
      [](DAS_STEPS, In<int64_t> visit, Table<const double> survival, double coverage, uint64_t seed) {
        if (visit.size() != written.size()) throw std::invalid_argument("walk: the columns differ in length");
        const Given source{visit.data(),
                           survival.data(),
                           static_cast<int64_t>(survival.shape(0)),
                           static_cast<int64_t>(survival.shape(1)),
                           coverage,
                           seed};
        walk(source, rows, bounds, steps, least, limit,
             Columns{length, most, prompt, written, forwards, drafted, accepted, draft, hits}, taken, tokens, context);
      },
      DAS_STEP_NAMES, nb::arg("visit"), nb::arg("survival"), nb::arg("coverage"), nb::arg("seed"),
      "Step engines with drafts of given chances; see walk_traced.");
}

// Drafts of simulated requests, and decode steps of simulated engines between two questions to their drafters;
// das_adapter/sim/sources.py and fleet.py explain them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

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

uint64_t mixed(uint64_t x) {  // SplitMix64
  x *= 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// Drafts that survive with given chances: by visit, and of what was written ahead (das_adapter/sim/sources.py, Given).
struct Given {
  const int64_t *visit, *ahead, *same;
  const double* survival;
  int64_t visits, longest;
  uint64_t seed;

  Draft of(int64_t row, int64_t written, int64_t limit, double least) const {
    const uint64_t key = mixed(mixed(static_cast<uint64_t>(row) + (seed << 32)) + static_cast<uint64_t>(written));
    int64_t count = std::min(limit, longest);
    if (count <= 0 || (least > 0 && !std::isfinite(least))) return {0, 0};
    const double* chance = chances(row, written);
    const double luck = (static_cast<double>(key & 0xFFFFFFFFULL) + 0.5) * 0x1p-32, lowest = std::exp(least);
    int64_t hit = 0;
    if (repeats(row, written))
      hit = same[row] - written, count = std::min(count, ahead[row] - written);
    else
      while (hit < longest && chance[hit] > luck) ++hit;
    while (count > 0 && chance[count - 1] < lowest) --count;
    return {count, std::min(hit, count)};
  }

  // Whether a request has written nothing but what was written ahead of it, and there is more.
  bool repeats(int64_t row, int64_t written) const {
    return written < ahead[row] && written <= same[row] && survival[visits * longest] > 0.0;
  }

  const double* chances(int64_t row, int64_t written) const {
    const int64_t known = visit[row] + (written < ahead[row]);  // what diverged is a sibling's, as from a visit before
    return survival + (repeats(row, written) ? visits : std::min(known, visits - 1)) * longest;
  }
};

// Drafts of requests at where they are: chances, offsets and hits as in das_adapter/sim/sources.py, Offer.
nb::tuple offer(const Given& source, const In<int64_t>& rows, const In<int64_t>& limits, double least,
                const In<int64_t>& written) {
  if (limits.size() != rows.size()) throw std::invalid_argument("offer: expected one limit for each row");
  std::vector<float> chances;
  std::vector<int64_t> offsets{0}, hits;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = rows.data()[i], at = written.data()[row];
    const Draft draft = source.of(row, at, std::max<int64_t>(limits.data()[i], 0), least);
    for (int64_t place = 0; place < draft.tokens; ++place)
      chances.push_back(static_cast<float>(source.chances(row, at)[place]));
    offsets.push_back(static_cast<int64_t>(chances.size()));
    hits.push_back(draft.hits);
  }
  return nb::make_tuple(owned(std::move(chances)), owned(std::move(offsets)), owned(std::move(hits)));
}

// A request while its engine goes on.
struct Going {
  int64_t row, length, last, limit;
  double least;
  int64_t prompt, written, draft, hits, drafted, accepted;
};

// Steps each engine so often, or until one of its requests ends.
void walk(const Given& source, const In<int64_t>& rows, const In<int64_t>& bounds, const In<int64_t>& steps,
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
  std::vector<Going> batch;
  for (size_t engine = 0; engine < engines; ++engine) {
    const int64_t begin = bounds.data()[engine], end = bounds.data()[engine + 1];
    const int64_t often = std::min<int64_t>(steps.data()[engine], static_cast<int64_t>(width));
    batch.clear();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = rows.data()[i];
      const int64_t length = of.length.data()[row], last = std::min(length, of.most.data()[row]) - 1;
      batch.push_back({row, length, last, limit.data()[i], least.data()[i], of.prompt.data()[row],
                       of.written.data()[row], of.draft.data()[row], of.hits.data()[row], 0, 0});
    }
    bool ended = false;
    int64_t step = 0;
    for (; step < often && !ended; ++step) {
      int64_t inside = 0, known = 0;
      for (Going& r : batch) {
        inside += 1 + r.draft;
        known += r.prompt + r.written;
        const int64_t got = std::min(1 + std::min(r.draft, r.hits), r.length - r.written);
        r.written += got;
        r.drafted += r.draft;
        r.accepted += got - 1;
        Draft next{0, 0};
        if (r.written >= r.length)
          ended = true;
        else if (r.last > r.written)
          next = source.of(r.row, r.written, std::min(r.limit, r.last - r.written), r.least);
        r.draft = next.tokens, r.hits = next.hits;
      }
      tokens.data()[engine * width + step] = static_cast<double>(inside);
      context.data()[engine * width + step] = static_cast<double>(known);
    }
    for (const Going& r : batch) {
      of.written.data()[r.row] = r.written;
      of.forwards.data()[r.row] += step;
      of.drafted.data()[r.row] += r.drafted;
      of.accepted.data()[r.row] += r.accepted;
      of.draft.data()[r.row] = r.draft;
      of.hits.data()[r.row] = r.hits;
    }
    taken.data()[engine] = step;
  }
}

void check_rows(const In<int64_t>& rows, size_t height, const In<int64_t>& column) {
  if (column.size() != height) throw std::invalid_argument("drafts: the columns differ in length");
  for (size_t i = 0; i < rows.size(); ++i)
    if (static_cast<size_t>(rows.data()[i]) >= height) throw std::out_of_range("drafts: no such row");
}

Given given(const In<int64_t>& rows, size_t height, const In<int64_t>& visit, const In<int64_t>& ahead,
            const In<int64_t>& same, const Table<const double>& survival, uint64_t seed) {
  for (const auto* column : {&visit, &ahead, &same}) check_rows(rows, height, *column);
  if (survival.shape(0) < 2) throw std::invalid_argument("drafts: expected chances of a visit and of what is ahead");
  return {visit.data(),
          ahead.data(),
          same.data(),
          survival.data(),
          static_cast<int64_t>(survival.shape(0)) - 1,
          static_cast<int64_t>(survival.shape(1)),
          seed};
}

}  // namespace

void bind_simulator(nb::module_& m) {
  m.def(
      "walk_given",
      [](In<int64_t> rows, In<int64_t> bounds, In<int64_t> steps, In<double> least, In<int64_t> limit,
         In<int64_t> length, In<int64_t> most, In<int64_t> prompt, Out<int64_t> written, Out<int64_t> forwards,
         Out<int64_t> drafted, Out<int64_t> accepted, Out<int64_t> draft, Out<int64_t> hits, Out<int64_t> taken,
         Table<double> tokens, Table<double> context, In<int64_t> visit, In<int64_t> ahead, In<int64_t> same,
         Table<const double> survival, uint64_t seed) {
        walk(given(rows, written.size(), visit, ahead, same, survival, seed), rows, bounds, steps, least, limit,
             Columns{length, most, prompt, written, forwards, drafted, accepted, draft, hits}, taken, tokens, context);
      },
      nb::arg("rows"), nb::arg("bounds"), nb::arg("steps"), nb::arg("least"), nb::arg("limit"), nb::arg("length"),
      nb::arg("most"), nb::arg("prompt"), nb::arg("written"), nb::arg("forwards"), nb::arg("drafted"),
      nb::arg("accepted"), nb::arg("draft"), nb::arg("hits"), nb::arg("taken"), nb::arg("tokens"), nb::arg("context"),
      nb::arg("visit"), nb::arg("ahead"), nb::arg("same"), nb::arg("survival"), nb::arg("seed"),
      "Step engines with drafts of given chances: columns int64 [requests] change in place; taken int64 [engines] "
      "steps, and tokens and context of each, float64 [engines, steps], come out.");
  m.def(
      "offer_given",
      [](In<int64_t> rows, In<int64_t> limits, double least, In<int64_t> written, In<int64_t> visit, In<int64_t> ahead,
         In<int64_t> same, Table<const double> survival, uint64_t seed) {
        return offer(given(rows, written.size(), visit, ahead, same, survival, seed), rows, limits, least, written);
      },
      nb::arg("rows"), nb::arg("limits"), nb::arg("least"), nb::arg("written"), nb::arg("visit"), nb::arg("ahead"),
      nb::arg("same"), nb::arg("survival"), nb::arg("seed"),
      "Draft with given chances, down to the chance whose logarithm is `least`.");
}

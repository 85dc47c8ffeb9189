// The controller's arithmetic for one decode step of a batch;
// das_adapter/core/controller.py and budget.py explain it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "columns.hpp"

namespace nb = nanobind;

namespace {

// Returns values, none of them negative, from the greatest to the least. The bits of
// such floats rise as they do: three passes over 11 bits each, which few values are not
// worth.
std::vector<float> descending(std::vector<float> values) {
  constexpr uint32_t kBits = 11, kDigits = 1u << kBits;
  if (values.size() < 256) {
    std::sort(values.begin(), values.end(), std::greater<>());
    return values;
  }
  std::vector<uint32_t> from(values.size()), to(values.size());
  std::memcpy(from.data(), values.data(), values.size() * sizeof(float));
  for (uint32_t shift = 0; shift < 32; shift += kBits) {
    std::array<uint32_t, kDigits + 1> begin{};
    const auto digit = [shift](uint32_t bits) {
      return kDigits - 1 - (bits >> shift) % kDigits;
    };
    for (const uint32_t bits : from) ++begin[digit(bits) + 1];
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    for (const uint32_t bits : from) to[begin[digit(bits)]++] = bits;
    from.swap(to);
  }
  std::vector<float> sorted(values.size());
  std::memcpy(sorted.data(), from.data(), values.size() * sizeof(float));
  return sorted;
}

// Keeps the set of tokens whose value exceeds its cost by most, given the chances of
// each request's draft, `chances[offsets[i]]` and on, what an accepted token of it is
// worth, and StepModel.costs; returns the gain. Of m tokens the best set is the m of
// greatest value, and as values fall along each draft, those above a threshold are a
// prefix of it: the best m decides. das_adapter/core/budget.py explains it.
double allocate(const In<float>& chances, const In<int64_t>& offsets,
                const In<double>& worth, const nb::tuple& costs, Out<int64_t> keep) {
  const size_t batch = worth.size();
  if (offsets.size() != batch + 1 || keep.size() != batch)
    throw std::invalid_argument(
        "allocate: worth, offsets and keep differ in their number of requests");
  const int64_t* at = offsets.data();
  if (at[0] != 0 || at[batch] != static_cast<int64_t>(chances.size()) ||
      !std::is_sorted(at, at + batch + 1))
    throw std::invalid_argument(
        "allocate: offsets: expected ascending numbers from 0 to the number of "
        "chances");
  const float* chance = chances.data();
  const auto n = static_cast<size_t>(at[batch]);
  std::vector<float> value(n);
  for (size_t i = 0; i < batch; ++i) {
    const auto accepted = static_cast<float>(worth.data()[i]);
    for (int64_t j = at[i]; j < at[i + 1]; ++j) value[j] = chance[j] * accepted;
  }
  const auto cost = [&](size_t i) { return nb::cast<double>(costs[i]); };
  const double token = cost(0), bend = cost(1), knee = cost(2), draft = cost(3),
               launch = cost(4);
  const auto sizes = nb::cast<std::vector<double>>(costs[5]);
  auto size = sizes.begin();
  const auto seconds =
      [&](size_t drafted) {  // of the step's tokens; `drafted` never falls
        auto tokens = static_cast<double>(batch + drafted);
        while (size != sizes.end() && *size < tokens) ++size;
        const bool launched = size == sizes.end() && !sizes.empty();
        if (size != sizes.end()) tokens = *size;
        return token * tokens + bend * std::max(0.0, tokens - knee) +
               (drafted ? draft : 0.0) + (launched ? launch : 0.0);
      };
  const std::vector<float> best_first = descending(value);
  double sum = 0, gain = 0;
  const double plain = seconds(0);
  size_t most = 0;
  for (size_t m = 1; m <= n; ++m) {
    sum += best_first[m - 1];
    if (const double net = sum - (seconds(m) - plain); net > gain) gain = net, most = m;
  }
  const float threshold = most ? best_first[most - 1] : INFINITY;
  // Of equal values as many as are among the best.
  auto ties =
      static_cast<int64_t>(most) -
      (std::find(best_first.begin(), best_first.end(), threshold) - best_first.begin());
  for (size_t i = 0; i < batch; ++i) {
    int64_t j = at[i];
    while (j < at[i + 1] && value[j] > threshold) ++j;
    for (; ties > 0 && j < at[i + 1] && value[j] == threshold; ++j) --ties;
    keep.data()[i] = j - at[i];
  }
  return gain;
}

// Columns of the live requests, by slot: RequestTable's (das_adapter/core/requests.py),
// which they are parts of.
struct Columns {
  Out<double> written, pace, load, drafted, accepted, steps, worth;

  Columns(Out<double> written, Out<double> pace, Out<double> load, Out<double> drafted,
          Out<double> accepted, Out<double> steps, Out<double> worth)
      : written(written),
        pace(pace),
        load(load),
        drafted(drafted),
        accepted(accepted),
        steps(steps),
        worth(worth) {
    for (const auto* column : {&pace, &load, &drafted, &accepted, &steps, &worth})
      if (column->size() != written.size())
        throw std::invalid_argument("Columns: the columns differ in length");
  }

  size_t slot(const In<int64_t>& slots, size_t i) const {
    const auto at = static_cast<size_t>(slots.data()[i]);
    if (at >= written.size()) throw std::out_of_range("no such slot");
    return at;
  }

  void advance(const In<int64_t>& slots, const In<int64_t>& got,
               const In<int64_t>& carried, double memory, Out<double> curve) {
    if (got.size() != slots.size() ||
        (carried.size() && carried.size() != slots.size()))
      throw std::invalid_argument("advance: slots, got and carried differ in length");
    if (curve.size() != 4)
      throw std::invalid_argument("advance: expected four counts of the curve");
    for (size_t i = 0; i < slots.size(); ++i) {
      const size_t at = slot(slots, i);
      const auto tokens = static_cast<double>(got.data()[i]);
      const double draft =
          carried.size() ? static_cast<double>(carried.data()[i]) : 0.0;
      written.data()[at] += tokens;
      const double past = std::min(
          memory, (steps.data()[at] += 1) + 1);  // the initial value counts as one step
      pace.data()[at] += (tokens - pace.data()[at]) / past;
      load.data()[at] += (draft - load.data()[at]) / past;
      if (draft <= 0) continue;
      drafted.data()[at] += draft;
      accepted.data()[at] += tokens - 1;
      const double counted[] = {draft, tokens - 1, 1.0,
                                static_cast<double>(tokens > 1)};
      for (size_t k = 0; k < 4; ++k) curve.data()[k] += counted[k];
    }
  }

  void limits(const In<int64_t>& slots, const In<int64_t>& room, int64_t most,
              double cost, Out<int64_t> out) const {
    if (room.size() != slots.size() || out.size() != slots.size())
      throw std::invalid_argument("limits: slots, room and out differ in length");
    for (size_t i = 0; i < slots.size(); ++i) {
      const size_t at = slot(slots, i);
      out.data()[i] = worth.data()[at] > cost
                          ? std::max<int64_t>(0, std::min(room.data()[i], most))
                          : 0;
    }
  }
};

// Follows the texts of a batch by a step, given its requests' slots, the tokens that
// each got and its length `now`. By slot: its length before, `last`, which is brought
// forward, and where it stops, `ends`. Returns how many tokens each got, and the draft
// tokens that fit before its end; None, and nothing has changed: a request got nothing,
// or its length is not what it was and what it got.
nb::object follow(const In<int64_t>& slots, const nb::list& sampled,
                  const In<int64_t>& now, Out<int64_t> last, const In<int64_t>& ends) {
  const size_t batch = slots.size();
  if (sampled.size() != batch || now.size() != batch || ends.size() != last.size())
    throw std::invalid_argument(
        "follow: the columns of the batch, or those by slot, differ in length");
  std::vector<int64_t> got(batch), room(batch);
  for (size_t i = 0; i < batch; ++i) {
    const auto slot = static_cast<size_t>(slots.data()[i]);
    got[i] = static_cast<int64_t>(nb::cast<nb::list>(sampled[i]).size());
    if (slot >= last.size() || last.data()[slot] + got[i] != now.data()[i] || !got[i])
      return nb::none();
  }
  for (size_t i = 0; i < batch; ++i) {
    const auto slot = static_cast<size_t>(slots.data()[i]);
    last.data()[slot] = now.data()[i];
    room[i] = ends.data()[slot] - 1 - now.data()[i];
  }
  return nb::make_tuple(owned(std::move(got)), owned(std::move(room)));
}

using Table = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Evaluates row i of `cdf`, tabulated at geometric steps from 1 (`scale` steps per
// factor e), at row i of `lengths`.
void interpolate(const Table& cdf, double scale, const Table& lengths,
                 nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
  const size_t rows = cdf.shape(0), grid = cdf.shape(1), points = lengths.shape(1);
  if (lengths.shape(0) != rows || out.shape(0) != rows || out.shape(1) != points ||
      grid < 2)
    throw std::invalid_argument(
        "interpolate: cdf, lengths and out differ in their number of requests");
  for (size_t i = 0; i < rows; ++i) {
    const double* row = cdf.data() + i * grid;
    for (size_t j = 0; j < points; ++j) {
      const double length = lengths.data()[i * points + j];
      const double x = std::min(std::log(std::max(length, 1.0)) * scale,
                                static_cast<double>(grid - 1));
      const size_t k = std::min(static_cast<size_t>(x), grid - 2);
      out.data()[i * points + j] =
          length < 1.0 ? 0.0
                       : row[k] + (x - static_cast<double>(k)) * (row[k + 1] - row[k]);
    }
  }
}

}  // namespace

void bind_controller(nb::module_& m) {
  m.def("allocate", &allocate, nb::arg("chances"), nb::arg("offsets"), nb::arg("worth"),
        nb::arg("costs"), nb::arg("keep"),
        "Choose how many draft tokens of each request to verify, into keep int64 [b], "
        "given StepModel.costs. Return the "
        "expected gain in seconds.");
  nb::class_<Columns>(m, "Columns")
      .def(nb::init<Out<double>, Out<double>, Out<double>, Out<double>, Out<double>,
                    Out<double>, Out<double>>(),
           nb::arg("written"), nb::arg("pace"), nb::arg("load"), nb::arg("drafted"),
           nb::arg("accepted"), nb::arg("steps"), nb::arg("worth"))
      .def("advance", &Columns::advance,
           "Add one decode step to the requests in `slots`, and count it for the "
           "acceptance curve, float64 [4].")
      .def("limits", &Columns::limits,
           "Put the most draft tokens of each request into out int64 [b]: 0 where a "
           "token is not worth more than it "
           "costs.");
  m.def("follow", &follow,
        "Bring the length of each request of a batch forward by a step. Return how "
        "many tokens each got and the draft "
        "tokens that fit before its end; None where a request got nothing or has other "
        "tokens.");
  m.def("interpolate", &interpolate, nb::arg("cdf"), nb::arg("scale"),
        nb::arg("lengths"), nb::arg("out"),
        "Evaluate distribution functions float64 [b, g] at lengths float64 [b, k], "
        "linear in the logarithm, into out "
        "[b, k].");
}

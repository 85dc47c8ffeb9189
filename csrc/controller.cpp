// The controller's arithmetic for one decode step of a batch; das_adapter/core/controller.py and budget.py explain it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "columns.hpp"

namespace nb = nanobind;

namespace {

// Keeps the set of tokens whose value exceeds its cost by most. Of m tokens the best set is the m of greatest value,
// and as values fall along each draft, those above a threshold are a prefix of it: the best m decides.
double allocate(const In<float>& chances, const In<int64_t>& offsets, const In<double>& own, const In<double>& tail,
                const In<double>& fade, const In<double>& costs, Out<int64_t> keep) {
  const size_t batch = own.size(), n = chances.size();
  if (offsets.size() != batch + 1 || keep.size() != batch || tail.size() != batch || fade.size() != batch)
    throw std::invalid_argument("allocate: own, tail, fade, offsets and keep differ in their number of requests");
  if (costs.size() != n + 1) throw std::invalid_argument("allocate: costs: expected one for each number of tokens");
  const float* c = chances.data();
  const int64_t* at = offsets.data();
  if (at[0] != 0 || at[batch] != static_cast<int64_t>(n) || !std::is_sorted(at, at + batch + 1))
    throw std::invalid_argument("allocate: offsets: expected ascending numbers from 0 to the number of chances");
  std::vector<float> value(n);
  for (size_t i = 0; i < batch; ++i) {
    const auto always = static_cast<float>(own.data()[i]);
    auto deciding = static_cast<float>(tail.data()[i]);
    const auto less = static_cast<float>(std::exp(-fade.data()[i]));
    for (int64_t j = at[i]; j < at[i + 1]; ++j, deciding *= less) value[j] = c[j] * (always + deciding);
  }
  std::vector<float> best_first = value;
  std::sort(best_first.begin(), best_first.end(), std::greater<>());
  double sum = 0, gain = 0;
  size_t most = 0;
  for (size_t m = 1; m <= n; ++m) {
    sum += best_first[m - 1];
    if (sum - costs.data()[m] > gain) gain = sum - costs.data()[m], most = m;
  }
  const float threshold = most ? best_first[most - 1] : INFINITY;
  // Of equal values as many as are among the best.
  auto ties =
      static_cast<int64_t>(most) - (std::find(best_first.begin(), best_first.end(), threshold) - best_first.begin());
  for (size_t i = 0; i < batch; ++i) {
    int64_t j = at[i];
    while (j < at[i + 1] && value[j] > threshold) ++j;
    for (; ties > 0 && j < at[i + 1] && value[j] == threshold; ++j) --ties;
    keep.data()[i] = j - at[i];
  }
  return gain;
}

// Adds one decode step to the requests in `slots`; arrays are RequestTable's columns (das_adapter/core/requests.py).
void advance(const In<int64_t>& slots, const In<int64_t>& got, const In<int64_t>& carried, double memory,
             Out<double> written, Out<double> pace, Out<double> load, Out<double> drafted, Out<double> accepted,
             Out<double> steps, const In<int64_t>& length_class, Out<double> class_steps, Out<double> class_drafts,
             Out<double> curve) {
  const size_t width = written.size(), classes = class_steps.size();
  if (got.size() != slots.size() || (carried.size() && carried.size() != slots.size()))
    throw std::invalid_argument("advance: slots, got and carried differ in length");
  for (const auto* column : {&pace, &load, &drafted, &accepted, &steps})
    if (column->size() != width) throw std::invalid_argument("advance: the columns differ in length");
  if (length_class.size() != width || class_drafts.size() != classes || curve.size() != 4)
    throw std::invalid_argument("advance: expected one length class per slot, two counts per class and four in all");
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto slot = static_cast<size_t>(slots.data()[i]);
    if (slot >= width) throw std::out_of_range("advance: no such slot");
    const auto kind = static_cast<size_t>(length_class.data()[slot]);
    if (kind >= classes) throw std::out_of_range("advance: no such class");
    const auto tokens = static_cast<double>(got.data()[i]);
    const double draft = carried.size() ? static_cast<double>(carried.data()[i]) : 0.0;
    class_steps.data()[kind] += 1;
    class_drafts.data()[kind] += draft;
    written.data()[slot] += tokens;
    const double past = std::min(memory, (steps.data()[slot] += 1) + 1);  // the initial value counts as one step
    pace.data()[slot] += (tokens - pace.data()[slot]) / past;
    load.data()[slot] += (draft - load.data()[slot]) / past;
    if (draft <= 0) continue;
    drafted.data()[slot] += draft;
    accepted.data()[slot] += tokens - 1;
    const double counted[] = {draft, tokens - 1, 1.0, static_cast<double>(tokens > 1)};
    for (size_t k = 0; k < 4; ++k) curve.data()[k] += counted[k];
  }
}

using Table = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Evaluates row i of `cdf`, tabulated at geometric steps from 1 (`scale` steps per factor e), at row i of `lengths`.
void interpolate(const Table& cdf, double scale, const Table& lengths,
                 nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
  const size_t rows = cdf.shape(0), grid = cdf.shape(1), points = lengths.shape(1);
  if (lengths.shape(0) != rows || out.shape(0) != rows || out.shape(1) != points || grid < 2)
    throw std::invalid_argument("interpolate: cdf, lengths and out differ in their number of requests");
  for (size_t i = 0; i < rows; ++i) {
    const double* row = cdf.data() + i * grid;
    for (size_t j = 0; j < points; ++j) {
      const double length = lengths.data()[i * points + j];
      const double x = std::min(std::log(std::max(length, 1.0)) * scale, static_cast<double>(grid - 1));
      const size_t k = std::min(static_cast<size_t>(x), grid - 2);
      out.data()[i * points + j] = length < 1.0 ? 0.0 : row[k] + (x - static_cast<double>(k)) * (row[k + 1] - row[k]);
    }
  }
}

}  // namespace

void bind_controller(nb::module_& m) {
  m.def("allocate", &allocate, nb::arg("chances"), nb::arg("offsets"), nb::arg("own"), nb::arg("tail"), nb::arg("fade"),
        nb::arg("costs"), nb::arg("keep"),
        "Choose how many draft tokens of each request to verify, into keep int64 [b]; costs: seconds of 0, 1, ... n of "
        "them, float64 [n + 1]. Return the expected gain in seconds.");
  m.def("advance", &advance, nb::arg("slots"), nb::arg("got"), nb::arg("carried"), nb::arg("memory"),
        nb::arg("written"), nb::arg("pace"), nb::arg("load"), nb::arg("drafted"), nb::arg("accepted"), nb::arg("steps"),
        nb::arg("length_class"), nb::arg("class_steps"), nb::arg("class_drafts"), nb::arg("curve"),
        "Add one decode step to the requests in `slots`: update the float64 [slots] columns in place, and count "
        "request forwards and draft tokens by length class, float64 [classes] each, and for the acceptance curve [4].");
  m.def("interpolate", &interpolate, nb::arg("cdf"), nb::arg("scale"), nb::arg("lengths"), nb::arg("out"),
        "Evaluate distribution functions float64 [b, g] at lengths float64 [b, k], linear in the logarithm, into out "
        "[b, k].");
}

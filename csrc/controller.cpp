// The controller's arithmetic for one decode step of a batch; das_adapter/core/requests.py and length.py explain it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "columns.hpp"

namespace nb = nanobind;

namespace {

// Adds one decode step to the requests in `slots`; arrays are RequestTable's columns (das_adapter/core/requests.py).
void advance(const In<int64_t>& slots, const In<int64_t>& got, const In<int64_t>& carried, double memory,
             Out<double> written, Out<double> pace, Out<double> load, Out<double> drafted, Out<double> accepted,
             Out<double> drafts, Out<double> drafts_hit, Out<double> steps, const In<int64_t>& length_class,
             Out<double> class_steps, Out<double> class_drafts) {
  const size_t width = written.size(), classes = class_steps.size();
  if (got.size() != slots.size() || (carried.size() && carried.size() != slots.size()))
    throw std::invalid_argument("advance: slots, got and carried differ in length");
  for (const auto* column : {&pace, &load, &drafted, &accepted, &drafts, &drafts_hit, &steps})
    if (column->size() != width) throw std::invalid_argument("advance: the columns differ in length");
  if (length_class.size() != width || class_drafts.size() != classes)
    throw std::invalid_argument("advance: expected one length class per slot and two counts per class");
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
    drafts.data()[slot] += 1;
    drafts_hit.data()[slot] += tokens > 1;
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
  m.def("advance", &advance, nb::arg("slots"), nb::arg("got"), nb::arg("carried"), nb::arg("memory"),
        nb::arg("written"), nb::arg("pace"), nb::arg("load"), nb::arg("drafted"), nb::arg("accepted"),
        nb::arg("drafts"), nb::arg("drafts_hit"), nb::arg("steps"), nb::arg("length_class"), nb::arg("class_steps"),
        nb::arg("class_drafts"),
        "Add one decode step to the requests in `slots`: update the float64 [slots] columns in place, and count "
        "request forwards and draft tokens by length class, float64 [classes] each.");
  m.def("interpolate", &interpolate, nb::arg("cdf"), nb::arg("scale"), nb::arg("lengths"), nb::arg("out"),
        "Evaluate distribution functions float64 [b, g] at lengths float64 [b, k], linear in the logarithm, into out "
        "[b, k].");
}

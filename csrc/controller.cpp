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
// such floats rise as they do, so many values are sorted in three passes over 11 bits
// each.
std::vector<float> descending(std::vector<float> values) {
  constexpr uint32_t kBits = 11;
  constexpr uint32_t kDigits = 1u << kBits;
  if (values.size() < 256) {
    std::sort(values.begin(), values.end(), std::greater<>());
    return values;
  }
  std::vector<uint32_t> from(values.size());
  std::vector<uint32_t> to(values.size());
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

// What the tokens of a step cost beside its requests, as `StepModel` gives it to
// Python's `allocate`, in this order.
struct StepCosts {
  double token_s;
  double bend_s;  // of each token above the knee, beside token_s
  double knee_tokens;
  double draft_s;   // of any draft tokens
  double launch_s;  // beyond the largest captured size
  std::vector<double> captured_sizes;  // tokens, rising

  static StepCosts from_python(const nb::tuple& costs) {
    const auto number = [&](size_t i) { return nb::cast<double>(costs[i]); };
    return {number(0), number(1), number(2),
            number(3), number(4), nb::cast<std::vector<double>>(costs[5])};
  }
};

// Computes the seconds of steps that grow from one to the next.
class GrowingStep {
 public:
  GrowingStep(const StepCosts& costs, size_t batch)
      : costs_(costs), batch_(batch), next_size_(costs.captured_sizes.begin()) {}

  // Returns the seconds of the step's tokens. `num_drafts` never falls.
  double seconds(size_t num_drafts) {
    const auto& sizes = costs_.captured_sizes;
    auto tokens = static_cast<double>(batch_ + num_drafts);
    while (next_size_ != sizes.end() && *next_size_ < tokens) ++next_size_;
    const bool is_captured = next_size_ != sizes.end();
    const bool is_launched = !is_captured && !sizes.empty();
    if (is_captured) tokens = *next_size_;
    const double above_knee = std::max(0.0, tokens - costs_.knee_tokens);
    return costs_.token_s * tokens + costs_.bend_s * above_knee +
           (num_drafts ? costs_.draft_s : 0.0) + (is_launched ? costs_.launch_s : 0.0);
  }

 private:
  const StepCosts& costs_;
  size_t batch_;
  std::vector<double>::const_iterator next_size_;
};

// Keeps the set of tokens whose value exceeds its cost by most, given the chances of
// each request's draft, `chances[offsets[i]]` and on, the seconds that an accepted
// token of it saves, and StepModel's costs; returns the gain. Of m tokens the best set
// is the m of greatest value, and as values fall along each draft, those above a
// threshold are a prefix of it: the best m decides, of those up to `max_kept`.
// das_adapter/core/budget.py explains it.
double allocate(const In<float>& chances, const In<int64_t>& offsets,
                const In<double>& token_gain_s, const nb::tuple& costs,
                int64_t max_kept, Out<int64_t> keep) {
  const size_t batch = token_gain_s.size();
  if (offsets.size() != batch + 1 || keep.size() != batch)
    throw std::invalid_argument(
        "allocate: gains, offsets and keep differ in their number of requests");
  const int64_t* begins = offsets.data();
  const int64_t num_chances = begins[batch];
  if (begins[0] != 0 || num_chances != static_cast<int64_t>(chances.size()) ||
      !std::is_sorted(begins, begins + batch + 1))
    throw std::invalid_argument(
        "allocate: offsets: expected ascending numbers from 0 to the number of "
        "chances");
  const auto num_drafts = static_cast<size_t>(num_chances);
  std::vector<float> values(num_drafts);
  for (size_t i = 0; i < batch; ++i) {
    const auto gain_s = static_cast<float>(token_gain_s.data()[i]);
    for (int64_t j = begins[i]; j < begins[i + 1]; ++j)
      values[j] = chances.data()[j] * gain_s;
  }
  const std::vector<float> best_first = descending(values);

  const StepCosts step_costs = StepCosts::from_python(costs);
  GrowingStep step(step_costs, batch);
  const double baseline_s = step.seconds(0);
  double value_sum = 0;
  double best_gain_s = 0;
  size_t num_kept = 0;
  const size_t last = std::min(num_drafts, static_cast<size_t>(max_kept));
  for (size_t m = 1; m <= last; ++m) {
    value_sum += best_first[m - 1];
    const double gain_s = value_sum - (step.seconds(m) - baseline_s);
    if (gain_s > best_gain_s) {
      best_gain_s = gain_s;
      num_kept = m;
    }
  }

  const float threshold = num_kept ? best_first[num_kept - 1] : INFINITY;
  const auto first_equal = std::find(best_first.begin(), best_first.end(), threshold);
  const int64_t num_above = first_equal - best_first.begin();
  // Of the values that equal the threshold, as many stay as are among the best.
  int64_t num_equal_left = static_cast<int64_t>(num_kept) - num_above;
  for (size_t i = 0; i < batch; ++i) {
    int64_t j = begins[i];
    const int64_t end = begins[i + 1];
    while (j < end && values[j] > threshold) ++j;
    while (num_equal_left > 0 && j < end && values[j] == threshold) {
      ++j;
      --num_equal_left;
    }
    keep.data()[i] = j - begins[i];
  }
  return best_gain_s;
}

// Counts of the acceptance curve; Python has them as float64 [4], in this order.
struct CurveCounts {
  double drafted;
  double accepted;
  double drafts;
  double accepting_drafts;  // of which a token was accepted
};
static_assert(sizeof(CurveCounts) == 4 * sizeof(double), "an array of Python");

// Columns of the live requests, by slot: RequestTable's (das_adapter/core/requests.py),
// which they are parts of.
struct RequestColumns {
  Out<double> written;
  Out<double> pace;  // tokens per step, lately
  Out<double> load;  // draft tokens per step, lately
  Out<double> drafted;
  Out<double> accepted;
  Out<double> steps;
  Out<double> token_gain_s;  // seconds that an accepted token saves

  RequestColumns(Out<double> written, Out<double> pace, Out<double> load,
                 Out<double> drafted, Out<double> accepted, Out<double> steps,
                 Out<double> token_gain_s)
      : written(written),
        pace(pace),
        load(load),
        drafted(drafted),
        accepted(accepted),
        steps(steps),
        token_gain_s(token_gain_s) {
    for (const auto* column :
         {&pace, &load, &drafted, &accepted, &steps, &token_gain_s})
      if (column->size() != written.size())
        throw std::invalid_argument("RequestColumns: the columns differ in length");
  }

  size_t slot(const In<int64_t>& slots, size_t i) const {
    const auto found = static_cast<size_t>(slots.data()[i]);
    if (found >= written.size()) throw std::out_of_range("no such slot");
    return found;
  }

  void advance(const In<int64_t>& slots, const In<int64_t>& num_tokens,
               const In<int64_t>& num_drafts, double pace_steps,
               Out<double> curve_counts) {
    if (num_tokens.size() != slots.size() ||
        (num_drafts.size() && num_drafts.size() != slots.size()))
      throw std::invalid_argument("advance: slots, got and carried differ in length");
    if (curve_counts.size() != 4)
      throw std::invalid_argument("advance: expected four counts of the curve");
    auto& curve = *reinterpret_cast<CurveCounts*>(curve_counts.data());
    for (size_t i = 0; i < slots.size(); ++i) {
      const size_t slot = this->slot(slots, i);
      const auto tokens = static_cast<double>(num_tokens.data()[i]);
      const auto drafts =
          num_drafts.size() ? static_cast<double>(num_drafts.data()[i]) : 0.0;
      written.data()[slot] += tokens;
      steps.data()[slot] += 1;
      // The initial value counts as one step.
      const double window = std::min(pace_steps, steps.data()[slot] + 1);
      pace.data()[slot] += (tokens - pace.data()[slot]) / window;
      load.data()[slot] += (drafts - load.data()[slot]) / window;
      if (drafts <= 0) continue;
      drafted.data()[slot] += drafts;
      accepted.data()[slot] += tokens - 1;
      curve.drafted += drafts;
      curve.accepted += tokens - 1;
      curve.drafts += 1;
      curve.accepting_drafts += tokens > 1;
    }
  }

  void limits(const In<int64_t>& slots, const In<int64_t>& room, int64_t max_tokens,
              double token_cost_s, Out<int64_t> out) const {
    if (room.size() != slots.size() || out.size() != slots.size())
      throw std::invalid_argument("limits: slots, room and out differ in length");
    for (size_t i = 0; i < slots.size(); ++i) {
      int64_t limit = 0;
      if (token_gain_s.data()[slot(slots, i)] > token_cost_s)
        limit = std::max<int64_t>(0, std::min(room.data()[i], max_tokens));
      out.data()[i] = limit;
    }
  }
};

// Follows the texts of a batch by a step, given its requests' slots, the tokens that
// each got and its length now. By slot: its length before, which becomes the new one,
// and where it stops. Returns how many tokens each got, and the draft tokens that fit
// before its end; None, and nothing has changed: a request got nothing, or its length
// is not what it was and what it got.
nb::object advance_lengths(const In<int64_t>& slots, const nb::list& sampled,
                           const In<int64_t>& new_lengths, Out<int64_t> lengths,
                           const In<int64_t>& ends) {
  const size_t batch = slots.size();
  if (sampled.size() != batch || new_lengths.size() != batch ||
      ends.size() != lengths.size())
    throw std::invalid_argument(
        "advance_lengths: the columns of the batch, or those by slot, differ in "
        "length");
  std::vector<int64_t> num_tokens(batch);
  std::vector<int64_t> room(batch);
  for (size_t i = 0; i < batch; ++i) {
    const auto slot = static_cast<size_t>(slots.data()[i]);
    const auto tokens = nb::cast<nb::list>(sampled[i]);
    num_tokens[i] = static_cast<int64_t>(tokens.size());
    if (slot >= lengths.size() || !num_tokens[i]) return nb::none();
    if (lengths.data()[slot] + num_tokens[i] != new_lengths.data()[i])
      return nb::none();
  }
  for (size_t i = 0; i < batch; ++i) {
    const auto slot = static_cast<size_t>(slots.data()[i]);
    lengths.data()[slot] = new_lengths.data()[i];
    room[i] = ends.data()[slot] - 1 - new_lengths.data()[i];
  }
  return nb::make_tuple(owned(std::move(num_tokens)), owned(std::move(room)));
}

using Table = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Evaluates row i of `cdf`, tabulated at geometric steps from 1 (`scale` steps per
// factor e), at row i of `lengths`.
void interpolate(const Table& cdf, double scale, const Table& lengths,
                 nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
  const size_t num_rows = cdf.shape(0);
  const size_t num_steps = cdf.shape(1);
  const size_t num_points = lengths.shape(1);
  if (lengths.shape(0) != num_rows || out.shape(0) != num_rows ||
      out.shape(1) != num_points || num_steps < 2)
    throw std::invalid_argument(
        "interpolate: cdf, lengths and out differ in their number of requests");
  const auto last_step = static_cast<double>(num_steps - 1);
  for (size_t i = 0; i < num_rows; ++i) {
    const double* row = cdf.data() + i * num_steps;
    for (size_t j = 0; j < num_points; ++j) {
      const double length = lengths.data()[i * num_points + j];
      const double log_length = std::log(std::max(length, 1.0));
      const double position = std::min(log_length * scale, last_step);
      const size_t step = std::min(static_cast<size_t>(position), num_steps - 2);
      const double part = position - static_cast<double>(step);
      const double value = row[step] + part * (row[step + 1] - row[step]);
      out.data()[i * num_points + j] = length < 1.0 ? 0.0 : value;
    }
  }
}

}  // namespace

void bind_controller(nb::module_& m) {
  m.def("allocate", &allocate, nb::arg("chances"), nb::arg("offsets"),
        nb::arg("token_gain_s"), nb::arg("costs"), nb::arg("max_kept"), nb::arg("keep"),
        "Choose how many draft tokens of each request to verify, into keep int64 [b], "
        "max_kept in all at most, given what StepModel says of the costs. Return the "
        "expected gain in seconds.");
  nb::class_<RequestColumns>(m, "RequestColumns")
      .def(nb::init<Out<double>, Out<double>, Out<double>, Out<double>, Out<double>,
                    Out<double>, Out<double>>(),
           nb::arg("written"), nb::arg("pace"), nb::arg("load"), nb::arg("drafted"),
           nb::arg("accepted"), nb::arg("steps"), nb::arg("worth_s"))
      .def("advance", &RequestColumns::advance,
           "Add one decode step to the requests in `slots`, and count it for the "
           "acceptance curve, float64 [4].")
      .def("limits", &RequestColumns::limits,
           "Put the most draft tokens of each request into out int64 [b]: 0 where a "
           "token saves no more than it costs.");
  m.def("advance_lengths", &advance_lengths,
        "Advance the length of each request of a batch by a step. Return how many "
        "tokens each got and the draft tokens that fit before its end; None where a "
        "request got nothing or has other tokens.");
  m.def("interpolate", &interpolate, nb::arg("cdf"), nb::arg("scale"),
        nb::arg("lengths"), nb::arg("out"),
        "Evaluate distribution functions float64 [b, g] at lengths float64 [b, k], "
        "linear in the logarithm, into out [b, k].");
}

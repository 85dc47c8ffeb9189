// What the host knows of the live requests on the V2 runner, brought forward by a step;
// das_adapter/engine/v2/live.py has it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "columns.hpp"
#include "tuning.hpp"

namespace nb = nanobind;

namespace {

namespace tuning = das::tuning;

template <class T>
using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Item i of a list, which must be there.
nb::handle item(nb::handle list, size_t i) {
  PyObject* found = PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(i));
  if (!found) throw nb::python_error();
  return found;
}

size_t size_of(nb::handle list) {
  const Py_ssize_t size = PyList_Size(list.ptr());
  if (size < 0) throw nb::python_error();
  return static_cast<size_t>(size);
}

// Returns the value of a slot; nullptr: it has none.
nb::handle value_of(const nb::dict& by_slot, int64_t slot) {
  return PyDict_GetItem(by_slot.ptr(), nb::int_(slot).ptr());
}

void append(nb::handle list, nb::handle value) {
  if (PyList_Append(list.ptr(), value.ptr())) throw nb::python_error();
}

bool contains(nb::handle container, nb::handle value) {
  const int found = PySequence_Contains(container.ptr(), value.ptr());
  if (found < 0) throw nb::python_error();
  return found;
}

// Returns whether a token is one of those, rising, that end some request.
bool ends_some_request(const In<int64_t>& all_stops, nb::handle token) {
  const int64_t* const end = all_stops.data() + all_stops.size();
  return std::binary_search(all_stops.data(), end, nb::cast<int64_t>(token));
}

// Tokens that end a request.
struct Stops {
  const In<int64_t>& of_all;  // of all requests, rising
  const nb::dict& by_slot;  // a set for each request that has some

  bool end_request(int64_t slot, nb::handle token) const {
    const nb::handle own = value_of(by_slot, slot);
    return own.is_valid() && contains(own, token);
  }
};

// The first `count` of a request's tokens.
struct Tokens {
  nb::handle list;
  size_t count;

  // Cuts them behind the first that ends the request; returns whether there is one.
  bool cut(const Stops& stops, int64_t slot) {
    if (!stops.of_all.size()) return false;
    for (size_t i = 0; i < count; ++i) {
      const nb::handle token = item(list, i);
      if (!ends_some_request(stops.of_all, token)) continue;
      if (!stops.end_request(slot, token)) continue;
      count = i + 1;
      return true;
    }
    return false;
  }

  void append_to(nb::handle text) const {
    for (size_t i = 0; i < count; ++i) append(text, item(list, i));
  }
};

// What `process_output` writes, int64 [7, b]: these rows, a column for each request
// that goes on. Of two requests of a batch of three, the second of which has ended:
//
//   place              0   2    (in the batch)
//   slot               5   9
//   num_tokens         3   1    (that it got)
//   num_drafts         4   0    (that were verified, without fillers)
//   num_model_drafts   0   0    (those of a model)
//   room             196  57    (draft tokens that fit before its end)
//   length            83  42    (tokens of its text)
struct OutputRows {
  static constexpr size_t kCount = 7;

  int64_t* place;
  int64_t* slot;
  int64_t* num_tokens;
  int64_t* num_drafts;
  int64_t* num_model_drafts;
  int64_t* room;
  int64_t* length;

  explicit OutputRows(const Table<int64_t>& out) {
    int64_t* next = out.data();
    for (int64_t** row :
         {&place, &slot, &num_tokens, &num_drafts, &num_model_drafts, &room, &length}) {
      *row = next;
      next += out.shape(1);
    }
  }
};

// What a batch's requests got, summed up in the order of Python's `Sums`.
struct OutputSums {
  int64_t requests = 0;  // that go on
  int64_t scheduled = 0;  // their draft tokens, with fillers
  int64_t context = 0;  // tokens of their texts
  int64_t num_drafts = 0;  // draft tokens without fillers
  int64_t forwards = 0;  // requests of training rollouts; so is all that follows
  int64_t written = 0;  // tokens
  int64_t drafted_forwards = 0;  // requests with draft tokens
  int64_t drafted = 0;
  int64_t accepted = 0;

  nb::tuple tuple() const {
    return nb::make_tuple(requests, requests + scheduled, context, num_drafts, forwards,
                          written, drafted_forwards, drafted, accepted);
  }
};

// How far what a request is offered lasts to its next draft, as deviations from the
// average draft: the regression of a draft's expected length on the one before. Python
// has it as float64 [3], in this order.
struct Persistence {
  double batches;  // that were offered drafts, at most FORECAST_BATCHES
  double covariance;
  double variance;

  // Returns the share of a deviation that is still there two steps later: drafts are
  // made two steps after those that are known.
  double after_two_steps() const {
    if (!(variance > 0)) return 1.0;
    const double next = std::clamp(covariance / variance, 0.0, 1.0);
    return next * next;
  }
};
static_assert(sizeof(Persistence) == 3 * sizeof(double), "an array of Python");

void move_towards(double& mean, double value, double batches) {
  mean += (value - mean) / batches;
}

// Columns of the live requests by slot, which the Python class LiveTexts owns.
struct LiveColumns {
  Out<int64_t> length;
  Out<int64_t> end;
  Out<int64_t> num_offered;  // tokens of the last draft from the history
  Out<int64_t> num_model_offered;  // of the model's draft in its place
  Out<int64_t> batches_unoffered;  // since a draft was offered
  Out<bool> ended;
  Out<bool> offer_known;
  Out<bool> record;
  Out<float> expected_accepted;  // tokens of the last draft, expected
  Table<float> survival;  // of each token of the last draft
  Out<double> mean_survival;  // of all requests' drafts, by place in the draft
  Out<double> persistence;  // `Persistence`

  LiveColumns(Out<int64_t> length, Out<int64_t> end, Out<int64_t> num_offered,
              Out<int64_t> num_model_offered, Out<int64_t> batches_unoffered,
              Out<bool> ended, Out<bool> offer_known, Out<bool> record,
              Out<float> expected_accepted, Table<float> survival,
              Out<double> mean_survival, Out<double> persistence)
      : length(length),
        end(end),
        num_offered(num_offered),
        num_model_offered(num_model_offered),
        batches_unoffered(batches_unoffered),
        ended(ended),
        offer_known(offer_known),
        record(record),
        expected_accepted(expected_accepted),
        survival(survival),
        mean_survival(mean_survival),
        persistence(persistence) {
    const size_t slots = length.size();
    bool equal = survival.shape(0) == slots && expected_accepted.size() == slots;
    for (const auto* column :
         {&end, &num_offered, &num_model_offered, &batches_unoffered})
      equal = equal && column->size() == slots;
    for (const auto* column : {&ended, &offer_known, &record})
      equal = equal && column->size() == slots;
    equal = equal && mean_survival.size() == survival.shape(1);
    if (!equal || persistence.size() != 3)
      throw std::invalid_argument("LiveColumns: the columns differ in length");
  }

  void check(const In<int64_t>& slots) const {
    for (size_t i = 0; i < slots.size(); ++i)
      if (slots.data()[i] >= static_cast<int64_t>(length.size()))
        throw std::out_of_range("LiveColumns: no such slot");
  }

  nb::tuple process_output(const In<int64_t>& slots, const nb::list& sampled,
                           const In<int64_t>& scheduled, int64_t model,
                           const In<int64_t>& all_stops, const nb::dict& stops_by_slot,
                           const nb::dict& texts, Table<int64_t> out) {
    const size_t batch = slots.size();
    if (sampled.size() != batch || (scheduled.size() && scheduled.size() != batch) ||
        out.shape(0) != OutputRows::kCount || out.shape(1) != batch)
      throw std::invalid_argument(
          "process_output: the columns of the batch differ in length");
    check(slots);
    const Stops stops{all_stops, stops_by_slot};
    const OutputRows rows(out);
    OutputSums sums;
    for (size_t i = 0; i < batch; ++i) {
      const int64_t slot = slots.data()[i];
      Tokens tokens{sampled[i], size_of(sampled[i])};
      if (!tokens.count || slot < 0 || ended.data()[slot]) continue;
      const int64_t num_left = end.data()[slot] - length.data()[slot];
      const auto num_sampled = static_cast<int64_t>(tokens.count);
      tokens.count = std::max<int64_t>(1, std::min(num_sampled, num_left));
      const bool stopped = tokens.cut(stops, slot);
      const auto num_tokens = static_cast<int64_t>(tokens.count);
      if (texts.size()) {
        const nb::handle text = value_of(texts, slot);
        if (text.is_valid()) tokens.append_to(text);
      }
      ended.data()[slot] = stopped || num_tokens >= num_left;
      length.data()[slot] += num_tokens;
      const int64_t new_length = length.data()[slot];

      const int64_t num_model = num_model_tokens(model, slot);
      const int64_t num_offers = num_model > 0 ? num_model : num_offered.data()[slot];
      const int64_t num_scheduled = scheduled.size() ? scheduled.data()[i] : 0;
      const int64_t num_drafts = std::min(num_scheduled, num_offers);  // others fill up

      const int64_t column = sums.requests;
      rows.place[column] = static_cast<int64_t>(i);
      rows.slot[column] = slot;
      rows.num_tokens[column] = num_tokens;
      rows.num_drafts[column] = num_drafts;
      rows.num_model_drafts[column] = num_model > 0 ? num_drafts : 0;
      rows.room[column] = end.data()[slot] - 1 - new_length;
      rows.length[column] = new_length;

      sums.requests += 1;
      sums.scheduled += num_scheduled;
      sums.context += new_length;
      sums.num_drafts += num_drafts;
      if (!record.data()[slot]) continue;
      sums.forwards += 1;
      sums.written += num_tokens;
      sums.drafted_forwards += num_drafts > 0;
      sums.drafted += num_drafts;
      sums.accepted += std::min(num_tokens - 1, num_drafts);
    }
    return sums.tuple();
  }

  // Returns the tokens that a model drafted for a request. `model`: tokens of each
  // draft where it makes all; 0: it makes some; -1: none.
  int64_t num_model_tokens(int64_t model, int64_t slot) const {
    if (model > 0) return model;
    if (model < 0) return 0;
    return num_model_offered.data()[slot];
  }

  bool process_single_tokens(const In<int64_t>& slots, const nb::list& outputs,
                             const In<int64_t>& all_stops, const nb::dict& texts) {
    const size_t batch = slots.size();
    const auto num_steps = static_cast<int64_t>(outputs.size());
    check(slots);
    for (size_t i = 0; i < batch; ++i) {
      const int64_t slot = slots.data()[i];
      if (slot < 0 || ended.data()[slot]) return false;
      if (end.data()[slot] - length.data()[slot] <= num_steps) return false;
    }
    std::vector<nb::handle> tokens;  // of the first step's requests, the second's, ...
    tokens.reserve(outputs.size() * batch);
    for (const nb::handle sampled : outputs) {
      if (size_of(sampled) != batch)
        throw std::invalid_argument(
            "process_single_tokens: the steps differ in their requests");
      for (size_t i = 0; i < batch; ++i) {
        const nb::handle of_request = item(sampled, i);
        if (size_of(of_request) != 1) return false;
        const nb::handle token = item(of_request, 0);
        if (ends_some_request(all_stops, token)) return false;
        tokens.push_back(token);
      }
    }
    for (size_t i = 0; i < batch; ++i) {
      const int64_t slot = slots.data()[i];
      length.data()[slot] += num_steps;
      const nb::handle text = texts.size() ? value_of(texts, slot) : nb::handle();
      if (!text.is_valid()) continue;
      for (size_t k = i; k < tokens.size(); k += batch) append(text, tokens[k]);
    }
    return batch > 0;
  }

  void record_offers(const In<int64_t>& slots, const In<int32_t>& lengths,
                     const Table<const float>& chances,
                     const In<int64_t>& model_lengths) {
    const size_t batch = slots.size();
    const size_t max_tokens = survival.shape(1);
    const size_t num_tokens = chances.shape(1);
    if (lengths.size() != batch || chances.shape(0) != batch ||
        model_lengths.size() != batch || num_tokens > max_tokens)
      throw std::invalid_argument(
          "record_offers: the columns of the batch differ in length");
    check(slots);
    const double mean_accepted =
        std::accumulate(mean_survival.data(), mean_survival.data() + max_tokens, 0.0);
    std::vector<double> survival_sums(max_tokens);
    double num_requests = 0;
    double num_pairs = 0;  // requests of which the offer before is known
    double product_sum = 0;
    double square_sum = 0;
    for (size_t i = 0; i < batch; ++i) {
      const int64_t slot = slots.data()[i];
      if (slot < 0) continue;
      const auto length = static_cast<size_t>(lengths.data()[i]);
      float* const row = survival.data() + static_cast<size_t>(slot) * max_tokens;
      float survived = 1.0f;
      float accepted = 0.0f;
      for (size_t k = 0; k < num_tokens; ++k) {
        survived *= chances.data()[i * num_tokens + k];
        row[k] = survived;
        if (k >= length) continue;
        survival_sums[k] += survived;
        accepted += survived;
      }
      const double before = expected_accepted.data()[slot] - mean_accepted;
      if (offer_known.data()[slot]) {
        num_pairs += 1;
        product_sum += before * (accepted - mean_accepted);
        square_sum += before * before;
      }
      num_requests += 1;
      expected_accepted.data()[slot] = accepted;
      auto& unoffered = batches_unoffered.data()[slot];
      unoffered = length ? 0 : unoffered + 1;
      num_offered.data()[slot] = lengths.data()[i];
      num_model_offered.data()[slot] = model_lengths.data()[i];
      offer_known.data()[slot] = true;
    }
    if (!num_requests) return;
    constexpr double max_batches = tuning::FORECAST_BATCHES;
    auto& fields = persistence_fields();
    fields.batches = std::min(fields.batches + 1, max_batches);
    for (size_t k = 0; k < max_tokens; ++k)
      move_towards(mean_survival.data()[k], survival_sums[k] / num_requests,
                   fields.batches);
    if (!num_pairs) return;
    move_towards(fields.covariance, product_sum / num_pairs, max_batches);
    move_towards(fields.variance, square_sum / num_pairs, max_batches);
  }

  int64_t forecast_drafts(const In<int64_t>& slots, const In<int64_t>& limits,
                          float min_chance, bool last, Out<float> out,
                          Out<int64_t> offsets) const {
    const size_t batch = slots.size();
    const size_t max_tokens = survival.shape(1);
    if (limits.size() != batch || offsets.size() != batch + 1 ||
        out.size() < batch * max_tokens)
      throw std::invalid_argument(
          "forecast_drafts: the columns of the batch differ in length");
    check(slots);
    const double persisting = last ? 1.0 : persistence_fields().after_two_steps();
    int64_t num_chances = 0;
    offsets.data()[0] = 0;
    for (size_t i = 0; i < batch; ++i) {
      const auto slot = static_cast<size_t>(slots.data()[i]);
      const bool known = offer_known.data()[slot];
      const auto unoffered = static_cast<double>(batches_unoffered.data()[slot]);
      // The forecast is a mean of the request's last draft and of the average draft.
      const double own_share = known ? persisting : 0.0;
      const double mean_share =
          (1.0 - own_share) * std::exp2(-unoffered / tuning::UNOFFERED_BATCHES);
      const int64_t last_length = known ? num_offered.data()[slot] : 0;
      const int64_t limit = std::min<int64_t>(limits.data()[i], max_tokens);
      const float* const own = survival.data() + slot * max_tokens;
      for (int64_t k = 0; k < limit; ++k) {
        const double own_chance = k < last_length ? own[k] : 0.0;
        const double chance =
            own_share * own_chance + mean_share * mean_survival.data()[k];
        if (chance < min_chance || chance <= 0) break;
        out.data()[num_chances] = static_cast<float>(chance);
        ++num_chances;
      }
      offsets.data()[i + 1] = num_chances;
    }
    return num_chances;
  }

 private:
  Persistence& persistence_fields() const {
    return *reinterpret_cast<Persistence*>(persistence.data());
  }
};

}  // namespace

void bind_live_texts(nb::module_& m) {
  nb::class_<LiveColumns>(m, "LiveColumns")
      .def(nb::init<Out<int64_t>, Out<int64_t>, Out<int64_t>, Out<int64_t>,
                    Out<int64_t>, Out<bool>, Out<bool>, Out<bool>, Out<float>,
                    Table<float>, Out<double>, Out<double>>(),
           nb::arg("length"), nb::arg("end"), nb::arg("num_offered"),
           nb::arg("num_model_offered"), nb::arg("batches_unoffered"), nb::arg("ended"),
           nb::arg("offer_known"), nb::arg("record"), nb::arg("expected_accepted"),
           nb::arg("survival"), nb::arg("mean_survival"), nb::arg("persistence"))
      .def("process_output", &LiveColumns::process_output,
           "Append the tokens that each request of a batch got in a step, given the "
           "draft tokens that it was scheduled with; put place, slot, tokens, draft "
           "tokens, those of a model, room and length of those that go on into out "
           "int64 [7, b]. Return how many go on, and sums.")
      .def("process_single_tokens", &LiveColumns::process_single_tokens,
           "Append steps in each of which every request got one token, its end not "
           "among them. Return whether they were such steps; else nothing has "
           "changed.")
      .def("record_offers", &LiveColumns::record_offers,
           "Record the drafts that were offered to the requests of a batch.")
      .def("forecast_drafts", &LiveColumns::forecast_drafts,
           "Put the survival chances that the drafts of the step after the next are "
           "going to have into out, or those of the last ones, and each draft's end "
           "into offsets int64 [b + 1]. Return how many tokens they are.");
}

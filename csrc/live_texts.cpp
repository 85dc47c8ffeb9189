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

namespace nb = nanobind;

namespace {

template <class T>
using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr size_t kRows = 7;  // of what `take` writes
constexpr double kBatches = 256;  // that were heard of, over which drafts are averaged
constexpr double kEmpty = 100;  // of these in which a request was offered nothing: half
                                // as much is expected then

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

nb::handle value_of(const nb::dict& by_slot, int64_t slot) {  // nullptr: it has none
  return PyDict_GetItem(by_slot.ptr(), nb::int_(slot).ptr());
}

// The first `count` of a request's tokens.
struct Tokens {
  nb::handle list;
  size_t count;

  // Cuts them behind the first of the `stops`; `all` are those of all requests, rising.
  // Returns whether there is one.
  bool cut(const In<int64_t>& all, const nb::dict& stops, int64_t slot) {
    if (!all.size()) return false;
    for (size_t i = 0; i < count; ++i) {
      const nb::handle token = item(list, i);
      if (!std::binary_search(all.data(), all.data() + all.size(),
                              nb::cast<int64_t>(token)))
        continue;
      const nb::handle own = value_of(stops, slot);
      const int found =
          own.is_valid() ? PySequence_Contains(own.ptr(), token.ptr()) : 0;
      if (found < 0) throw nb::python_error();
      if (found) return count = i + 1, true;
    }
    return false;
  }

  void append_to(nb::handle text) const {
    for (size_t i = 0; text.is_valid() && i < count; ++i)
      if (PyList_Append(text.ptr(), item(list, i).ptr())) throw nb::python_error();
  }
};

// Columns of the live requests by slot, which LiveTexts has.
struct LiveTexts {
  Out<int64_t> length, end, offered, by_model, empty;
  Out<bool> ended, heard, record;
  Out<float> promised;
  Table<float> chances;
  Out<double> usual, lasting;  // of all requests

  LiveTexts(Out<int64_t> length, Out<int64_t> end, Out<int64_t> offered,
            Out<int64_t> by_model, Out<int64_t> empty, Out<bool> ended, Out<bool> heard,
            Out<bool> record, Out<float> promised, Table<float> chances,
            Out<double> usual, Out<double> lasting)
      : length(length),
        end(end),
        offered(offered),
        by_model(by_model),
        empty(empty),
        ended(ended),
        heard(heard),
        record(record),
        promised(promised),
        chances(chances),
        usual(usual),
        lasting(lasting) {
    const size_t slots = length.size();
    for (const auto* column : {&end, &offered, &by_model, &empty})
      if (column->size() != slots)
        throw std::invalid_argument("LiveTexts: the columns differ in length");
    for (const auto* column : {&ended, &heard, &record})
      if (column->size() != slots)
        throw std::invalid_argument("LiveTexts: the columns differ in length");
    if (chances.shape(0) != slots || promised.size() != slots ||
        usual.size() != chances.shape(1) || lasting.size() != 3)
      throw std::invalid_argument("LiveTexts: the columns differ in length");
  }

  void check(const In<int64_t>& slots) const {
    for (size_t i = 0; i < slots.size(); ++i)
      if (slots.data()[i] >= static_cast<int64_t>(length.size()))
        throw std::out_of_range("LiveTexts: no such slot");
  }

  nb::tuple take(const In<int64_t>& slots, const nb::list& sampled,
                 const In<int64_t>& given, int64_t model, const In<int64_t>& all_stops,
                 const nb::dict& stops, const nb::dict& texts, Table<int64_t> out) {
    const size_t batch = slots.size();
    if (sampled.size() != batch || (given.size() && given.size() != batch) ||
        out.shape(0) != kRows || out.shape(1) != batch)
      throw std::invalid_argument("take: the columns of the batch differ in length");
    check(slots);
    int64_t* row[kRows];
    for (size_t k = 0; k < kRows; ++k) row[k] = out.data() + k * batch;
    int64_t n = 0, drafts = 0, carried = 0, context = 0;
    int64_t forwards = 0, written = 0, drafted_forwards = 0, drafted = 0,
            accepted = 0;  // in training rollouts
    for (size_t i = 0; i < batch; ++i) {
      const int64_t slot = slots.data()[i];
      Tokens tokens{sampled[i], size_of(sampled[i])};
      if (!tokens.count || slot < 0 || ended.data()[slot]) continue;
      const int64_t left = end.data()[slot] - length.data()[slot];
      tokens.count = static_cast<size_t>(
          std::max<int64_t>(1, std::min(static_cast<int64_t>(tokens.count), left)));
      const bool stopped = tokens.cut(all_stops, stops, slot);
      const auto got = static_cast<int64_t>(tokens.count);
      if (texts.size()) tokens.append_to(value_of(texts, slot));
      ended.data()[slot] = stopped || got >= left;
      const int64_t now = length.data()[slot] += got;
      const int64_t modelled = model > 0   ? model
                               : model < 0 ? 0
                                           : by_model.data()[slot];
      const int64_t scheduled = given.size() ? given.data()[i] : 0;
      const int64_t real = std::min(
          scheduled,
          modelled > 0 ? modelled : offered.data()[slot]);  // others are fillers
      const int64_t values[kRows] = {
          static_cast<int64_t>(i),    slot, got, real, modelled > 0 ? real : 0,
          end.data()[slot] - 1 - now, now};
      for (size_t k = 0; k < kRows; ++k) row[k][n] = values[k];
      ++n, drafts += scheduled, carried += real, context += now;
      if (!record.data()[slot]) continue;
      ++forwards, written += got, drafted_forwards += real > 0, drafted += real,
          accepted += std::min(got - 1, real);
    }
    return nb::make_tuple(n, n + drafts, context, carried, forwards, written,
                          drafted_forwards, drafted, accepted);
  }

  bool take_singles(const In<int64_t>& slots, const nb::list& outputs,
                    const In<int64_t>& all_stops, const nb::dict& texts) {
    const size_t batch = slots.size();
    const auto steps = static_cast<int64_t>(outputs.size());
    check(slots);
    for (size_t i = 0; i < batch; ++i) {
      const int64_t slot = slots.data()[i];
      if (slot < 0 || ended.data()[slot] ||
          end.data()[slot] - length.data()[slot] <= steps)
        return false;
    }
    std::vector<nb::handle> tokens;  // step by step
    tokens.reserve(outputs.size() * batch);
    for (const nb::handle sampled : outputs) {
      if (size_of(sampled) != batch)
        throw std::invalid_argument("take_singles: the steps differ in their requests");
      for (size_t i = 0; i < batch; ++i) {
        const nb::handle got = item(sampled, i);
        if (size_of(got) != 1) return false;
        const nb::handle token = item(got, 0);
        if (std::binary_search(all_stops.data(), all_stops.data() + all_stops.size(),
                               nb::cast<int64_t>(token)))
          return false;
        tokens.push_back(token);
      }
    }
    for (size_t i = 0; i < batch; ++i) {
      const int64_t slot = slots.data()[i];
      length.data()[slot] += steps;
      const nb::handle text = texts.size() ? value_of(texts, slot) : nb::handle();
      for (size_t at = i; text.is_valid() && at < tokens.size(); at += batch)
        if (PyList_Append(text.ptr(), tokens[at].ptr())) throw nb::python_error();
    }
    return batch > 0;
  }

  void hear(const In<int64_t>& slots, const In<int32_t>& lengths,
            const Table<const float>& given, const In<int64_t>& modelled) {
    const size_t batch = slots.size(), most = chances.shape(1), tokens = given.shape(1);
    if (lengths.size() != batch || given.shape(0) != batch ||
        modelled.size() != batch || tokens > most)
      throw std::invalid_argument("hear: the columns of the batch differ in length");
    check(slots);
    std::vector<double> sum(most);
    const double expected = std::accumulate(usual.data(), usual.data() + most, 0.0);
    double requests = 0, again = 0, product = 0, square = 0;
    for (size_t i = 0; i < batch; ++i) {
      const int64_t slot = slots.data()[i];
      if (slot < 0) continue;
      const auto there = static_cast<size_t>(lengths.data()[i]);
      float reached = 1.0f, all = 0.0f;
      for (size_t k = 0; k < tokens; ++k) {
        chances.data()[static_cast<size_t>(slot) * most + k] = reached *=
            given.data()[i * tokens + k];
        if (k < there) sum[k] += reached, all += reached;
      }
      const double before = promised.data()[slot] - expected;
      if (heard.data()[slot])
        again += 1, product += before * (all - expected), square += before * before;
      requests += 1;
      promised.data()[slot] = all;
      empty.data()[slot] = there ? 0 : empty.data()[slot] + 1;
      offered.data()[slot] = lengths.data()[i];
      by_model.data()[slot] = modelled.data()[i];
      heard.data()[slot] = true;
    }
    if (!requests) return;
    double* batches = lasting.data();
    *batches = std::min(*batches + 1, kBatches);
    for (size_t k = 0; k < most; ++k)
      usual.data()[k] += (sum[k] / requests - usual.data()[k]) / *batches;
    if (!again) return;
    lasting.data()[1] += (product / again - lasting.data()[1]) / kBatches;
    lasting.data()[2] += (square / again - lasting.data()[2]) / kBatches;
  }

  // The share of what a request's draft promises beyond the usual that is still there
  // two steps later.
  double lasts() const {
    const double product = lasting.data()[1], square = lasting.data()[2];
    const double next = square > 0 ? std::clamp(product / square, 0.0, 1.0) : 1.0;
    return next * next;
  }

  int64_t found(const In<int64_t>& slots, const In<int64_t>& limits, float floor,
                bool last, Out<float> out, Out<int64_t> offsets) const {
    const size_t batch = slots.size(), most = chances.shape(1);
    if (limits.size() != batch || offsets.size() != batch + 1 ||
        out.size() < batch * most)
      throw std::invalid_argument("found: the columns of the batch differ in length");
    check(slots);
    const double kept = last ? 1.0 : lasts();
    int64_t n = offsets.data()[0] = 0;
    for (size_t i = 0; i < batch; ++i) {
      const auto slot = static_cast<size_t>(slots.data()[i]);
      const bool known = heard.data()[slot];
      const double own = known ? kept : 0.0;
      const double rest =
          (1.0 - own) * std::exp2(-static_cast<double>(empty.data()[slot]) / kEmpty);
      const int64_t there = known ? offered.data()[slot] : 0,
                    end = std::min<int64_t>(limits.data()[i], most);
      for (int64_t k = 0; k < end; ++k) {
        const double offers = k < there ? chances.data()[slot * most + k] : 0.0;
        const double chance = own * offers + rest * usual.data()[k];
        if (chance < floor || chance <= 0) break;
        out.data()[n++] = static_cast<float>(chance);
      }
      offsets.data()[i + 1] = n;
    }
    return n;
  }
};

}  // namespace

void bind_live_texts(nb::module_& m) {
  nb::class_<LiveTexts>(m, "LiveTexts")
      .def(nb::init<Out<int64_t>, Out<int64_t>, Out<int64_t>, Out<int64_t>,
                    Out<int64_t>, Out<bool>, Out<bool>, Out<bool>, Out<float>,
                    Table<float>, Out<double>, Out<double>>(),
           nb::arg("length"), nb::arg("end"), nb::arg("offered"), nb::arg("by_model"),
           nb::arg("empty"), nb::arg("ended"), nb::arg("heard"), nb::arg("record"),
           nb::arg("promised"), nb::arg("chances"), nb::arg("usual"),
           nb::arg("lasting"))
      .def("take", &LiveTexts::take,
           "Take the tokens that each request of a batch got in a step, and the draft "
           "tokens that it was given; put "
           "place, slot, tokens, draft tokens, those of a model, room and length of "
           "those that go on into out "
           "int64 [7, b]. Return how many go on, and sums.")
      .def("take_singles", &LiveTexts::take_singles,
           "Take steps in each of which every request got one token, its end not among "
           "them. Return whether they were "
           "such steps; else nothing has changed.")
      .def("hear", &LiveTexts::hear,
           "Take the drafts that were offered to the requests of a batch.")
      .def("found", &LiveTexts::found,
           "Put the survival chances that the drafts of the step after the next are "
           "going to have into out, or those of "
           "the last ones, and each draft's end into offsets int64 [b + 1]. Return how "
           "many tokens they are.");
}

// Shares out the draft tokens of a step; das_adapter/core/budget.py explains it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

namespace das {

// What StepModel says of a step's tokens, for which see das_adapter/core/latency.py.
struct TokenCosts {
  double token, bend, knee, draft;
  std::vector<double> sizes;
};

// Returns values, none of them negative, from the greatest to the least. The bits of such floats rise as they do: three
// passes over 11 bits each, which few values are not worth.
inline std::vector<float> descending(std::vector<float> values) {
  constexpr uint32_t kBits = 11, kDigits = 1u << kBits;
  if (values.size() < 256) {
    std::sort(values.begin(), values.end(), std::greater<>());
    return values;
  }
  std::vector<uint32_t> from(values.size()), to(values.size());
  std::memcpy(from.data(), values.data(), values.size() * sizeof(float));
  for (uint32_t shift = 0; shift < 32; shift += kBits) {
    std::array<uint32_t, kDigits + 1> begin{};
    const auto digit = [shift](uint32_t bits) { return kDigits - 1 - (bits >> shift) % kDigits; };
    for (const uint32_t bits : from) ++begin[digit(bits) + 1];
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    for (const uint32_t bits : from) to[begin[digit(bits)]++] = bits;
    from.swap(to);
  }
  std::vector<float> sorted(values.size());
  std::memcpy(sorted.data(), from.data(), values.size() * sizeof(float));
  return sorted;
}

// Keeps the set of tokens whose value exceeds its cost by most, given the chances of each request's draft,
// `chances[offsets[i]]` and on, and what an accepted token of it is worth; returns the gain. Of m tokens the best set
// is the m of greatest value, and as values fall along each draft, those above a threshold are a prefix of it: the best
// m decides.
inline double allocate(const float* chances, const int64_t* offsets, const double* worth, size_t batch,
                       const TokenCosts& costs, int64_t* keep) {
  const auto n = static_cast<size_t>(offsets[batch]);
  std::vector<float> value(n);
  for (size_t i = 0; i < batch; ++i) {
    const auto accepted = static_cast<float>(worth[i]);
    for (int64_t j = offsets[i]; j < offsets[i + 1]; ++j) value[j] = chances[j] * accepted;
  }
  auto size = costs.sizes.begin();
  const auto seconds = [&](size_t drafted) {  // of the step's tokens; `drafted` never falls
    auto tokens = static_cast<double>(batch + drafted);
    while (size != costs.sizes.end() && *size < tokens) ++size;
    if (size != costs.sizes.end()) tokens = *size;
    return costs.token * tokens + costs.bend * std::max(0.0, tokens - costs.knee) + (drafted ? costs.draft : 0.0);
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
      static_cast<int64_t>(most) - (std::find(best_first.begin(), best_first.end(), threshold) - best_first.begin());
  for (size_t i = 0; i < batch; ++i) {
    int64_t j = offsets[i];
    while (j < offsets[i + 1] && value[j] > threshold) ++j;
    for (; ties > 0 && j < offsets[i + 1] && value[j] == threshold; ++j) --ties;
    keep[i] = j - offsets[i];
  }
  return gain;
}

}  // namespace das

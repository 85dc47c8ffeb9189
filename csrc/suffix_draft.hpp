// From matches to a draft: weighted votes token by token, and the chance that it is accepted so far.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "suffix_text.hpp"

namespace das {

// Strength of a match in half tokens: its length, and what agrees beyond a single differing token. With no equal token
// at all (`length` 0) it is the agreement before the last token that counts.
constexpr uint32_t kBeyond = 3;  // agreement beyond the differing token is counted this far
inline uint32_t strength(uint32_t length, uint32_t beyond) { return length ? 2 * length + beyond : beyond - 1; }

// One occurrence and what follows it there.
struct Candidate {
  const Token* next;
  const Token* end;
  uint32_t strength;
  uint32_t weight;  // of its source

  bool over() const { return next == end || *next < 0; }
};

// What the candidates that go on with `token` say.
struct Vote {
  Token token;
  uint32_t count, strength;  // how many there are, and the strongest
  uint64_t votes;
};

// Votes grow with the 6th power of strength: nearly "the longest match decides", but many shorter ones can object.
inline const std::array<uint64_t, 200>& vote_table() {
  static const auto table = [] {
    std::array<uint64_t, 200> t{};
    for (uint64_t i = 0; i < t.size(); ++i) t[i] = (i + 1) * (i + 1) * (i + 1) * (i + 1) * (i + 1) * (i + 1);
    return t;
  }();
  return table;
}

// How often draft tokens of one kind were accepted, learned from what requests went on with. A kind is the share of
// the votes, the strength and the number of the occurrences behind a token. It starts from what recorded rollouts of
// twelve models show.
class Acceptance {
 public:
  Acceptance() {
    for (uint32_t kind = 0; kind < cells_.size(); ++kind) {
      const uint32_t c = kind % kCounts, m = kind / kCounts % kStrengths, s = kind / kCounts / kStrengths;
      const double chance = 1 / (1 + std::exp(3 - 0.4 * s - 0.3 * m - 0.65 * c));
      cells_[kind] = {static_cast<uint32_t>(std::lround(kPrior * chance)), kPrior};
    }
  }

  static uint16_t kind(uint64_t votes, uint64_t all, uint32_t strength, uint32_t count) {
    const double share = static_cast<double>(votes) / static_cast<double>(all);
    uint32_t s = 0, m = 0;
    while (s + 1 < kShares && share >= kShareSteps[s]) ++s;
    while (m + 1 < kStrengths && strength >= kStrengthSteps[m]) ++m;
    const uint32_t c = count > 3 ? 2 : count > 1;
    return static_cast<uint16_t>((s * kStrengths + m) * kCounts + c);
  }

  double chance(uint16_t kind) const {
    const Cell& cell = cells_[kind];
    return static_cast<double>(cell.accepted + 1) / static_cast<double>(cell.tried + 2);
  }

  void learn(uint16_t kind, bool accepted) {
    Cell& cell = cells_[kind];
    ++cell.tried, cell.accepted += accepted;
    if (cell.tried >= kMemory) cell.tried /= 2, cell.accepted /= 2;
  }

 private:
  static constexpr uint32_t kShares = 8, kStrengths = 8, kCounts = 3;
  static constexpr std::array<double, kShares - 1> kShareSteps{0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 1.0};
  static constexpr std::array<uint32_t, kStrengths - 1> kStrengthSteps{3, 5, 8, 12, 18, 32, 64};
  static constexpr uint32_t kPrior = 40, kMemory = 1u << 13;  // tokens the start counts for, and the past at most
  struct Cell {
    uint32_t accepted, tried;
  };
  std::array<Cell, kShares * kStrengths * kCounts> cells_;
};

}  // namespace das

// Makes a draft from matches: weighted votes on each token, and the chance that the
// draft is accepted up to there.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "suffix_text.hpp"

namespace das {

// Strength of a match in half tokens: two per equal token (`length`), and one per token
// that agrees beyond a single differing one (`beyond`). Where the last token differs
// (`length` 0), only the agreement before it counts.
constexpr uint32_t kBeyond =
    3;  // at most so many tokens beyond the differing one count
constexpr uint32_t kSure =
    8;  // places that differ in the last token are searched only below this strength
constexpr uint32_t kOwn = 512, kSibling = 256,
                   kPrompt = 64;  // weights; the newest history has a sibling's
constexpr double kHalfLife = 8;  // newer visits of its problem after which a text's
                                 // vote has lost half its weight
inline uint32_t strength(uint32_t length, uint32_t beyond) {
  return length ? 2 * length + beyond : beyond - 1;
}

// Weights of the history by its age in visits.
inline const std::array<uint32_t, 256>& fading() {
  static const auto table = [] {
    std::array<uint32_t, 256> t{};
    for (size_t age = 0; age < t.size(); ++age)
      t[age] = std::max<uint32_t>(
          1, std::lround(kSibling * std::exp2(-static_cast<double>(age) / kHalfLife)));
    return t;
  }();
  return table;
}

// A place where the context occurs, and the tokens that follow it there.
struct Candidate {
  const Stored* next;
  const Stored* end;
  uint32_t strength;
  uint32_t
      weight;  // weight of its text: own, a sibling's, the prompt, or history by age
  bool own;  // the request's own text or prompt

  bool over() const { return next == end || *next < 0; }
};

// The votes of all candidates whose next token is `token`.
struct Vote {
  Token token;
  uint32_t count,
      strength;  // the number of these candidates, and the strength of the strongest
  uint64_t votes;
  bool own;  // all of them are in the request's own text or prompt
};

// Votes grow with the 6th power of strength: the longest match nearly decides, but many
// shorter ones can outvote it.
inline const std::array<uint64_t, 200>& vote_table() {
  static const auto table = [] {
    std::array<uint64_t, 200> t{};
    for (uint64_t i = 0; i < t.size(); ++i)
      t[i] = (i + 1) * (i + 1) * (i + 1) * (i + 1) * (i + 1) * (i + 1);
    return t;
  }();
  return table;
}

// Estimates the chance that a draft token is accepted, given that all before it in its
// draft were; it learns from what requests wrote after their drafts.
//
// Each draft token has a kind: its share of the votes, the strength of the strongest
// candidate behind it, how many candidates there are, and its source (`own`: only the
// request's own text or prompt; else other texts too). For each kind the tokens that
// were tried and those accepted are counted. While a kind has few counts, its estimate
// is close to a prior, which weighs as much as kPrior tokens: the rate that fits
// recorded rollouts of twelve models, with its odds multiplied by how much better or
// worse than these rates the tokens of the same source have been accepted so far.
// Tokens that were written ahead are all of one kind, kAhead, whose prior is kRepeated.
class Acceptance {
 public:
  Acceptance() {
    for (uint32_t kind = 0; kind < kKinds; ++kind) {
      const uint32_t c = kind % kCounts, m = kind / kCounts % kStrengths,
                     s = kind / kCounts / kStrengths;
      start[kind] =
          std::lround(kPrior / (1 + std::exp(3 - 0.4 * s - 0.3 * m - 0.65 * c))) /
          kPrior;
    }
  }

  static uint16_t kind(uint64_t votes, uint64_t all, uint32_t strength, uint32_t count,
                       bool own) {
    const double share = static_cast<double>(votes) / static_cast<double>(all);
    uint32_t s = 0, m = 0;
    while (s + 1 < kShares && share >= kShareSteps[s]) ++s;
    while (m + 1 < kStrengths && strength >= kStrengthSteps[m]) ++m;
    const uint32_t c = count > 3 ? 2 : count > 1;
    return static_cast<uint16_t>(((own * kShares + s) * kStrengths + m) * kCounts + c);
  }

  double chance(uint16_t kind) const {
    const Cell& cell = cells_[kind];
    if (kind == kAhead)
      return (cell.accepted + kPrior * kRepeated) / (cell.tried + kPrior);
    const Source& source = sources_[kind / kKinds];
    const double better =
        (source.accepted + kDoubt) / (source.tried - source.accepted + kDoubt) *
        ((source.tried - source.expected + kDoubt) / (source.expected + kDoubt));
    const double odds = start[kind % kKinds] * better;
    const double from = odds / (1 - start[kind % kKinds] + odds);
    return (cell.accepted + kPrior * from) / (cell.tried + kPrior);
  }

  void learn(uint16_t kind, bool accepted) {
    Cell& cell = cells_[kind];
    ++cell.tried, cell.accepted += accepted;
    if (cell.tried >= kMemory) cell.tried /= 2, cell.accepted /= 2;
    if (kind == kAhead) return;
    Source& source = sources_[kind / kKinds];
    source.tried += 1, source.accepted += accepted,
        source.expected += start[kind % kKinds];
    if (source.tried >= kMemory)
      source.tried /= 2, source.accepted /= 2, source.expected /= 2;
  }

  static constexpr uint32_t kShares = 8, kStrengths = 8, kCounts = 3,
                            kKinds = kShares * kStrengths * kCounts;
  static constexpr std::array<double, kShares - 1> kShareSteps{0.3,  0.5,  0.7, 0.85,
                                                               0.95, 0.99, 1.0};
  static constexpr std::array<uint32_t, kStrengths - 1> kStrengthSteps{3,  5,  8, 12,
                                                                       18, 32, 64};
  static constexpr uint16_t kAhead = 2 * kKinds;
  static constexpr double kRepeated = 0.95;
  static constexpr double kPrior = 40,
                          kDoubt =
                              8;  // weight of a kind's prior and of a source's, tokens
  static constexpr uint32_t kMemory = 1u << 13;  // weight of the past at most, tokens
  std::array<double, kKinds>
      start;  // the chance of each kind before anything is learned

 private:
  struct Cell {
    uint32_t accepted = 0, tried = 0;
  };
  struct Source {
    double accepted = 0, tried = 0, expected = 0;
  };
  std::array<Cell, 2 * kKinds + 1> cells_;
  std::array<Source, 2> sources_;
};

}  // namespace das

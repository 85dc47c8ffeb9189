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

// Return the strength of a match in half tokens: two per equal token (`length`), and
// one per token that agrees beyond a single differing one (`beyond`).
inline uint32_t match_strength(uint32_t length, uint32_t beyond) {
  return 2 * length + beyond;
}

// Return the strength of a place whose last token differs: only the agreement before
// that token counts, and one less of it.
inline uint32_t differing_strength(uint32_t length_before) {
  return std::min(length_before, tuning::BEYOND_TOKENS) - 1;
}

// Return the weights of sealed text by its age in visits.
inline const std::array<uint32_t, 256>& weights_by_age() {
  static const auto table = [] {
    std::array<uint32_t, 256> weights{};
    for (size_t age = 0; age < weights.size(); ++age) {
      const double half_lives = static_cast<double>(age) / tuning::HALF_LIFE_VISITS;
      const double weight = tuning::SIBLING_WEIGHT * std::exp2(-half_lives);
      weights[age] = std::max<uint32_t>(1, std::lround(weight));
    }
    return weights;
  }();
  return table;
}

// A place where the context occurs, and the tokens that follow it there.
struct Candidate {
  const Stored* next;
  const Stored* end;
  uint32_t strength;
  // Of its text: the request's own, a sibling's, the prompt, or history by its age.
  uint32_t weight;
  bool own;  // the request's own text or prompt

  bool ended() const { return next == end || *next < 0; }
};

// The votes of all candidates whose next token is `token`.
struct Vote {
  Token token;
  uint32_t num_places;  // number of these candidates
  uint32_t strength;    // of the strongest of them
  uint64_t votes;
  bool own;  // all of them are in the request's own text or prompt
};

// Return what a candidate of weight 1 votes with, by its strength: a power of strength
// + 1. The longest match nearly decides, but many shorter ones can outvote it.
using VoteTable = std::array<uint64_t, tuning::MOST_STRENGTH + 1>;
inline const VoteTable& votes_by_strength() {
  static const auto table = [] {
    VoteTable votes{};
    for (uint64_t strength = 0; strength < votes.size(); ++strength) {
      votes[strength] = 1;
      for (uint32_t i = 0; i < tuning::VOTE_POWER; ++i) votes[strength] *= strength + 1;
    }
    return votes;
  }();
  return table;
}

// Estimates the chance that a draft token is accepted, given that all before it in its
// draft were; it learns from what requests wrote after their drafts.
//
// Each draft token has a kind: its source (the request's own text and prompt alone;
// other texts of its problem, too; texts of all problems), its share of the votes, the
// strength of the strongest place behind it, and how many places there are. The last
// three are cut into classes, and packed into one number, as engine/v2/votes.py does,
// too:
//
//   kind = ((source * kShares + share class) * kStrengths + strength class) * kCounts
//          + count class
//
//   source      kinds
//   kProblem    from 0
//   kOwn        from kKinds
//   kOthers     from 2 kKinds
//   (ahead)     kAhead = 3 kKinds
//
// For each kind the tokens that were tried and those accepted are counted. While a kind
// has few counts, its estimate is close to a prior, which weighs as much as
// PRIOR_TOKENS: the rate that fits recorded rollouts of twelve models, with its odds
// multiplied by how much better or worse than these rates the tokens of the same source
// have been accepted so far. Tokens that were written ahead are all of one kind,
// kAhead, whose prior is AHEAD_CHANCE.
class Acceptance {
 public:
  static constexpr uint32_t kShares = tuning::SHARE_STEPS.size() + 1;
  static constexpr uint32_t kStrengths = tuning::STRENGTH_STEPS.size() + 1;
  static constexpr uint32_t kCounts = tuning::COUNT_STEPS.size() + 1;
  static constexpr uint32_t kKinds = kShares * kStrengths * kCounts;  // of one source
  enum Source : uint32_t { kProblem, kOwn, kOthers, kSources };
  static constexpr uint16_t kAhead = kSources * kKinds;

  // The chance of each kind of a source before anything is learned.
  std::array<double, kKinds> prior_chance;

  Acceptance() {
    for (uint32_t kind = 0; kind < kKinds; ++kind) {
      const uint32_t count = kind % kCounts;
      const uint32_t strength = kind / kCounts % kStrengths;
      const uint32_t share = kind / kCounts / kStrengths;
      const double minus_logit = tuning::PRIOR_OFFSET - tuning::PRIOR_SHARE * share -
                                 tuning::PRIOR_STRENGTH * strength -
                                 tuning::PRIOR_COUNT * count;
      // Whole tokens of the prior's weight, so that hosts and devices agree.
      const double accepted = tuning::PRIOR_TOKENS / (1 + std::exp(minus_logit));
      prior_chance[kind] = std::lround(accepted) / tuning::PRIOR_TOKENS;
    }
  }

  // `votes` of `all_votes` are for the token.
  static uint16_t kind(uint64_t votes, uint64_t all_votes, uint32_t strength,
                       uint32_t num_places, Source source) {
    const double vote_share =
        static_cast<double>(votes) / static_cast<double>(all_votes);
    const uint32_t share_class = class_of(vote_share, tuning::SHARE_STEPS);
    const uint32_t strength_class = class_of(strength, tuning::STRENGTH_STEPS);
    const uint32_t count_class = class_of(num_places, tuning::COUNT_STEPS);
    const uint32_t by_share = source * kShares + share_class;
    const uint32_t by_strength = by_share * kStrengths + strength_class;
    return static_cast<uint16_t>(by_strength * kCounts + count_class);
  }

  double chance(uint16_t kind) const {
    const Cell& cell = cells_[kind];
    if (kind == kAhead) return estimate(cell, tuning::AHEAD_CHANCE);
    constexpr double prior_tokens = tuning::SOURCE_PRIOR_TOKENS;
    const Outcomes& source = sources_[kind / kKinds];
    const double accepted = source.accepted + prior_tokens;
    const double rejected = source.tried - source.accepted + prior_tokens;
    const double expected = source.expected + prior_tokens;
    const double expected_rejected = source.tried - source.expected + prior_tokens;
    // The odds that the source had, to those that the prior expects of it.
    const double odds_ratio = accepted / rejected * (expected_rejected / expected);
    const double prior = prior_chance[kind % kKinds];
    const double odds = prior * odds_ratio;
    return estimate(cell, odds / (1 - prior + odds));
  }

  // Reduces the counts to a few, at a weight sync: the new policy accepts about what
  // the last one did, but if it does not, the counts of the last must not outweigh its
  // own.
  void forget() {
    for (Cell& cell : cells_) {
      if (cell.tried <= tuning::SYNC_TOKENS) continue;
      cell.accepted = cell.accepted * tuning::SYNC_TOKENS / cell.tried;
      cell.tried = tuning::SYNC_TOKENS;
    }
    for (Outcomes& source : sources_) {
      const double kept = std::min(1.0, tuning::SYNC_TOKENS / source.tried);
      source.tried *= kept;
      source.accepted *= kept;
      source.expected *= kept;
    }
  }

  void learn(uint16_t kind, bool accepted) {
    Cell& cell = cells_[kind];
    cell.tried += 1;
    cell.accepted += accepted;
    if (cell.tried >= tuning::MEMORY_TOKENS) {
      cell.tried /= 2;
      cell.accepted /= 2;
    }
    if (kind == kAhead) return;
    Outcomes& source = sources_[kind / kKinds];
    source.tried += 1;
    source.accepted += accepted;
    source.expected += prior_chance[kind % kKinds];
    if (source.tried >= tuning::MEMORY_TOKENS) {
      source.tried /= 2;
      source.accepted /= 2;
      source.expected /= 2;
    }
  }

 private:
  struct Cell {  // tokens of a kind
    uint32_t accepted = 0;
    uint32_t tried = 0;
  };
  // Of the tokens of a source; `expected`: to be accepted, by their priors.
  struct Outcomes {
    double accepted = 0;
    double tried = 0;
    double expected = 0;
  };

  // Return in which class a value lies: how many steps, which rise, are not above it.
  template <class T, size_t kSteps>
  static uint32_t class_of(T value, const std::array<T, kSteps>& steps) {
    uint32_t found = 0;
    while (found < kSteps && value >= steps[found]) ++found;
    return found;
  }

  static double estimate(const Cell& cell, double prior) {
    return (cell.accepted + tuning::PRIOR_TOKENS * prior) /
           (cell.tried + tuning::PRIOR_TOKENS);
  }

  std::array<Cell, kSources * kKinds + 1> cells_;
  std::array<Outcomes, kSources> sources_;
};

}  // namespace das

// Thins the history of one problem out: the stretches of text stay that are worth most
// for their bytes, each once.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "suffix_build.hpp"

namespace das {

class Thinning {
 public:
  // `all`: the history of a problem.
  explicit Thinning(const Segment& all) : all_(all), kept_(all.tokens.size) {
    for (const Segment::Run& run : all.runs)
      for (uint32_t i = run.start, end = all.end(run); i < end; ++i)
        if (all.tokens[i] < 0) texts_.push_back({i + 1, end, &run});
    for (size_t t = 0; t + 1 < texts_.size(); ++t)
      texts_[t].end = texts_[t + 1].begin - 1;
    for (size_t k = 0; k < kGrams.size(); ++k) group_tokens(grams_[k], kGrams[k]);
  }

  // Adds what stays to an empty builder; as a segment it takes `max_bytes` at most.
  void add_kept_to(Builder& builder, uint64_t max_bytes) {
    uint64_t room = max_bytes;
    for (;;) {
      select(room);
      const std::vector<Stretch> stretches = kept_stretches();
      const uint64_t num_bytes = nbytes(stretches);
      if (num_bytes <= max_bytes || stretches.empty()) {
        for (const Stretch& s : stretches)
          builder.add(&all_.tokens[s.context_begin], s.end - s.context_begin,
                      s.run->version, s.num_rollouts, s.before,
                      s.begin - s.context_begin);
        return;
      }
      room -= std::min(room, num_bytes - max_bytes);  // runs were not counted
    }
  }

 private:
  static constexpr auto& kGrams = tuning::THIN_GRAM_TOKENS;
  static constexpr uint32_t kMostRollouts = 128;  // that a run's 8 bits stand for

  // A text of the history: its tokens are those from `begin` to `end`.
  struct TextRange {
    uint32_t begin;
    uint32_t end;
    const Segment::Run* run;
  };
  // Tokens that stay, from `begin` to `end`, behind the context that stays with them.
  struct Stretch {
    uint32_t context_begin;
    uint32_t begin;
    uint32_t end;
    Token before;  // kStart or kGap, in front of the context
    const Segment::Run* run;
    uint32_t num_rollouts;  // that each of its tokens stands for
  };
  // Equal tokens behind so many equal tokens are a group.
  struct Grams {
    std::vector<uint32_t> group;  // by position, from 1; 0: a token is only context
    std::vector<uint32_t> num_rollouts;  // by group: rollouts that have it
    std::vector<bool> is_kept;           // by group: whether one of it is kept
    std::vector<uint32_t> last_pass;  // by group: the last pass over a text that met it
  };

  void group_tokens(Grams& grams, uint32_t gram_tokens) const {
    uint32_t num_groups = 0;
    // Tokens that follow the context at hand, each with its group.
    std::vector<std::pair<Token, uint32_t>> following;
    grams.group.assign(all_.tokens.size, 0);
    for (const Segment::Place& p : all_.places) {
      // Whole texts that are shorter than the gram may be the same, too.
      const bool begins_text = p.lcp && all_.tokens[p.position + 1 - p.lcp] < 0;
      const bool same_context = p.lcp >= gram_tokens || begins_text;
      if (!same_context) following.clear();
      const Token next = all_.tokens[p.position + 1];
      auto it = std::find_if(following.begin(), following.end(),
                             [&](const auto& f) { return f.first == next; });
      if (it == following.end()) {
        ++num_groups;
        it = following.insert(it, {next, num_groups});
      }
      grams.group[p.position + 1] = it->second;
    }
    grams.num_rollouts.assign(num_groups + 1, 0);
    std::vector<uint32_t> last_text(num_groups + 1, UINT32_MAX);
    for (uint32_t t = 0; t < texts_.size(); ++t) {
      for (uint32_t i = texts_[t].begin; i < texts_[t].end; ++i) {
        const uint32_t group = grams.group[i];
        if (last_text[group] == t) continue;  // a text counts once
        last_text[group] = t;
        grams.num_rollouts[group] += texts_[t].run->count;
      }
    }
  }

  // Keeps what is worth its bytes at a price that falls until there is no room, of
  // equal stretches the newest.
  void select(uint64_t room) {
    std::fill(kept_.begin(), kept_.end(), false);
    int64_t price = 0;
    for (Grams& grams : grams_) {
      grams.is_kept.assign(grams.num_rollouts.size(), false);
      grams.last_pass.assign(grams.num_rollouts.size(), 0);
      price += kRollout * *std::max_element(grams.num_rollouts.begin() + 1,
                                            grams.num_rollouts.end());
    }
    auto units_left = static_cast<int64_t>(kUnitsPerByte * room);
    uint32_t pass = 0;
    while (price && units_left >= kTokenUnits) {
      for (auto text = texts_.rbegin(); text != texts_.rend(); ++text) {
        ++pass;
        units_left -= keep_stretches(*text, price, pass, units_left);
      }
      price = price * tuning::THIN_PRICE_QUARTERS / 4;
    }
  }

  // Keeps the stretches of a text that together exceed the price of their bytes by
  // most; returns the units that they take.
  int64_t keep_stretches(const TextRange& text, int64_t price, uint32_t pass,
                         int64_t units_left) {
    choose(text, price, pass);
    int64_t units = 0;
    for (uint32_t i = text.begin; i < text.end; ++i) {
      if (!choices_[i - text.begin].kept || kept_[i]) continue;
      const bool joins_next = i + 1 < text.end && kept_[i + 1];
      int64_t cost = kTokenUnits;
      if (!follows_kept(text, i)) cost += head_units(text, i);
      if (joins_next) cost -= head_units(text, i + 1);
      if (cost > units_left - units) continue;
      units += cost;
      kept_[i] = true;
      for (Grams& grams : grams_) grams.is_kept[grams.group[i]] = true;
    }
    return units;
  }

  // Chooses the tokens of a text that exceed the price by most, by dynamic programming:
  // forwards, the greatest gain up to each token, whether it is kept or not; backwards,
  // what that was made of.
  void choose(const TextRange& text, int64_t price, uint32_t pass) {
    constexpr int64_t kNever = INT64_MIN / 2;
    int64_t gain_outside = 0;  // the most gained where the token in front goes,
    int64_t gain_inside = kNever;  // and where it stays
    choices_.assign(text.end - text.begin, {});
    for (uint32_t i = text.begin; i < text.end; ++i) {
      Choice& choice = choices_[i - text.begin];
      int64_t gain_begun = gain_outside;
      int64_t gain_continued = gain_inside;
      if (!kept_[i])
        gain_begun -= price * head_units(text, i);
      else if (!follows_kept(text, i))
        gain_continued += price * head_units(text, i);  // it needs no context any more
      choice.begins = gain_begun > gain_continued;
      choice.ended = gain_inside > gain_outside;
      int64_t gain_kept = kNever;
      if (grams_[0].group[i]) {
        gain_kept = std::max(gain_begun, gain_continued);
        if (!kept_[i]) gain_kept += kTokenUnits * (new_rollouts(i, pass) - price);
      }
      gain_outside = kept_[i] ? kNever : std::max(gain_inside, gain_outside);
      gain_inside = gain_kept;
    }
    bool keep = gain_inside > gain_outside;
    for (uint32_t i = text.end; i-- > text.begin;) {
      Choice& choice = choices_[i - text.begin];
      choice.kept = keep;
      keep = keep ? !choice.begins : choice.ended;
    }
  }

  bool follows_kept(const TextRange& text, uint32_t i) const {
    return i > text.begin && kept_[i - 1];
  }

  // Returns the units that a stretch that begins at `i` takes besides its tokens.
  static int64_t head_units(const TextRange& text, uint32_t i) {
    const uint32_t num_context = std::min(tuning::THIN_CONTEXT_TOKENS, i - text.begin);
    return kUnitsPerByte * sizeof(Stored) * (1 + num_context);
  }

  // Returns what keeping a token is worth, in parts of a rollout: the rollouts that
  // have the token behind the same tokens, added up for each number of these; 0 where
  // one like it is kept.
  int64_t new_rollouts(uint32_t i, uint32_t pass) {
    int64_t num_rollouts = 0;
    for (Grams& grams : grams_) {
      const uint32_t group = grams.group[i];
      if (grams.is_kept[group] || grams.last_pass[group] == pass) continue;
      grams.last_pass[group] = pass;
      num_rollouts += grams.num_rollouts[group];
    }
    return kRollout * num_rollouts;
  }

  std::vector<Stretch> kept_stretches() const {
    std::vector<Stretch> found;
    for (const TextRange& text : texts_) {
      uint32_t i = text.begin;
      while (i < text.end) {
        if (!kept_[i]) {
          ++i;
          continue;
        }
        const uint32_t begin = i;
        while (i < text.end && kept_[i]) ++i;
        found.push_back(stretch(text, begin, i));
        ++i;  // the token behind a stretch is not kept
      }
    }
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
      return std::tie(a.run, a.num_rollouts) < std::tie(b.run, b.num_rollouts);
    });
    return found;
  }

  Stretch stretch(const TextRange& text, uint32_t begin, uint32_t end) const {
    const uint32_t num_context = std::min(begin, tuning::THIN_CONTEXT_TOKENS);
    const uint32_t context_begin = std::max(text.begin, begin - num_context);
    const bool from_start = context_begin == text.begin;
    const Token before = from_start ? Token{all_.tokens[context_begin - 1]} : kGap;
    const Grams& longest = grams_.back();
    uint64_t sum = 0;
    for (uint32_t i = begin; i < end; ++i)
      sum += longest.num_rollouts[longest.group[i]];
    const uint64_t mean = std::min<uint64_t>(sum / (end - begin), kMostRollouts);
    const uint32_t num_rollouts = power_of_two(static_cast<uint32_t>(mean));
    return {context_begin, begin, end, before, text.run, num_rollouts};
  }

  static uint64_t nbytes(const std::vector<Stretch>& stretches) {
    Segment::Shape shape{1, 0, 0};
    const Stretch* previous = nullptr;
    for (const Stretch& s : stretches) {
      shape.tokens += 1 + s.end - s.context_begin;
      shape.places += s.end - s.begin;
      shape.runs += !previous || previous->run->version != s.run->version ||
                    previous->num_rollouts != s.num_rollouts;
      previous = &s;
    }
    return shape.bytes();
  }

  // Returns the greatest power of two up to `most`, which is at least 1.
  static uint32_t power_of_two(uint32_t most) {
    uint32_t power = 1;
    while (power <= most / 2) power *= 2;
    return power;
  }

  // Room is counted in units, parts of a byte: a token with its place and its share of
  // a sample takes kTokenUnits of them.
  static constexpr int64_t kUnitsPerByte = Segment::kStride / sizeof(uint64_t);
  static constexpr int64_t kTokenUnits =
      kUnitsPerByte * (sizeof(Stored) + sizeof(Segment::Place)) + 1;
  // Worth and price are counted in parts of a rollout.
  static constexpr int64_t kRollout = 64;

  struct Choice {
    bool begins;  // if the token is kept, a stretch begins
    bool ended;  // if it is not, one ends in front of it
    bool kept;
  };

  const Segment& all_;
  std::array<Grams, kGrams.size()> grams_;
  std::vector<bool> kept_;  // by position
  std::vector<TextRange> texts_;
  std::vector<Choice> choices_;  // of the text at hand
};

}  // namespace das

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
  explicit Thinning(const Segment& all) : all_(all), taken_(all.tokens.size) {
    for (const Segment::Run& run : all.runs)
      for (uint32_t i = run.start, end = all.end(run); i < end; ++i)
        if (all.tokens[i] < 0) texts_.push_back({i + 1, end, &run});
    for (size_t t = 0; t + 1 < texts_.size(); ++t)
      texts_[t].end = texts_[t + 1].begin - 1;
    for (size_t k = 0; k < kGrams.size(); ++k) number(grams_[k], kGrams[k]);
  }

  // Adds what stays to an empty builder; as a segment it takes `max_bytes` at most.
  void into(Builder& builder, uint64_t max_bytes) {
    for (uint64_t room = max_bytes;;) {
      select(room);
      const std::vector<Kept> kept = stretches();
      const uint64_t bytes = nbytes(kept);
      if (bytes <= max_bytes || kept.empty()) {
        for (const Kept& k : kept)
          builder.add(&all_.tokens[k.from], k.end - k.from, k.run->version, k.count,
                      k.before, k.begin - k.from);
        return;
      }
      room -= std::min(room, bytes - max_bytes);  // runs were not counted
    }
  }

 private:
  static constexpr std::array<uint32_t, 3> kGrams{
      2, 4, 8};  // tokens before one that make it the same in two texts
  static constexpr uint32_t kContext =
      8;  // tokens that stay in front of a stretch, so that matches may begin there
  static constexpr uint32_t kCounted = 128;  // most rollouts that a text stands for

  struct Written {
    uint32_t begin, end;
    const Segment::Run* run;
  };
  struct Kept {
    uint32_t from, begin, end;  // its context, itself
    Token before;
    const Segment::Run* run;
    uint32_t count;
  };
  // Tokens with equal tokens before them, so many, are a group.
  struct Grams {
    std::vector<uint32_t>
        group;  // by position, from 1; 0: tokens that are only context
    std::vector<uint32_t> shared;  // by group: rollouts that have it
    std::vector<bool> covered;  // by group: one of it is taken
    std::vector<uint32_t> seen;  // by group: the last pass over a text that met it
  };

  void number(Grams& grams, uint32_t size) const {
    uint32_t groups = 0;
    std::vector<std::pair<Token, uint32_t>> following;
    grams.group.assign(all_.tokens.size, 0);
    for (const Segment::Place& p : all_.places) {
      const bool same =
          p.lcp >= size || (p.lcp && all_.tokens[p.position + 1 - p.lcp] < 0);
      if (!same) following.clear();
      const Token next = all_.tokens[p.position + 1];
      auto it = std::find_if(following.begin(), following.end(),
                             [&](const auto& f) { return f.first == next; });
      if (it == following.end()) it = following.insert(it, {next, ++groups});
      grams.group[p.position + 1] = it->second;
    }
    grams.shared.assign(groups + 1, 0);
    std::vector<uint32_t> last(groups + 1, UINT32_MAX);
    for (uint32_t t = 0; t < texts_.size(); ++t)
      for (uint32_t i = texts_[t].begin; i < texts_[t].end; ++i)
        if (std::exchange(last[grams.group[i]], t) != t)
          grams.shared[grams.group[i]] += texts_[t].run->count;
  }

  // Takes what is worth its bytes at a price that falls until there is no room, of
  // equal stretches the newest.
  void select(uint64_t room) {
    std::fill(taken_.begin(), taken_.end(), false);
    int64_t price = 0, left = static_cast<int64_t>(kUnits * room);
    for (Grams& grams : grams_) {
      grams.covered.assign(grams.shared.size(), false),
          grams.seen.assign(grams.shared.size(), 0);
      price += kWorth * *std::max_element(grams.shared.begin() + 1, grams.shared.end());
    }
    for (uint32_t pass = 0; price && left >= kToken; price = price * 3 / 4)
      for (auto text = texts_.rbegin(); text != texts_.rend(); ++text)
        take(*text, price, ++pass, left);
  }

  // Takes the stretches of a text that together exceed the price of their bytes by
  // most.
  void take(const Written& text, int64_t price, uint32_t pass, int64_t& left) {
    constexpr int64_t kNever = INT64_MIN / 2;
    int64_t outside = 0, inside = kNever;  // the most gained where the token in front
                                           // is not kept, and where it is
    choices_.assign(text.end - text.begin, {});
    for (uint32_t i = text.begin; i < text.end; ++i) {
      Choice& choice = choices_[i - text.begin];
      int64_t begun = outside, gone_on = inside, kept = kNever;
      if (taken_[i]) {
        if (!follows(text, i))
          gone_on += price * head(text, i);  // it needs no context any more
      } else {
        begun -= price * head(text, i);
      }
      choice.begins = begun > gone_on;
      if (grams_[0].group[i]) kept = std::max(begun, gone_on);
      if (grams_[0].group[i] && !taken_[i]) kept += kToken * (worth(i, pass) - price);
      choice.ended = inside > outside;
      outside = taken_[i] ? kNever : std::max(inside, outside);
      inside = kept;
    }
    bool keep = inside > outside;
    for (uint32_t i = text.end; i-- > text.begin;) {
      Choice& choice = choices_[i - text.begin];
      choice.kept = keep;
      keep = keep ? !choice.begins : choice.ended;
    }
    for (uint32_t i = text.begin; i < text.end; ++i) {
      if (!choices_[i - text.begin].kept || taken_[i]) continue;
      const bool joins = i + 1 < text.end && taken_[i + 1];
      const int64_t cost = kToken + (follows(text, i) ? 0 : head(text, i)) -
                           (joins ? head(text, i + 1) : 0);
      if (cost > left) continue;
      left -= cost, taken_[i] = true;
      for (Grams& grams : grams_) grams.covered[grams.group[i]] = true;
    }
  }

  bool follows(const Written& text, uint32_t i) const {
    return i > text.begin && taken_[i - 1];
  }

  // What a stretch that begins there takes besides its tokens.
  static int64_t head(const Written& text, uint32_t i) {
    return kUnits * sizeof(Stored) * (1 + std::min(kContext, i - text.begin));
  }

  // Rollouts that have the token after the same tokens, added up for each number of
  // these; 0 where one like it is taken.
  int64_t worth(uint32_t i, uint32_t pass) {
    int64_t rollouts = 0;
    for (Grams& grams : grams_) {
      const uint32_t group = grams.group[i];
      if (!grams.covered[group] && std::exchange(grams.seen[group], pass) != pass)
        rollouts += grams.shared[group];
    }
    return kWorth * rollouts;
  }

  std::vector<Kept> stretches() const {
    std::vector<Kept> kept;
    for (const Written& text : texts_)
      for (uint32_t i = text.begin; i < text.end; ++i) {
        if (!taken_[i]) continue;
        Kept k{
            std::max(text.begin, i - std::min(i, kContext)), i, i, kGap, text.run, 0};
        if (k.from == text.begin) k.before = all_.tokens[k.from - 1];
        uint64_t sum = 0;
        for (; i < text.end && taken_[i]; ++i)
          sum += grams_.back().shared[grams_.back().group[i]];
        k.end = i, k.count = power(static_cast<uint32_t>(
                       std::min<uint64_t>(sum / (k.end - k.begin), kCounted)));
        kept.push_back(k);
      }
    std::stable_sort(kept.begin(), kept.end(), [](const Kept& a, const Kept& b) {
      return std::tie(a.run, a.count) < std::tie(b.run, b.count);
    });
    return kept;
  }

  static uint64_t nbytes(const std::vector<Kept>& kept) {
    Segment::Shape shape{1, 0, 0};
    for (size_t i = 0; i < kept.size(); ++i) {
      const Kept& k = kept[i];
      shape.tokens += 1 + k.end - k.from, shape.places += k.end - k.begin;
      shape.runs += !i || kept[i - 1].run->version != k.run->version ||
                    kept[i - 1].count != k.count;
    }
    return shape.bytes();
  }

  static uint32_t power(
      uint32_t x) {  // the greatest power of two up to x, which is at least 1
    uint32_t p = 1;
    while (p <= x / 2) p *= 2;
    return p;
  }

  // Room is counted in parts of a byte: a token with its place and its share of a
  // sample takes kToken of them.
  static constexpr int64_t kUnits = Segment::kStride / sizeof(uint64_t);
  static constexpr int64_t kToken =
      kUnits * (sizeof(Stored) + sizeof(Segment::Place)) + 1;
  static constexpr int64_t kWorth =
      64;  // parts of a rollout that worth and price are counted in

  struct Choice {
    bool begins, ended;  // if the token is kept, a stretch begins; if not, one ends in
                         // front of it
    bool kept;
  };

  const Segment& all_;
  std::array<Grams, kGrams.size()> grams_;
  std::vector<bool> taken_;  // by position
  std::vector<Written> texts_;
  std::vector<Choice> choices_;  // of the text at hand
};

}  // namespace das

// Thins the history of one problem out: the stretches of text that most of its rollouts share stay, each once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "suffix_build.hpp"

namespace das {

class Thinning {
 public:
  // `all`: the history of a problem.
  explicit Thinning(const Segment& all) : all_(all), group_(all.tokens.size), taken_(all.tokens.size) {
    find_groups();
    for (const Segment::Run& run : all.runs)
      for (uint32_t i = run.start, end = all.end(run); i < end; ++i)
        if (all.tokens[i] < 0) texts_.push_back({i + 1, end, &run});
    for (size_t t = 0; t + 1 < texts_.size(); ++t) texts_[t].end = texts_[t + 1].begin - 1;
    std::vector<uint32_t> last(shared_.size(), UINT32_MAX);
    for (uint32_t t = 0; t < texts_.size(); ++t)
      for (uint32_t i = texts_[t].begin; i < texts_[t].end; ++i)
        if (std::exchange(last[group_[i]], t) != t) shared_[group_[i]] += texts_[t].run->count;
  }

  // Adds what stays to an empty builder; as a segment it takes `max_bytes` at most.
  void into(Builder& builder, uint64_t max_bytes) {
    for (uint64_t room = max_bytes;;) {
      select(room);
      const std::vector<Kept> kept = stretches();
      const uint64_t bytes = nbytes(kept);
      if (bytes <= max_bytes || kept.empty()) {
        for (const Kept& k : kept)
          builder.add(&all_.tokens[k.from], k.end - k.from, k.run->version, k.count, k.before, k.begin - k.from);
        return;
      }
      room -= std::min(room, bytes - max_bytes);  // runs were not counted
    }
  }

 private:
  static constexpr uint32_t kGram = 4;     // tokens before one that make it the same in two texts
  static constexpr uint32_t kContext = 8;  // tokens that stay in front of a stretch, so that matches may begin there
  static constexpr uint32_t kBridge = 4;   // most tokens between two stretches that are made one
  static constexpr uint32_t kShort = 4;    // fewest tokens of a stretch by itself
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

  // Numbers the tokens with equal kGram tokens before them from 1; 0: tokens that are only context.
  void find_groups() {
    uint32_t groups = 0;
    std::vector<std::pair<Token, uint32_t>> following;
    for (const Segment::Place& p : all_.places) {
      const bool same = p.lcp >= kGram || (p.lcp && all_.tokens[p.position + 1 - p.lcp] < 0);
      if (!same) following.clear();
      const Token next = all_.tokens[p.position + 1];
      auto it = std::find_if(following.begin(), following.end(), [&](const auto& f) { return f.first == next; });
      if (it == following.end()) it = following.insert(it, {next, ++groups});
      group_[p.position + 1] = it->second;
    }
    shared_.assign(groups + 1, 0);
  }

  bool wanted(uint32_t i, uint32_t level) const {
    return group_[i] && !taken_[i] && !covered_[group_[i]] && shared_[group_[i]] >= level;
  }

  // Takes stretches while there is room: those that most rollouts share first, of these the newest.
  void select(uint64_t room) {
    std::fill(taken_.begin(), taken_.end(), false);
    covered_.assign(shared_.size(), false);
    uint64_t left = kUnits * room;
    for (uint32_t level = power(*std::max_element(shared_.begin() + 1, shared_.end())); level; level /= 2)
      for (auto text = texts_.rbegin(); text != texts_.rend(); ++text)
        for (uint32_t i = text->begin; i < text->end; ++i)
          if (wanted(i, level)) i = take(*text, i, level, left) - 1;
  }

  // Takes the stretch that begins with the wanted token `i`, if it is long enough and there is room; returns its end.
  uint32_t take(const Written& text, uint32_t i, uint32_t level, uint64_t& left) {
    const auto free = [&](uint32_t j) { return group_[j] && !taken_[j]; };
    uint32_t begin = i, end = i;
    while (begin > text.begin && i - begin < kBridge && free(begin - 1)) --begin;
    const bool first = begin == text.begin && all_.tokens[begin - 1] == kStart;
    bool joined = begin > text.begin && taken_[begin - 1];
    if (!first && !joined) begin = i;
    std::vector<uint32_t> covered;
    uint32_t j = i;
    for (; j < text.end && free(j) && j - end <= kBridge; ++j) {
      if (!wanted(j, level)) continue;
      end = j + 1;
      covered_[group_[j]] = true, covered.push_back(group_[j]);
    }
    const uint32_t stop = end;
    const uint64_t head = joined ? 0 : kUnits * sizeof(Stored) * (1 + std::min(kContext, begin - text.begin));
    if (j < text.end && taken_[j] && j - end <= kBridge) end = j, joined = true;
    const uint64_t most = left > head ? (left - head) / kToken : 0;
    if (end - begin > most) end = begin + static_cast<uint32_t>(most), joined = false;
    if (end - begin < kShort && !joined) {
      for (uint32_t group : covered) covered_[group] = false;
      return stop;
    }
    std::fill(taken_.begin() + begin, taken_.begin() + end, true);
    left -= head + kToken * (end - begin);
    return std::max(stop, end);
  }

  std::vector<Kept> stretches() const {
    std::vector<Kept> kept;
    for (const Written& text : texts_)
      for (uint32_t i = text.begin; i < text.end; ++i) {
        if (!taken_[i]) continue;
        Kept k{std::max(text.begin, i - std::min(i, kContext)), i, i, kGap, text.run, 0};
        if (k.from == text.begin) k.before = all_.tokens[k.from - 1];
        uint64_t sum = 0;
        for (; i < text.end && taken_[i]; ++i) sum += shared_[group_[i]];
        k.end = i, k.count = power(static_cast<uint32_t>(std::min<uint64_t>(sum / (k.end - k.begin), kCounted)));
        kept.push_back(k);
      }
    std::stable_sort(kept.begin(), kept.end(),
                     [](const Kept& a, const Kept& b) { return std::tie(a.run, a.count) < std::tie(b.run, b.count); });
    return kept;
  }

  static uint64_t nbytes(const std::vector<Kept>& kept) {
    Segment::Shape shape{1, 0, 0};
    for (size_t i = 0; i < kept.size(); ++i) {
      const Kept& k = kept[i];
      shape.tokens += 1 + k.end - k.from, shape.places += k.end - k.begin;
      shape.runs += !i || kept[i - 1].run->version != k.run->version || kept[i - 1].count != k.count;
    }
    return shape.bytes();
  }

  static uint32_t power(uint32_t x) {  // the greatest power of two up to x, which is at least 1
    uint32_t p = 1;
    while (p <= x / 2) p *= 2;
    return p;
  }

  // Room is counted in parts of a byte: a token with its place and its share of a sample takes kToken of them.
  static constexpr uint64_t kUnits = Segment::kStride / sizeof(uint64_t);
  static constexpr uint64_t kToken = kUnits * (sizeof(Stored) + sizeof(Segment::Place)) + 1;

  const Segment& all_;
  std::vector<uint32_t> group_;   // by position
  std::vector<uint32_t> shared_;  // by group: rollouts that have it
  std::vector<bool> taken_;       // by position
  std::vector<bool> covered_;     // by group
  std::vector<Written> texts_;
};

}  // namespace das

// Builds a segment from older segments and from new trajectories.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "suffix_segment.hpp"

namespace das {

// Collects segments and trajectories of one problem, oldest first, and merges them into one segment.
class Builder {
 public:
  explicit Builder(uint32_t depth) : depth_(depth) { tokens_.push_back(kStart); }

  // Adds a segment's trajectories of versions >= `from`. Whatever is added must be younger than what was added before.
  void add(const Segment& segment, int64_t from = INT64_MIN) {
    std::vector<uint32_t> renamed(segment.trajectories.size, UINT32_MAX), moved(segment.trajectories.size);
    for (size_t i = 0; i < renamed.size(); ++i) {
      const Segment::Trajectory& t = segment.trajectories[i];
      if (t.version < from) continue;
      renamed[i] = static_cast<uint32_t>(trajectories_.size());
      moved[i] = append(&segment.tokens[t.start] + 1, t.size, t.version) - t.start;  // modulo 2^32
    }
    Places places;
    places.reserve(segment.places.size);
    uint32_t lcp = 0;  // shared with the last place kept: the least lcp since then
    for (const Segment::Place& p : segment.places) {
      lcp = std::min<uint32_t>(lcp, p.lcp);
      if (renamed[p.trajectory] == UINT32_MAX) continue;
      places.push_back({p.position + moved[p.trajectory], lcp, renamed[p.trajectory]});
      lcp = UINT8_MAX;
    }
    runs_.push_back(std::move(places));
  }

  void add(const std::vector<std::pair<int64_t, Text>>& texts) {
    std::vector<Item> items;
    for (const auto& [version, text] : texts) {
      const auto index = static_cast<uint32_t>(trajectories_.size());
      const uint32_t start = append(text.data(), text.size(), version);
      for (uint32_t i = 0; i < text.size(); ++i) items.push_back({0, start + i, index});
    }
    Places places;
    places.reserve(items.size());
    order(items.data(), items.data() + items.size(), 0, 0, places);
    runs_.push_back(std::move(places));
  }

  bool empty() const { return trajectories_.empty(); }

  Segment build() {
    while (runs_.size() > 1) {  // the youngest first, because they are the smallest
      Places fresh = std::move(runs_.back());
      runs_.pop_back();
      if (runs_.back().empty() || fresh.empty())
        runs_.back().insert(runs_.back().end(), fresh.begin(), fresh.end());
      else
        runs_.back() = merged(runs_.back(), fresh);
    }
    const Places& places = runs_.front();
    const Segment::Shape shape{tokens_.size(), trajectories_.size()};
    auto bytes = std::make_shared<std::vector<uint64_t>>(shape.bytes() / 8);
    const Segment segment(bytes->data(), shape, bytes);
    const auto put = [](const auto& span, const auto* from) {
      std::memcpy(const_cast<void*>(static_cast<const void*>(span.data)), from, span.size * sizeof *from);
    };
    put(segment.trajectories, trajectories_.data()), put(segment.places, places.data());
    put(segment.tokens, tokens_.data());
    uint64_t* samples = bytes->data() + (segment.samples.data - bytes->data());
    for (size_t i = 0; i < segment.samples.size; ++i) samples[i] = segment.key(places[i * Segment::kStride]);
    return segment;
  }

 private:
  using Places = std::vector<Segment::Place>;
  struct Item {
    uint64_t key;  // two context tokens, at the depth that is being sorted
    uint32_t position, trajectory;
  };

  // Appends a trajectory, and returns the position of the kStart before its text.
  uint32_t append(const Token* text, size_t size, int64_t version) {
    if (tokens_.size() + size > UINT32_MAX || trajectories_.size() + 1 >= (1u << 24))
      throw std::length_error("one problem holds at most 2^32 tokens in 2^24 trajectories: expire older versions");
    const auto start = static_cast<uint32_t>(tokens_.size() - 1);
    trajectories_.push_back({start, static_cast<uint32_t>(size), version});
    tokens_.insert(tokens_.end(), text, text + size);
    tokens_.push_back(kStart);
    return start;
  }

  // Sorts [begin, end), whose contexts agree in `at` tokens, by the next two tokens at a time, and appends the places.
  // `lcp`: tokens that the first one shares with the place before it.
  void order(Item* begin, Item* end, uint32_t at, uint32_t lcp, Places& out) const {
    for (Item* i = begin; i != end; ++i) {
      const Token* last = &tokens_[i->position] - at;
      i->key = Segment::key(*last, *last != kStart && at + 1 < depth_ ? last[-1] : kStart);
    }
    std::sort(begin, end,
              [](const Item& a, const Item& b) { return a.key != b.key ? a.key < b.key : a.position > b.position; });
    uint64_t previous = 0;
    for (Item* run = begin; run != end;) {
      const uint64_t key = run->key;
      Item* next = std::find_if(run, end, [&](const Item& i) { return i.key != key; });
      if (run != begin) lcp = at + ((key ^ previous) >> 32 == 0);
      const bool ended = !static_cast<uint32_t>(key) || at + 2 >= depth_;
      if (next - run == 1 || ended) {
        const uint32_t shared = !(key >> 32) ? at + 1 : std::min(at + 2, depth_);
        for (Item* i = run; i != next; ++i) out.push_back({i->position, i == run ? lcp : shared, i->trajectory});
      } else {
        order(run, next, at + 2, lcp, out);
      }
      previous = key;
      run = next;
    }
  }

  // Merges two sorted runs by their lcp values: tokens are compared only where these tie. `fresh` lies behind `old`.
  Places merged(const Places& old, const Places& fresh) const {
    Places out;
    out.reserve(old.size() + fresh.size());
    size_t i = 0, j = 0;
    uint32_t a = 0, b = 0;  // tokens that old[i] and fresh[j] share with the place written last
    const auto take = [&out](const Places& list, size_t& next, uint32_t& lcp) {
      out.push_back(list[next++]);
      out.back().lcp = lcp;
      lcp = next < list.size() ? list[next].lcp : 0;
    };
    while (i < old.size() && j < fresh.size()) {
      if (a == b) {
        const Token *x = &tokens_[old[i].position], *y = &tokens_[fresh[j].position];
        const Match m = match({x + 1, UINT32_MAX}, y, depth_, a ? a - 1 : 0);
        const auto back = static_cast<ptrdiff_t>(m.length);
        if (!m.ended && x[-back] < y[-back])
          take(old, i, a), b = m.length;
        else
          take(fresh, j, b), a = m.length;
      } else if (a > b) {
        take(old, i, a);
      } else {
        take(fresh, j, b);
      }
    }
    while (i < old.size()) take(old, i, a);
    while (j < fresh.size()) take(fresh, j, b);
    return out;
  }

  uint32_t depth_;
  Text tokens_;
  std::vector<Segment::Trajectory> trajectories_;
  std::vector<Places> runs_;  // the places of everything added, each run in order
};

}  // namespace das

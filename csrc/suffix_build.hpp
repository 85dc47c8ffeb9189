// Builds a segment from older segments and from new trajectories.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "suffix_segment.hpp"

namespace das {

// Collects segments and texts of one problem, oldest first, and merges them into one
// segment.
class Builder {
 public:
  bool empty() const { return tokens_.empty(); }
  // Whether so many tokens more, with what is before and behind them, are not too many
  // for a segment.
  bool fits(uint64_t tokens) const {
    return tokens_.size() + tokens <= Segment::kCapacity - 2;
  }

  // Adds a segment's texts of versions >= `from`. Whatever is added must be younger
  // than what was added before.
  void add(const Segment& segment, int64_t from = INT64_MIN) {
    // How far each run's positions move.
    std::vector<int64_t> moved(segment.runs.size, kDropped);
    for (size_t i = 0; i < moved.size(); ++i) {
      const Segment::Run& run = segment.runs[i];
      if (run.version < from) continue;
      moved[i] = int64_t{begin_run(run.version, run.count)} - run.start;
      tokens_.insert(tokens_.end(), &segment.tokens[run.start],
                     &segment.tokens[segment.end(run)]);
    }
    Places places;
    places.reserve(segment.places.size);
    const bool moved_alike = std::adjacent_find(moved.begin(), moved.end(),
                                                std::not_equal_to<>()) == moved.end();
    uint32_t lcp = 0;  // shared with the last place kept: the least lcp since then
    for (const Segment::Place& p : segment.places) {
      lcp = std::min<uint32_t>(lcp, p.lcp);
      const size_t run =
          moved_alike ? 0 : &segment.run(p.position) - segment.runs.begin();
      const int64_t distance = moved[run];
      if (distance == kDropped) continue;
      places.push_back({static_cast<uint32_t>(p.position + distance), lcp});
      lcp = UINT8_MAX;
    }
    sorted_.push_back(std::move(places));
  }

  // Adds a text. `before`: what precedes it, kStart or kGap; `known`: tokens at its
  // beginning that are only context.
  template <class T>
  void add(const T* text, size_t size, int32_t version, uint32_t count = 1,
           Token before = kStart, size_t known = 0) {
    const uint32_t start = begin_run(version, count);
    tokens_.push_back(before);
    tokens_.insert(tokens_.end(), text, text + size);
    for (size_t i = known; i < size; ++i)
      items_.push_back({0, start + static_cast<uint32_t>(i)});
  }

  // The segment of what was added, which is not empty.
  Segment build() {
    tokens_.push_back(kStart);
    Places fresh;
    fresh.reserve(items_.size());
    order(items_.data(), items_.data() + items_.size(), 0, 0, fresh);
    // The youngest segments first, because they are the smallest.
    for (; !sorted_.empty(); sorted_.pop_back())
      fresh = fresh.empty() ? std::move(sorted_.back()) : merged(sorted_.back(), fresh);
    const Segment::Shape shape{tokens_.size(), fresh.size(), runs_.size()};
    auto bytes = std::make_shared<std::vector<uint64_t>>(shape.bytes() / 8);
    const Segment segment(bytes->data(), shape, bytes);
    const auto put = [](const auto& span, const auto* from) {
      std::memcpy(const_cast<void*>(static_cast<const void*>(span.data)), from,
                  span.size * sizeof *from);
    };
    put(segment.runs, runs_.data());
    put(segment.places, fresh.data());
    put(segment.tokens, tokens_.data());
    uint64_t* samples = bytes->data() + (segment.samples.data - bytes->data());
    for (size_t i = 0; i < segment.samples.size; ++i)
      samples[i] = segment.key(fresh[i * Segment::kStride]);
    return segment;
  }

 private:
  using Places = std::vector<Segment::Place>;
  static constexpr int64_t kDropped = INT64_MIN;
  struct Item {
    uint64_t key;  // two context tokens, at the depth that is being sorted
    uint32_t position;
  };

  // Returns the position that the next text begins at.
  uint32_t begin_run(int32_t version, uint32_t count) {
    const auto start = static_cast<uint32_t>(tokens_.size());
    if (runs_.empty() || runs_.back().version != version || runs_.back().count != count)
      runs_.push_back({version, start, count});
    return start;
  }

  // Sorts [begin, end), whose contexts agree in `depth` tokens, by the next two tokens
  // at a time, and appends the places. `lcp`: tokens that the first one shares with the
  // place before it.
  void order(Item* begin, Item* end, uint32_t depth, uint32_t lcp, Places& out) const {
    for (Item* item = begin; item != end; ++item)
      item->key = key_at(item->position, depth);
    std::sort(begin, end, [](const Item& a, const Item& b) {
      return a.key != b.key ? a.key < b.key : a.position > b.position;
    });
    uint64_t previous_key = 0;
    for (Item* group = begin; group != end;) {
      const uint64_t key = group->key;
      const auto differs = [key](const Item& item) { return item.key != key; };
      Item* const next = std::find_if(group, end, differs);
      if (group != begin) lcp = depth + (first_rank(key) == first_rank(previous_key));
      const bool text_ends = second_rank(key) <= kBeginnings;
      if (next - group == 1 || text_ends || depth + 2 >= tuning::DEPTH_TOKENS) {
        const uint32_t shared = first_rank(key) <= kBeginnings
                                    ? depth + 1
                                    : std::min(depth + 2, tuning::DEPTH_TOKENS);
        for (Item* item = group; item != next; ++item)
          out.push_back({item->position, item == group ? lcp : shared});
      } else {
        order(group, next, depth + 2, lcp, out);
      }
      previous_key = key;
      group = next;
    }
  }

  // Returns the two context tokens behind `depth` others, as `Segment::key` orders
  // them.
  uint64_t key_at(uint32_t position, uint32_t depth) const {
    const Stored* last = &tokens_[position] - depth;
    const bool has_second = *last >= 0 && depth + 1 < tuning::DEPTH_TOKENS;
    return Segment::key(*last, has_second ? Token{last[-1]} : kGap);
  }
  static uint32_t first_rank(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
  static uint32_t second_rank(uint64_t key) { return static_cast<uint32_t>(key); }

  // One of the two lists that are merged. `lcp`: tokens that its next place shares with
  // the place written last.
  struct Source {
    const Places& places;
    size_t next = 0;
    uint32_t lcp = 0;

    bool ended() const { return next == places.size(); }
    uint32_t position() const { return places[next].position; }
    void move_to(Places& out) {
      out.push_back(places[next]);
      out.back().lcp = lcp;
      ++next;
      lcp = ended() ? 0 : places[next].lcp;
    }
  };

  // Merges two sorted lists by their lcp values: tokens are compared only where these
  // tie. `fresh` lies behind `old`.
  Places merged(const Places& old_places, const Places& fresh_places) const {
    Places out;
    out.reserve(old_places.size() + fresh_places.size());
    Source old{old_places};
    Source fresh{fresh_places};
    while (!old.ended() && !fresh.ended()) {
      if (old.lcp > fresh.lcp) {
        old.move_to(out);
      } else if (old.lcp < fresh.lcp) {
        fresh.move_to(out);
      } else {
        const Stored* x = &tokens_[old.position()];
        const Stored* y = &tokens_[fresh.position()];
        // The last equal token is read again, since a text may begin there.
        const uint32_t known = old.lcp ? old.lcp - 1 : 0;
        const Match m = match({x + 1, UINT32_MAX}, y, known);
        const auto back = static_cast<ptrdiff_t>(m.length);
        if (!m.ended && x[-back] < y[-back]) {
          old.move_to(out);
          fresh.lcp = m.length;
        } else {
          fresh.move_to(out);
          old.lcp = m.length;
        }
      }
    }
    while (!old.ended()) old.move_to(out);
    while (!fresh.ended()) fresh.move_to(out);
    return out;
  }

  // Ranks up to this are beginnings of texts.
  static constexpr uint32_t kBeginnings = kStart - kGap;

  Text tokens_;
  std::vector<Segment::Run> runs_;
  std::vector<Places> sorted_;  // places of the segments added, each list in order
  std::vector<Item> items_;     // places of the texts added
};

// Merges segments, oldest first, into as few as can hold their texts of versions >=
// `from`. One that stays alone and loses nothing is not built again: it stays in its
// file.
inline std::vector<Segment> merged(const std::vector<Segment>& segments,
                                   int64_t from = INT64_MIN) {
  std::vector<Segment> out;
  auto begin = segments.begin();
  while (begin != segments.end()) {
    // The segments from `begin` to `end` become one.
    uint64_t num_kept = 0;
    uint64_t num_dropped = 0;
    auto end = begin;
    do {
      for (const Segment::Run& run : end->runs) {
        const uint64_t num_tokens = end->end(run) - run.start;
        (run.version < from ? num_dropped : num_kept) += num_tokens;
      }
      ++end;
    } while (end != segments.end() &&
             num_kept + end->tokens.size <= Segment::kCapacity - 2);
    Builder builder;
    if (num_dropped || end - begin > 1)
      for (auto segment = begin; segment != end; ++segment) builder.add(*segment, from);
    if (!builder.empty())
      out.push_back(builder.build());
    else if (!num_dropped)
      out.push_back(*begin);
    begin = end;
  }
  return out;
}

// Returns how many of the youngest segments are to become one: as many as fit, but no
// older one is written again for a small part of its size, unless there is hardly room
// for more segments.
inline size_t mergeable(const std::vector<Segment>& segments) {
  uint64_t num_tokens = 0;
  size_t oldest = segments.size();  // of those that become one
  while (oldest) {
    const uint64_t older = segments[oldest - 1].tokens.size;
    if (num_tokens + older > Segment::kCapacity - 2) break;
    const bool is_small = !num_tokens || older <= tuning::MERGE_RATIO * num_tokens;
    const bool hardly_room =
        oldest >= tuning::SEGMENTS_PER_PROBLEM - tuning::SPARE_SEGMENTS;
    if (!is_small && !hardly_room) break;
    num_tokens += older;
    --oldest;
  }
  return segments.size() - oldest;
}

}  // namespace das

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
    const bool whole = std::adjacent_find(moved.begin(), moved.end(),
                                          std::not_equal_to<>()) == moved.end();
    uint32_t lcp = 0;  // shared with the last place kept: the least lcp since then
    for (const Segment::Place& p : segment.places) {
      lcp = std::min<uint32_t>(lcp, p.lcp);
      const int64_t by =
          moved[whole ? 0 : &segment.run(p.position) - segment.runs.begin()];
      if (by == kDropped) continue;
      places.push_back({static_cast<uint32_t>(p.position + by), lcp});
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
    for (; !sorted_.empty();
         sorted_.pop_back())  // the youngest first, because they are the smallest
      fresh = fresh.empty() ? std::move(sorted_.back()) : merged(sorted_.back(), fresh);
    const Segment::Shape shape{tokens_.size(), fresh.size(), runs_.size()};
    auto bytes = std::make_shared<std::vector<uint64_t>>(shape.bytes() / 8);
    const Segment segment(bytes->data(), shape, bytes);
    const auto put = [](const auto& span, const auto* from) {
      std::memcpy(const_cast<void*>(static_cast<const void*>(span.data)), from,
                  span.size * sizeof *from);
    };
    put(segment.runs, runs_.data()), put(segment.places, fresh.data()),
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

  // Sorts [begin, end), whose contexts agree in `at` tokens, by the next two tokens at
  // a time, and appends the places. `lcp`: tokens that the first one shares with the
  // place before it.
  void order(Item* begin, Item* end, uint32_t at, uint32_t lcp, Places& out) const {
    for (Item* i = begin; i != end; ++i) {
      const Stored* last = &tokens_[i->position] - at;
      i->key =
          Segment::key(*last, *last >= 0 && at + 1 < kDepth ? Token{last[-1]} : kGap);
    }
    std::sort(begin, end, [](const Item& a, const Item& b) {
      return a.key != b.key ? a.key < b.key : a.position > b.position;
    });
    uint64_t previous = 0;
    for (Item* run = begin; run != end;) {
      const uint64_t key = run->key;
      Item* next = std::find_if(run, end, [&](const Item& i) { return i.key != key; });
      if (run != begin) lcp = at + ((key ^ previous) >> 32 == 0);
      const bool ended = static_cast<uint32_t>(key) <= kBegins || at + 2 >= kDepth;
      if (next - run == 1 || ended) {
        const uint32_t shared =
            key >> 32 <= kBegins ? at + 1 : std::min(at + 2, kDepth);
        for (Item* i = run; i != next; ++i)
          out.push_back({i->position, i == run ? lcp : shared});
      } else {
        order(run, next, at + 2, lcp, out);
      }
      previous = key;
      run = next;
    }
  }

  // Merges two sorted runs by their lcp values: tokens are compared only where these
  // tie. `fresh` lies behind `old`.
  Places merged(const Places& old, const Places& fresh) const {
    Places out;
    out.reserve(old.size() + fresh.size());
    size_t i = 0, j = 0;
    uint32_t
        a = 0,
        b = 0;  // tokens that old[i] and fresh[j] share with the place written last
    const auto take = [&out](const Places& list, size_t& next, uint32_t& lcp) {
      out.push_back(list[next++]);
      out.back().lcp = lcp;
      lcp = next < list.size() ? list[next].lcp : 0;
    };
    while (i < old.size() && j < fresh.size()) {
      if (a == b) {
        const Stored *x = &tokens_[old[i].position], *y = &tokens_[fresh[j].position];
        const Match m = match({x + 1, UINT32_MAX}, y, a ? a - 1 : 0);
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

  static constexpr uint32_t kBegins =
      kStart - kGap;  // ranks up to this are beginnings of texts

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
  for (auto begin = segments.begin(), end = begin; begin != segments.end();
       begin = end) {
    uint64_t kept = 0, dropped = 0;
    do {
      for (const Segment::Run& run : end->runs)
        (run.version < from ? dropped : kept) += end->end(run) - run.start;
    } while (++end != segments.end() &&
             kept + end->tokens.size <= Segment::kCapacity - 2);
    Builder builder;
    for (auto segment = begin; segment != end && (dropped || end - begin > 1);
         ++segment)
      builder.add(*segment, from);
    if (!builder.empty())
      out.push_back(builder.build());
    else if (!dropped)
      out.push_back(*begin);
  }
  return out;
}

// How many of the youngest segments are to become one: as many as fit, but no older one
// is written again for a small part of its size, unless there is hardly room for more
// segments.
inline size_t mergeable(const std::vector<Segment>& segments) {
  constexpr uint64_t kSmall = 16;
  size_t older = segments.size();
  uint64_t size = 0;
  const auto joins = [&](uint64_t more) {
    return size + more <= Segment::kCapacity - 2 &&
           (!size || more <= kSmall * size || older >= kSegments - 2);
  };
  while (older && joins(segments[older - 1].tokens.size))
    size += segments[--older].tokens.size;
  return segments.size() - older;
}

}  // namespace das

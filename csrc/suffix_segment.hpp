// Sealed text of one problem: read-only and position-independent, with the same bytes in memory and in a file.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "suffix_text.hpp"

namespace das {

template <class T>
struct Span {
  const T* data = nullptr;
  size_t size = 0;

  const T* begin() const { return data; }
  const T* end() const { return data + size; }
  const T& operator[](size_t i) const { return data[i]; }
};

class SegmentFile;

// Tokens, and their positions ordered by reversed left context (12 bytes per token).
struct Segment {
  // A place whose next token is a continuation. Equal contexts are ordered latest first.
  struct Place {
    uint32_t position;         // of the last context token (kStart included) in `tokens`
    uint32_t lcp : 8;          // equal context tokens shared with the previous place
    uint32_t trajectory : 24;  // which one it lies in
  };
  struct Trajectory {
    uint32_t start;  // position of its kStart
    uint32_t size;   // tokens after it
    int64_t version;
  };
  // Sizes of the arrays. The bytes are trajectories, places, samples and tokens, padded to a multiple of 8.
  struct Shape {
    uint64_t tokens = 0, trajectories = 0;  // tokens with every trajectory between two kStart

    uint64_t places() const { return tokens - trajectories - 1; }
    uint64_t samples() const { return (places() + kStride - 1) / kStride; }
    uint64_t bytes() const {
      const uint64_t all = trajectories * sizeof(Trajectory) + (places() + samples()) * 8 + tokens * sizeof(Token);
      return (all + 7) / 8 * 8;
    }
  };
  static constexpr uint64_t kStride = 32;  // places per sample

  Segment() = default;
  Segment(const void* bytes, Shape shape, std::shared_ptr<const void> kept) : owner(std::move(kept)) {
    auto at = static_cast<const char*>(bytes);
    const auto take = [&at](auto& span, size_t size) {
      span = {reinterpret_cast<decltype(span.data)>(at), size};
      at += size * sizeof *span.data;
    };
    take(trajectories, shape.trajectories), take(places, shape.places());
    take(samples, shape.samples()), take(tokens, shape.tokens);
  }

  Shape shape() const { return {tokens.size, trajectories.size}; }
  const void* bytes() const { return trajectories.data; }
  uint64_t nbytes() const { return shape().bytes(); }
  uint64_t token_count() const { return places.size; }

  // Whether the arrays, from whatever source, are consistent, so that a search never reads outside them.
  bool sound() const {
    uint64_t position = 0;
    for (const Trajectory& t : trajectories) {
      if (t.start != position || !t.size) return false;
      position += t.size + 1ull;
      if (position >= tokens.size || tokens[position] != kStart) return false;
    }
    if (position + 1 != tokens.size || tokens[0] != kStart) return false;
    bool sound = true;
    for (const Place& p : places) {
      if (p.trajectory >= trajectories.size) return false;
      const uint32_t before = p.position - trajectories[p.trajectory].start;  // huge if it lies in front
      sound &= (before < trajectories[p.trajectory].size) & (p.lcp <= before + 1);
    }
    return sound;
  }

  // The last two context tokens as a number that orders as contexts do; `samples` has that of every kStride-th place.
  static uint64_t key(Token last, Token before) {
    const uint32_t high = static_cast<uint32_t>(last) + 1;
    return uint64_t{high} << 32 | (high ? static_cast<uint32_t>(before) + 1 : 0);
  }
  uint64_t key(const Place& p) const { return key(tokens[p.position], p.position ? tokens[p.position - 1] : kStart); }

  // The first place that does not sort before the context.
  const Place* lower_bound(Context context, uint32_t depth) const {
    const uint64_t here = key(context[0], context.size > 1 ? context[1] : kStart);
    const uint64_t* low = halve(samples.data, samples.size, [&](const uint64_t& k) { return k < here; });
    const uint64_t* high = low;
    if (high != samples.end() && *high == here)
      high = halve(low, samples.end() - low, [&](const uint64_t& k) { return k == here; });
    const size_t begin = low == samples.data ? 0 : (low - samples.data - 1) * kStride + 1;
    const size_t end = std::min<size_t>(places.size, (high - samples.data) * kStride);
    return halve(places.data + begin, end - begin, [&](const Place& p) { return sorts_before(p, context, depth); });
  }

  Span<Trajectory> trajectories;
  Span<Place> places;
  Span<uint64_t> samples;
  Span<Token> tokens;
  std::shared_ptr<const void> owner;  // owner of the bytes
  SegmentFile* file = nullptr;        // the owner if it is a file; `entry` is the segment's number in it
  size_t entry = 0;

 private:
  bool sorts_before(const Place& p, Context context, uint32_t depth) const {
    const Token* last = &tokens[p.position];
    const Match m = match(context, last, depth);
    if (m.ended) return false;  // equal, or the context is a prefix and sorts first
    return last[-static_cast<ptrdiff_t>(m.length)] < context[m.length];
  }

  // The first element that is not `before`, where those that are come first; prefetches both possible next ones.
  template <class T, class Before>
  static const T* halve(const T* first, size_t left, Before&& before) {
    while (left) {
      const size_t half = left / 2;
      __builtin_prefetch(&first[half / 2]);
      __builtin_prefetch(&first[half + 1 + (left - half - 1) / 2]);
      const bool behind = before(first[half]);
      first += behind ? half + 1 : 0;
      left = behind ? left - half - 1 : half;
    }
    return first;
  }
};

static_assert(sizeof(Segment::Place) == 8 && sizeof(Segment::Trajectory) == 16, "the layout of files");

constexpr size_t kSegments = 8;  // most segments of one problem

// Visits up to kMost places of one problem's segments, given oldest first, as if they were one segment. The longest
// match comes first; of equal lengths, places that sort after the context come before those in front of it, the nearest
// first. Calls visit(segment, place, match length) with lengths >= 1.
template <class Visit>
void search(const std::vector<Segment>& segments, Context context, uint32_t depth, Visit&& visit) {
  struct Cursor {
    const Segment* segment;
    const Segment::Place *after, *before;  // next place to either side; `before` is the one in front of the pointer
    uint32_t right, left;  // and its match length
  };
  std::array<Cursor, kSegments> cursors;
  size_t count = 0;
  for (const Segment& s : segments) {
    const auto length = [&](const Segment::Place& p) { return match(context, &s.tokens[p.position], depth).length; };
    const Segment::Place* first = s.lower_bound(context, depth);
    const auto near = std::min<ptrdiff_t>(kMost / 2, first - s.places.begin());
    for (auto p = first - near; p != s.places.end() && p != first - near + kMost; ++p)
      __builtin_prefetch(&s.tokens[p->position]);
    cursors[count++] = {&s, first, first, first != s.places.end() ? length(*first) : 0,
                        first != s.places.begin() ? length(first[-1]) : 0};
  }
  // Whether the place x of an older segment sorts before y of a younger one; they agree in `shared` tokens.
  const auto sorts_before = [&](const Cursor& a, const Segment::Place& x, const Cursor& b, const Segment::Place& y,
                                uint32_t shared) {
    const Token *p = &a.segment->tokens[x.position], *q = &b.segment->tokens[y.position];
    const Match m = match({p + 1, UINT32_MAX}, q, depth, shared - 1);
    return !m.ended && p[-static_cast<ptrdiff_t>(m.length)] < q[-static_cast<ptrdiff_t>(m.length)];
  };
  for (uint32_t visited = 0; visited < kMost; ++visited) {
    Cursor* best = nullptr;
    bool to_right = false;
    uint32_t length = 0;
    for (Cursor* c = cursors.data(); c != cursors.data() + count; ++c) {
      const bool right = c->right >= c->left;
      const uint32_t reach = right ? c->right : c->left;
      if (!reach || reach < length || (reach == length && to_right && !right)) continue;
      if (reach == length && right == to_right) {
        if (right && sorts_before(*best, *best->after, *c, *c->after, length)) continue;
        if (!right && !sorts_before(*best, best->before[-1], *c, c->before[-1], length)) continue;
      }
      best = c, to_right = right, length = reach;
    }
    if (!best) return;
    const auto& places = best->segment->places;
    if (to_right) {
      visit(*best->segment, *best->after, length);
      best->right = ++best->after != places.end() ? std::min<uint32_t>(length, best->after->lcp) : 0;
    } else {
      --best->before;
      visit(*best->segment, *best->before, length);
      best->left = best->before != places.begin() ? std::min<uint32_t>(length, best->before->lcp) : 0;
    }
  }
}

}  // namespace das

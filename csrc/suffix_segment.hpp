// Sealed text of one problem: read-only and position-independent, with the same bytes
// in memory and in a file.
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

// Tokens, and their positions ordered by reversed left context (7.25 bytes per token).
struct Segment {
  // A place whose next token is a continuation. Equal contexts are ordered latest
  // first.
  struct Place {
    uint32_t position : 24;  // of the last context token (kStart included) in `tokens`
    uint32_t lcp : 8;  // equal context tokens shared with the previous place
  };
  // Texts that follow each other and were written by one version.
  struct Run {
    int32_t version;
    uint32_t start : 24;  // position of the kStart or kGap before the first of them
    uint32_t count : 8;  // rollouts that each text stands for
  };
  // Sizes of the arrays. The bytes are runs, samples, places and tokens, padded to a
  // multiple of 8.
  struct Shape {
    uint64_t tokens = 0, places = 0, runs = 0;  // tokens with kStart or kGap before
                                                // every text, and kStart at the end

    uint64_t samples() const { return (places + kStride - 1) / kStride; }
    uint64_t bytes() const {
      const uint64_t all = runs * sizeof(Run) + samples() * sizeof(uint64_t) +
                           places * sizeof(Place) + tokens * sizeof(Stored);
      return (all + 7) / 8 * 8;
    }
  };
  static constexpr uint64_t kStride = 32;  // places per sample
  static constexpr uint64_t kCapacity = 1 << 24;  // most tokens

  Segment() = default;
  Segment(const void* bytes, Shape shape, std::shared_ptr<const void> kept)
      : owner(std::move(kept)) {
    auto at = static_cast<const char*>(bytes);
    const auto take = [&at](auto& span, size_t size) {
      span = {reinterpret_cast<decltype(span.data)>(at), size};
      at += size * sizeof *span.data;
    };
    take(runs, shape.runs), take(samples, shape.samples());
    take(places, shape.places), take(tokens, shape.tokens);
  }

  Shape shape() const { return {tokens.size, places.size, runs.size}; }
  const void* bytes() const { return runs.data; }
  uint64_t nbytes() const { return shape().bytes(); }
  uint64_t token_count() const { return places.size; }

  // The run that a position lies in.
  const Run& run(uint32_t position) const {
    const Run* next =
        std::upper_bound(runs.begin(), runs.end(), position,
                         [](uint32_t at, const Run& r) { return at < r.start; });
    return next[-1];
  }
  uint32_t end(const Run& run) const {
    return &run + 1 == runs.end() ? static_cast<uint32_t>(tokens.size - 1)
                                  : (&run)[1].start;
  }

  // Whether the arrays, from whatever source, are consistent, so that a search never
  // reads outside them.
  bool sound() const {
    if (tokens.size < 2 || !runs.size || runs[0].start || tokens[0] >= 0 ||
        tokens[tokens.size - 1] != kStart)
      return false;
    for (size_t i = 1; i < runs.size; ++i) {
      const uint32_t start = runs[i].start;
      if (start <= runs[i - 1].start || start >= tokens.size - 1 || tokens[start] >= 0)
        return false;
    }
    std::vector<uint8_t> reach(
        tokens.size);  // tokens of the text up to there, its beginning included
    for (size_t i = 0; i < tokens.size; ++i) {
      if (tokens[i] < kGap) return false;
      reach[i] = tokens[i] < 0 ? 1 : std::min(reach[i - 1] + 1, 255);
    }
    bool sound = true;
    for (const Place& p : places) {
      if (p.position + 1ull >= tokens.size) return false;
      sound &= (tokens[p.position + 1] >= 0) & (p.lcp <= reach[p.position]);
    }
    return sound;
  }

  // The last two context tokens as a number that orders as contexts do; `samples` has
  // that of every kStride-th place.
  static uint64_t key(Token last, Token before) {
    const auto rank = [](Token token) { return static_cast<uint32_t>(token - kGap); };
    return uint64_t{rank(last)} << 32 | (last < 0 ? 0 : rank(before));
  }
  uint64_t key(const Place& p) const {
    return key(tokens[p.position], p.position ? Token{tokens[p.position - 1]} : kGap);
  }

  // The first place that does not sort before the context.
  const Place* lower_bound(Context context) const {
    const uint64_t here = key(context[0], context.size > 1 ? context[1] : kGap);
    const uint64_t* low =
        halve(samples.data, samples.size, [&](const uint64_t& k) { return k < here; });
    const uint64_t* high = low;
    if (high != samples.end() && *high == here)
      high =
          halve(low, samples.end() - low, [&](const uint64_t& k) { return k == here; });
    const size_t begin =
        low == samples.data ? 0 : (low - samples.data - 1) * kStride + 1;
    const size_t end = std::min<size_t>(places.size, (high - samples.data) * kStride);
    return halve(places.data + begin, end - begin,
                 [&](const Place& p) { return sorts_before(p, context); });
  }

  Span<Run> runs;
  Span<uint64_t> samples;
  Span<Place> places;
  Span<Stored> tokens;
  std::shared_ptr<const void> owner;  // owner of the bytes
  SegmentFile* file =
      nullptr;  // the owner if it is a file; `entry` is the segment's number in it
  size_t entry = 0;

 private:
  bool sorts_before(const Place& p, Context context) const {
    const Stored* last = &tokens[p.position];
    const Match m = match(context, last);
    if (m.ended) return false;  // equal, or the context is a prefix and sorts first
    return last[-static_cast<ptrdiff_t>(m.length)] < context[m.length];
  }

  // The first element that is not `before`, where those that are come first; prefetches
  // both possible next ones.
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

static_assert(sizeof(Segment::Place) == 4 && sizeof(Segment::Run) == 8,
              "the layout of files");

constexpr size_t kSegments = 8;  // most segments of one problem

// Visits up to kMost places of one problem's segments, given oldest first, as if they
// were one segment. The longest match comes first; of equal lengths, places that sort
// after the context come before those in front of it, the nearest first. Calls
// visit(segment, place, match length) with lengths >= 1.
template <class Visit>
void search(const std::vector<Segment>& segments, Context context, Visit&& visit) {
  struct Cursor {
    const Segment* segment;
    const Segment::Place *after, *before;  // next place to either side; `before` is the
                                           // one in front of the pointer
    uint32_t right, left;  // and its match length
  };
  std::array<Cursor, kSegments> cursors;
  size_t count = 0;
  for (const Segment& s : segments) {
    const auto length = [&](const Segment::Place& p) {
      return match(context, &s.tokens[p.position]).length;
    };
    const Segment::Place* first = s.lower_bound(context);
    const auto near = std::min<ptrdiff_t>(kMost / 2, first - s.places.begin());
    for (auto p = first - near; p != s.places.end() && p != first - near + kMost; ++p)
      __builtin_prefetch(&s.tokens[p->position]);
    cursors[count++] = {&s, first, first, first != s.places.end() ? length(*first) : 0,
                        first != s.places.begin() ? length(first[-1]) : 0};
  }
  // Whether the place x of an older segment sorts before y of a younger one; they agree
  // in `shared` tokens.
  const auto sorts_before = [&](const Cursor& a, const Segment::Place& x,
                                const Cursor& b, const Segment::Place& y,
                                uint32_t shared) {
    const Stored *p = &a.segment->tokens[x.position],
                 *q = &b.segment->tokens[y.position];
    const Match m = match({p + 1, UINT32_MAX}, q, shared - 1);
    return !m.ended &&
           p[-static_cast<ptrdiff_t>(m.length)] < q[-static_cast<ptrdiff_t>(m.length)];
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
        if (!right && !sorts_before(*best, best->before[-1], *c, c->before[-1], length))
          continue;
      }
      best = c, to_right = right, length = reach;
    }
    if (!best) return;
    const auto& places = best->segment->places;
    if (to_right) {
      visit(*best->segment, *best->after, length);
      best->right = ++best->after != places.end()
                        ? std::min<uint32_t>(length, best->after->lcp)
                        : 0;
    } else {
      --best->before;
      visit(*best->segment, *best->before, length);
      best->left = best->before != places.begin()
                       ? std::min<uint32_t>(length, best->before->lcp)
                       : 0;
    }
  }
}

}  // namespace das

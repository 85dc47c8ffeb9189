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
// Two texts "a b a" and "b a" of one version:
//
//   position   0       1  2  3  4       5  6  7
//   tokens     kStart  a  b  a  kStart  b  a  kStart      runs: {start 0}
//
//   places     position  context, last token first   next token   lcp
//              4         kStart                      b            0
//              0         kStart                      a            1
//              1         a kStart                    b            0
//              5         b kStart                    a            0
//              2         b a kStart                  a            1
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
    uint64_t tokens = 0;  // with kStart or kGap before every text, kStart at the end
    uint64_t places = 0;
    uint64_t runs = 0;

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
    auto next = static_cast<const char*>(bytes);
    const auto point_to = [&next](auto& span, size_t size) {
      span = {reinterpret_cast<decltype(span.data)>(next), size};
      next += size * sizeof *span.data;
    };
    point_to(runs, shape.runs);
    point_to(samples, shape.samples());
    point_to(places, shape.places);
    point_to(tokens, shape.tokens);
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
    // Tokens of the text up to each position, its beginning included; 255: or more.
    std::vector<uint8_t> reach(tokens.size);
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
    const auto is_less = [here](const uint64_t& sample) { return sample < here; };
    const auto is_equal = [here](const uint64_t& sample) { return sample == here; };
    const auto is_before = [&](const Place& p) { return sorts_before(p, context); };
    // Samples from `low` to `high` equal the context; the place lies behind the one in
    // front of `low`, and not behind `high`.
    const uint64_t* low = first_without(samples.data, samples.size, is_less);
    const uint64_t* high = low;
    if (high != samples.end() && *high == here)
      high = first_without(low, samples.end() - low, is_equal);
    const size_t num_less = low - samples.data;
    const size_t num_not_greater = high - samples.data;
    const size_t begin = num_less ? (num_less - 1) * kStride + 1 : 0;
    const size_t end = std::min<size_t>(places.size, num_not_greater * kStride);
    return first_without(places.data + begin, end - begin, is_before);
  }

  Span<Run> runs;
  Span<uint64_t> samples;
  Span<Place> places;
  Span<Stored> tokens;
  std::shared_ptr<const void> owner;  // owner of the bytes
  SegmentFile* file = nullptr;  // the owner if it is a file
  size_t entry = 0;  // the segment's number in the file

 private:
  bool sorts_before(const Place& p, Context context) const {
    const Stored* last = &tokens[p.position];
    const Match m = match(context, last);
    if (m.ended) return false;  // equal, or the context is a prefix and sorts first
    return last[-static_cast<ptrdiff_t>(m.length)] < context[m.length];
  }

  // The first element without a property that the first ones have; prefetches both
  // elements that may be tested next.
  template <class T, class Has>
  static const T* first_without(const T* first, size_t count, Has&& has) {
    while (count) {
      const size_t half = count / 2;
      const size_t behind_half = count - half - 1;
      __builtin_prefetch(&first[half / 2]);
      __builtin_prefetch(&first[half + 1 + behind_half / 2]);
      const bool has_it = has(first[half]);
      first += has_it ? half + 1 : 0;
      count = has_it ? behind_half : half;
    }
    return first;
  }
};

static_assert(sizeof(Segment::Place) == 4 && sizeof(Segment::Run) == 8,
              "the layout of files");

// The places of one segment on either side of a context, from the nearest on. `after`
// is the next one that sorts after the context; `before` is behind the next one that
// sorts in front of it. Of each, its match length; 0: there is none.
struct SegmentCursor {
  const Segment* segment;
  const Segment::Place* after;
  const Segment::Place* before;
  uint32_t after_length;
  uint32_t before_length;

  SegmentCursor() = default;
  SegmentCursor(const Segment& segment, Context context)
      : segment(&segment), after(segment.lower_bound(context)), before(after) {
    const auto& places = segment.places;
    prefetch_tokens();
    const auto length = [&](const Segment::Place& place) {
      return match(context, &segment.tokens[place.position]).length;
    };
    after_length = after != places.end() ? length(*after) : 0;
    before_length = before != places.begin() ? length(before[-1]) : 0;
  }

  bool prefers_after() const { return after_length >= before_length; }

  // Returns the next place after the context, and moves on.
  const Segment::Place& step_after() {
    const Segment::Place& place = *after;
    ++after;
    const bool ended = after == segment->places.end();
    after_length = ended ? 0 : std::min<uint32_t>(after_length, after->lcp);
    return place;
  }

  // Returns the next place in front of the context, and moves on.
  const Segment::Place& step_before() {
    --before;
    const bool ended = before == segment->places.begin();
    before_length = ended ? 0 : std::min<uint32_t>(before_length, before->lcp);
    return *before;
  }

 private:
  void prefetch_tokens() const {
    const auto& places = segment->places;
    const auto num_before =
        std::min<ptrdiff_t>(tuning::PLACES_PER_SEARCH / 2, after - places.begin());
    const auto num_after = std::min<ptrdiff_t>(tuning::PLACES_PER_SEARCH - num_before,
                                               places.end() - after);
    for (auto place = after - num_before; place != after + num_after; ++place)
      __builtin_prefetch(&segment->tokens[place->position]);
  }
};

// Returns whether the place `x` of an older segment sorts before `y` of a younger one;
// they agree in `shared` tokens with the context, and so with each other.
inline bool sorts_before(const Segment& older, const Segment::Place& x,
                         const Segment& younger, const Segment::Place& y,
                         uint32_t shared) {
  const Stored* p = &older.tokens[x.position];
  const Stored* q = &younger.tokens[y.position];
  const Match m = match({p + 1, UINT32_MAX}, q, shared - 1);
  const auto back = static_cast<ptrdiff_t>(m.length);
  return !m.ended && p[-back] < q[-back];
}

// Calls report(segment, place, match length) for up to PLACES_PER_SEARCH places of one
// problem's segments, given oldest first, as if they were one segment; lengths are at
// least 1. The longest match comes first; of equal lengths, places that sort after the
// context come before those in front of it, the nearest first.
template <class Report>
void search(const std::vector<Segment>& segments, Context context, Report&& report) {
  std::array<SegmentCursor, tuning::SEGMENTS_PER_PROBLEM> cursors;
  size_t count = 0;
  for (const Segment& segment : segments)
    cursors[count++] = SegmentCursor(segment, context);
  for (uint32_t found = 0; found < tuning::PLACES_PER_SEARCH; ++found) {
    SegmentCursor* best = nullptr;
    bool best_after = false;  // which of its two places is the best
    uint32_t best_length = 0;
    for (SegmentCursor* c = cursors.data(); c != cursors.data() + count; ++c) {
      const bool after = c->prefers_after();
      const uint32_t length = after ? c->after_length : c->before_length;
      if (!length || length < best_length) continue;
      if (length == best_length) {
        if (best_after && !after) continue;
        if (best_after && after &&
            sorts_before(*best->segment, *best->after, *c->segment, *c->after, length))
          continue;
        if (!best_after && !after &&
            !sorts_before(*best->segment, best->before[-1], *c->segment, c->before[-1],
                          length))
          continue;
      }
      best = c;
      best_after = after;
      best_length = length;
    }
    if (!best) return;
    const Segment& segment = *best->segment;
    const Segment::Place& place = best_after ? best->step_after() : best->step_before();
    report(segment, place, best_length);
  }
}

}  // namespace das

// Live text: the responses of one problem's live requests, searched by hashes of their
// last tokens.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "suffix_segment.hpp"
#include "suffix_text.hpp"

namespace das {

// One request: kStart and its response so far. Its prompt is searched for this request
// only.
struct Stream {
  Text text{kStart};
  std::shared_ptr<const std::vector<Segment>> prompt;  // one segment
  enum { kOpen, kClosed, kForgotten } state = kOpen;
  uint32_t found_from = 0;  // places before are found no more
};

// Places in live text; for each i, places with the same last kGrams[i] tokens form a
// chain, the latest first.
class Live {
 public:
  static constexpr std::array<uint32_t, 3> kGrams{4, 2, 1};
  static constexpr uint32_t kFound =
      1 << 14;  // tokens at a text's end that are found; at times twice as many are

  std::vector<std::unique_ptr<Stream>> streams;

  // Appends tokens to one of the streams. A place enters the chains once its next token
  // is known.
  void extend(Stream& stream, const Token* tokens, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      insert(stream, static_cast<uint32_t>(stream.text.size() - 1));
      stream.text.push_back(tokens[i]);
    }
    const auto size = static_cast<uint32_t>(stream.text.size());
    if (size > stream.found_from + 2 * kFound) forget_before(stream, size - kFound);
  }

  // Forgets a stream's text.
  void forget(Stream& stream) {
    stream.state = Stream::kForgotten;
    forget_before(stream, static_cast<uint32_t>(stream.text.size()));
  }

  void forget_closed() {
    bool any = false;
    for (auto& s : streams)
      if (s->state == Stream::kClosed) s->state = Stream::kForgotten, any = true;
    if (any) sweep();
  }

  // Visits places whose last tokens equal the context's, the latest first: up to kMost
  // per chain, those of the longest grams first, those of shorter grams only while
  // fewer than half of kMost are found. visit(stream, position, match length)
  template <class Visit>
  void search(Context context, Visit&& visit) const {
    if (slots_.empty()) return;
    uint32_t found = 0;
    for (size_t level = 0; level < kGrams.size() && 2 * found < kMost; ++level) {
      std::array<const Place*, kMost> walked;
      uint32_t count = 0;
      for (uint32_t i = head(gram(context, level)); i != kNone && count < kMost;
           i = log_[i].previous[level]) {
        const Place& p = log_[i];
        if (p.position < p.stream->found_from) continue;
        __builtin_prefetch(&p.stream->text[p.position]);
        walked[count++] = &p;
      }
      for (uint32_t i = 0; i < count; ++i) {
        const Stream& stream = *walked[i]->stream;
        const Match m = match(context, &stream.text[walked[i]->position]);
        if (level && (m.ended || m.length >= kGrams[level - 1]))
          continue;  // visited in the previous chain
        visit(stream, walked[i]->position, m.length);
        ++found;
      }
    }
  }

  uint64_t nbytes() const {
    uint64_t text = 0;
    for (const auto& stream : streams)
      text += sizeof *stream + stream->text.size() * sizeof(Stored);
    return text + log_.size() * sizeof(Place) + slots_.size() * sizeof(Slot);
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Place {
    const Stream* stream;
    uint32_t position;
    std::array<uint32_t, kGrams.size()> previous;
  };
  struct Slot {
    uint64_t gram = 0;  // 0: empty
    uint32_t latest = kNone;
  };

  // Forgets the text of a stream before a position. Its places stay in the chains,
  // where searches skip them, until they outnumber the others.
  void forget_before(Stream& stream, uint32_t position) {
    forgotten_ += position - stream.found_from;
    stream.found_from = position;
    if (2 * forgotten_ > log_.size() + streams.size()) sweep();
  }

  // Rebuilds the chains without forgotten streams, and without what is found no more of
  // the others.
  void sweep() {
    const std::vector<Place> log = std::move(log_);
    log_ = {}, slots_ = {}, used_ = 0, forgotten_ = 0;
    for (const Place& p : log)
      if (p.stream->state != Stream::kForgotten && p.position >= p.stream->found_from)
        insert(*p.stream, p.position);
    streams.erase(
        std::remove_if(streams.begin(), streams.end(),
                       [](const auto& s) { return s->state == Stream::kForgotten; }),
        streams.end());
  }

  // Hash of the last kGrams[level] tokens; in front of kStart it is repeated.
  static uint64_t gram(Context context, size_t level) {
    uint64_t h = 0x9e3779b97f4a7c15ull * (level + 1);
    for (uint32_t i = 0; i < kGrams[level]; ++i) {
      const Token token = i < context.size ? context[i] : kStart;
      h = (h ^ static_cast<uint32_t>(token)) * 0xd6e8feb86659fd93ull;
      h ^= h >> 32;
    }
    return h | 1;
  }

  uint32_t head(uint64_t gram) const {
    for (size_t i = gram >> 1;; ++i) {
      const Slot& slot = slots_[i & (slots_.size() - 1)];
      if (slot.gram == gram || !slot.gram) return slot.latest;
    }
  }

  Slot& slot(uint64_t gram) {
    for (size_t i = gram >> 1;; ++i) {
      Slot& slot = slots_[i & (slots_.size() - 1)];
      if (!slot.gram) slot.gram = gram, ++used_;
      if (slot.gram == gram) return slot;
    }
  }

  void insert(const Stream& stream, uint32_t position) {
    if (2 * (used_ + kGrams.size()) > slots_.size()) grow();
    Place place{&stream, position, {}};
    const Context context{&stream.text[position] + 1, position + 1};
    for (size_t level = 0; level < kGrams.size(); ++level) {
      Slot& found = slot(gram(context, level));
      place.previous[level] = found.latest;
      found.latest = static_cast<uint32_t>(log_.size());
    }
    log_.push_back(place);
  }

  void grow() {
    std::vector<Slot> old(slots_.empty() ? 64 : 2 * slots_.size());
    old.swap(slots_);
    used_ = 0;
    for (const Slot& s : old)
      if (s.gram) slot(s.gram).latest = s.latest;
  }

  std::vector<Place> log_;  // in the order of their arrival
  std::vector<Slot> slots_;  // open addressing; a power of two
  size_t used_ = 0;       // slots that are taken
  size_t forgotten_ =
      0;  // tokens that were forgotten since the last sweep, kStart included
};

}  // namespace das

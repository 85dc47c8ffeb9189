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
  uint32_t searchable_from = 0;  // places before are not found any more
};

// Places in live text; for each gram size, places with the same last tokens form a
// chain, the latest first:
//
//   log_      0: "a b"   1: "b a"   2: "a b"      (last two tokens of each place)
//   slots_    hash("a b") -> latest 2             hash("b a") -> latest 1
//   previous  log_[2] -> 0, log_[0] -> kNone      log_[1] -> kNone
class Live {
 public:
  static constexpr auto& kGrams = tuning::LIVE_GRAM_TOKENS;

  std::vector<std::unique_ptr<Stream>> streams;

  // Appends tokens to one of the streams. A place enters the chains once its next token
  // is known.
  void extend(Stream& stream, const Token* tokens, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      insert(stream, static_cast<uint32_t>(stream.text.size() - 1));
      stream.text.push_back(tokens[i]);
    }
    const auto size = static_cast<uint32_t>(stream.text.size());
    if (size > stream.searchable_from + tuning::LIVE_TRIM_TOKENS)
      forget_before(stream, size - tuning::LIVE_FOUND_TOKENS);
  }

  // Forgets a stream's text.
  void forget(Stream& stream) {
    stream.state = Stream::kForgotten;
    forget_before(stream, static_cast<uint32_t>(stream.text.size()));
  }

  void forget_closed() {
    bool any_closed = false;
    for (auto& stream : streams) {
      if (stream->state != Stream::kClosed) continue;
      stream->state = Stream::kForgotten;
      any_closed = true;
    }
    if (any_closed) sweep();
  }

  // Calls report(stream, position, match length) for places whose last tokens equal the
  // context's, the latest first: up to PLACES_PER_SEARCH per chain, those of the
  // longest grams first, those of shorter grams only while fewer than
  // NEEDED_LIVE_PLACES are found.
  template <class Report>
  void search(Context context, Report&& report) const {
    if (slots_.empty()) return;
    uint32_t num_found = 0;
    for (size_t level = 0; level < kGrams.size(); ++level) {
      if (num_found >= tuning::NEEDED_LIVE_PLACES) return;
      std::array<const LogEntry*, tuning::PLACES_PER_SEARCH> places;
      const uint32_t num_places = follow_chain(gram(context, level), level, places);
      for (uint32_t i = 0; i < num_places; ++i) {
        const Stream& stream = *places[i]->stream;
        const Match m = match(context, &stream.text[places[i]->position]);
        const bool in_longer_chain =
            level && (m.ended || m.length >= kGrams[level - 1]);
        if (in_longer_chain) continue;  // reported before
        report(stream, places[i]->position, m.length);
        ++num_found;
      }
    }
  }

  uint64_t nbytes() const {
    uint64_t text_bytes = 0;
    for (const auto& stream : streams)
      text_bytes += sizeof *stream + stream->text.size() * sizeof(Stored);
    const uint64_t log_bytes = log_.size() * sizeof(LogEntry);
    return text_bytes + log_bytes + slots_.size() * sizeof(Slot);
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  // A place, and for each gram size the place before it in its chain.
  struct LogEntry {
    const Stream* stream;
    uint32_t position;
    std::array<uint32_t, kGrams.size()> previous;
  };
  struct Slot {
    uint64_t gram = 0;  // 0: empty
    uint32_t latest = kNone;
  };

  // Collects the latest places of a chain; returns how many they are.
  template <class Places>
  uint32_t follow_chain(uint64_t gram, size_t level, Places& places) const {
    uint32_t count = 0;
    uint32_t next = latest_of(gram);
    while (next != kNone && count < places.size()) {
      const LogEntry& entry = log_[next];
      next = entry.previous[level];
      if (entry.position < entry.stream->searchable_from) continue;
      __builtin_prefetch(&entry.stream->text[entry.position]);
      places[count++] = &entry;
    }
    return count;
  }

  // Forgets the text of a stream before a position. Its places stay in the chains,
  // where searches skip them, until they outnumber the others.
  void forget_before(Stream& stream, uint32_t position) {
    num_forgotten_ += position - stream.searchable_from;
    stream.searchable_from = position;
    if (2 * num_forgotten_ > log_.size() + streams.size()) sweep();
  }

  // Rebuilds the chains without forgotten streams, and without what is not found any
  // more of the others.
  void sweep() {
    const std::vector<LogEntry> log = std::move(log_);
    log_ = {};
    slots_ = {};
    num_used_slots_ = 0;
    num_forgotten_ = 0;
    for (const LogEntry& entry : log) {
      const Stream& stream = *entry.stream;
      if (stream.state == Stream::kForgotten) continue;
      if (entry.position >= stream.searchable_from) insert(stream, entry.position);
    }
    const auto is_forgotten = [](const auto& stream) {
      return stream->state == Stream::kForgotten;
    };
    streams.erase(std::remove_if(streams.begin(), streams.end(), is_forgotten),
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

  uint32_t latest_of(uint64_t gram) const {
    for (size_t i = gram >> 1;; ++i) {
      const Slot& slot = slots_[i & (slots_.size() - 1)];
      if (slot.gram == gram || !slot.gram) return slot.latest;
    }
  }

  // Returns the slot of a gram, a new one if it has none.
  Slot& slot_of(uint64_t gram) {
    for (size_t i = gram >> 1;; ++i) {
      Slot& slot = slots_[i & (slots_.size() - 1)];
      if (slot.gram == gram) return slot;
      if (slot.gram) continue;
      slot.gram = gram;
      ++num_used_slots_;
      return slot;
    }
  }

  void insert(const Stream& stream, uint32_t position) {
    if (2 * (num_used_slots_ + kGrams.size()) > slots_.size()) grow();
    LogEntry entry{&stream, position, {}};
    const Context context{&stream.text[position] + 1, position + 1};
    for (size_t level = 0; level < kGrams.size(); ++level) {
      Slot& slot = slot_of(gram(context, level));
      entry.previous[level] = slot.latest;
      slot.latest = static_cast<uint32_t>(log_.size());
    }
    log_.push_back(entry);
  }

  void grow() {
    std::vector<Slot> smaller(slots_.empty() ? 64 : 2 * slots_.size());
    smaller.swap(slots_);
    num_used_slots_ = 0;
    for (const Slot& slot : smaller)
      if (slot.gram) slot_of(slot.gram).latest = slot.latest;
  }

  std::vector<LogEntry> log_;  // in the order of their arrival
  std::vector<Slot> slots_;    // open addressing; a power of two
  size_t num_used_slots_ = 0;
  size_t num_forgotten_ = 0;  // tokens since the last sweep, kStart included
};

}  // namespace das

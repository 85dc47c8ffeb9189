// Sealed text of one problem: tokens, and their positions ordered by reversed left context (12 bytes per token).
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "suffix_text.hpp"

namespace das {

class Segment {
 public:
  // A place whose next token is a continuation. Equal contexts are ordered latest first.
  struct Place {
    uint32_t position;         // of the last context token (kStart included) in tokens()
    uint32_t lcp : 8;          // equal context tokens shared with the previous place
    uint32_t trajectory : 24;  // which one it lies in
  };
  struct Trajectory {
    uint32_t start;  // position of its kStart
    uint32_t size;   // tokens after it
    int64_t version;
  };

  bool empty() const { return trajectories_.empty(); }
  uint64_t token_count() const { return tokens_.empty() ? 0 : tokens_.size() - trajectories_.size() - 1; }
  uint64_t nbytes() const {
    return tokens_.size() * sizeof(Token) + places_.size() * sizeof(Place) + trajectories_.size() * sizeof(Trajectory);
  }
  const Text& tokens() const { return tokens_; }
  const std::vector<Place>& places() const { return places_; }
  const std::vector<Trajectory>& trajectories() const { return trajectories_; }

  // Appends trajectories (version, tokens), each younger than all before it, and orders their places into the others.
  void append(const std::vector<std::pair<int64_t, Text>>& added, uint32_t depth) {
    uint64_t size = std::max<uint64_t>(tokens_.size(), 1);
    for (const auto& [version, text] : added) size += text.size() + 1;
    if (size > UINT32_MAX || trajectories_.size() + added.size() >= (1u << 24))
      throw std::length_error("one problem holds at most 2^32 tokens in 2^24 trajectories: expire older versions");
    tokens_.reserve(size);
    if (tokens_.empty()) tokens_.push_back(kStart);  // every trajectory lies between two kStart
    std::vector<Item> items;
    items.reserve(size - tokens_.size());
    for (const auto& [version, text] : added) {
      const auto start = static_cast<uint32_t>(tokens_.size() - 1), index = static_cast<uint32_t>(trajectories_.size());
      for (uint32_t i = 0; i < text.size(); ++i) items.push_back({0, start + i, index});
      trajectories_.push_back({start, static_cast<uint32_t>(text.size()), version});
      tokens_.insert(tokens_.end(), text.begin(), text.end());
      tokens_.push_back(kStart);
    }
    std::vector<Place> fresh;
    fresh.reserve(items.size());
    order(items.data(), items.data() + items.size(), 0, depth, 0, fresh);
    places_ = places_.empty() ? std::move(fresh) : merged(places_, fresh, depth);
  }

  // Drops the trajectories of versions < `before`; returns the number of tokens dropped.
  uint64_t expire(int64_t before) {
    std::vector<Trajectory> kept;
    std::vector<uint32_t> renamed(trajectories_.size(), UINT32_MAX);
    Text tokens{kStart};
    for (size_t i = 0; i < trajectories_.size(); ++i) {
      const Trajectory& t = trajectories_[i];
      if (t.version < before) continue;
      renamed[i] = static_cast<uint32_t>(kept.size());
      kept.push_back({static_cast<uint32_t>(tokens.size() - 1), t.size, t.version});
      tokens.insert(tokens.end(), tokens_.begin() + t.start + 1, tokens_.begin() + t.start + t.size + 2);
    }
    if (kept.size() == trajectories_.size()) return 0;
    if (kept.empty()) tokens.clear();
    std::vector<Place> places;
    uint32_t lcp = 0;  // with the last place kept: the least on the way from it
    for (const Place& p : places_) {
      lcp = std::min<uint32_t>(lcp, p.lcp);
      const uint32_t now = renamed[p.trajectory];
      if (now == UINT32_MAX) continue;
      places.push_back({p.position - trajectories_[p.trajectory].start + kept[now].start, lcp, now});
      lcp = UINT8_MAX;
    }
    const uint64_t before_count = token_count();
    tokens_ = std::move(tokens), places_ = std::move(places), trajectories_ = std::move(kept);
    return before_count - token_count();
  }

  // Visits up to kMost places by match length, longest first; equal lengths: places after the context's own place in
  // the order before those in front of it, nearest first. visit(place, match length); lengths are >= 1.
  template <class Visit>
  void search(Context context, uint32_t depth, Visit&& visit) const {
    auto first = places_.begin();
    for (size_t left = places_.size(); left;) {  // a lower bound that fetches both places it may look at next
      const size_t half = left / 2;
      __builtin_prefetch(&first[half / 2]);
      __builtin_prefetch(&first[half + 1 + (left - half - 1) / 2]);
      const bool behind = sorts_before(first[half], context, depth);
      first += behind ? half + 1 : 0;
      left = behind ? left - half - 1 : half;
    }
    const auto near = std::min<ptrdiff_t>(kMost / 2, first - places_.begin());
    for (auto p = first - near; p != places_.end() && p != first - near + kMost; ++p)
      __builtin_prefetch(&tokens_[p->position]);
    auto after = first, before = first;
    const auto length_at = [&](const Place& p) { return match(context, &tokens_[p.position], depth).length; };
    uint32_t right = after != places_.end() ? length_at(*after) : 0;
    uint32_t left = before != places_.begin() ? length_at(*(before - 1)) : 0;
    for (uint32_t visited = 0; visited < kMost && (right || left); ++visited) {
      if (right >= left) {
        visit(*after, right);
        right = ++after != places_.end() ? std::min<uint32_t>(right, after->lcp) : 0;
      } else {
        --before;
        visit(*before, left);
        left = before != places_.begin() ? std::min<uint32_t>(left, before->lcp) : 0;
      }
    }
  }

  // For reading a segment back from a file; false where the arrays can't belong together.
  bool assign(Text tokens, std::vector<Place> places, std::vector<Trajectory> trajectories) {
    tokens_ = std::move(tokens), places_ = std::move(places), trajectories_ = std::move(trajectories);
    uint64_t position = 0, count = 0;
    for (const Trajectory& t : trajectories_) {
      if (t.start != position) return false;
      position += t.size + 1ull;
      count += t.size;
    }
    if (tokens_.size() != (trajectories_.empty() ? 0 : position + 1) || places_.size() != count) return false;
    return std::all_of(places_.begin(), places_.end(), [&](const Place& p) {
      return p.trajectory < trajectories_.size() && p.position + 1ull < tokens_.size();
    });
  }

 private:
  struct Item {
    uint64_t key;  // the two context tokens at the current depth
    uint32_t position, trajectory;
  };

  bool sorts_before(const Place& p, Context context, uint32_t depth) const {
    const Token* last = &tokens_[p.position];
    const Match m = match(context, last, depth);
    if (m.ended) return false;  // equal, or the context is a prefix and sorts first
    return last[-static_cast<ptrdiff_t>(m.length)] < context[m.length];
  }

  // Sorts [begin, end), whose contexts agree in `at` tokens, two tokens at a time, and appends the places; `lcp` is
  // what the first one shares with the place before it.
  void order(Item* begin, Item* end, uint32_t at, uint32_t depth, uint32_t lcp, std::vector<Place>& out) const {
    for (Item* i = begin; i != end; ++i) {
      const Token* last = &tokens_[i->position] - at;
      const auto high = static_cast<uint32_t>(*last + 1);
      const uint32_t low = high && at + 1 < depth ? static_cast<uint32_t>(last[-1] + 1) : 0;
      i->key = uint64_t{high} << 32 | low;
    }
    std::sort(begin, end, [](const Item& a, const Item& b) {
      return a.key != b.key ? a.key < b.key : a.position > b.position;
    });
    uint64_t previous = 0;
    for (Item* run = begin; run != end;) {
      const uint64_t key = run->key;
      Item* next = std::find_if(run, end, [&](const Item& i) { return i.key != key; });
      if (run != begin) lcp = at + ((key ^ previous) >> 32 == 0);
      const bool ended = !static_cast<uint32_t>(key) || at + 2 >= depth;
      if (next - run == 1 || ended) {
        const uint32_t shared = !(key >> 32) ? at + 1 : std::min(at + 2, depth);
        for (Item* i = run; i != next; ++i) out.push_back({i->position, i == run ? lcp : shared, i->trajectory});
      } else {
        order(run, next, at + 2, depth, lcp, out);
      }
      previous = key;
      run = next;
    }
  }

  // Merges two orders by their lcp arrays: tokens are compared only where those tie. `fresh` lies behind `old`.
  std::vector<Place> merged(const std::vector<Place>& old, const std::vector<Place>& fresh, uint32_t depth) const {
    std::vector<Place> out;
    out.reserve(old.size() + fresh.size());
    size_t i = 0, j = 0;
    uint32_t a = 0, b = 0;  // what old[i] and fresh[j] share with the place written last
    const auto take = [&out](const std::vector<Place>& list, size_t& next, uint32_t& lcp) {
      out.push_back(list[next++]);
      out.back().lcp = lcp;
      lcp = next < list.size() ? list[next].lcp : 0;
    };
    while (i < old.size() && j < fresh.size()) {
      if (a == b) {
        const Token *x = &tokens_[old[i].position], *y = &tokens_[fresh[j].position];
        const Match m = match({x + 1, UINT32_MAX}, y, depth, a ? a - 1 : 0);
        const auto back = static_cast<ptrdiff_t>(m.length);
        if (!m.ended && x[-back] < y[-back]) take(old, i, a), b = m.length;
        else take(fresh, j, b), a = m.length;
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

  Text tokens_;
  std::vector<Place> places_;
  std::vector<Trajectory> trajectories_;
};

}  // namespace das

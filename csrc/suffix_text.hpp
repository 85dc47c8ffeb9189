// Token text read backwards: the meaning of "context", "match" and "differing token" in
// the whole index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tuning.hpp"

namespace das {

using Token = int32_t;
constexpr Token kMaxToken = (1 << 23) - 1;  // real tokens are 0 to this
constexpr Token kStart = -1;  // precedes the first token of every response
// Precedes a stretch of a response of which what came before is not there; matches
// nothing.
constexpr Token kGap = -2;

// A token as texts hold it, in three bytes: the low two in `low_`, the high one, which
// has the sign, in `high_`.
class Stored {
 public:
  Stored(Token token) : high_(static_cast<int8_t>(token >> 16)) {
    const auto low = static_cast<uint16_t>(token);
    std::memcpy(low_, &low, sizeof low);
  }
  operator Token() const { return low() | high_ * 65536; }
  bool same(const Stored& other) const {
    return !((low() ^ other.low()) | (high_ ^ other.high_));
  }
  bool begins() const { return high_ < 0; }  // kStart or kGap

 private:
  int32_t low() const {
    uint16_t low;
    std::memcpy(&low, low_, sizeof low);
    return low;
  }

  char low_[2];
  int8_t high_;
};
static_assert(sizeof(Stored) == 3, "the layout of files");

using Text = std::vector<Stored>;

// The last `size` tokens before `end`, last one first.
struct Context {
  const Stored* end;
  uint32_t size;

  Token operator[](uint32_t back) const {
    return end[-1 - static_cast<ptrdiff_t>(back)];
  }
  Context without_last() const { return {end - 1, size - 1}; }
};

// Match of a context with a place in a text whose last context token is *last; the text
// begins with kStart or kGap.
struct Match {
  // Equal tokens, the text's beginning included, at most `most`.
  uint32_t length;
  // Nothing lies beyond it: a beginning matched, `most` was reached, or the context ran
  // out.
  bool ended;
};

// `from`: tokens that are known to be equal.
inline Match match(Context context, const Stored* last, uint32_t from = 0,
                   uint32_t most = tuning::DEPTH_TOKENS) {
  const uint32_t limit = context.size < most ? context.size : most;
  for (uint32_t i = from; i < limit; ++i) {
    const auto back = static_cast<ptrdiff_t>(i);
    const Stored& token = context.end[-1 - back];
    const Stored& other = last[-back];
    if (!token.same(other)) return {i, false};
    if (token.begins()) return {i + 1, true};
  }
  return {limit, true};
}

// Equal tokens beyond a single differing one at `length` (a substitution), at most
// `limit`.
inline uint32_t match_beyond(Context context, const Stored* last, uint32_t length,
                             uint32_t limit) {
  const Stored* differing = last - length;
  if (length >= context.size || *differing < 0) return 0;
  const Context beyond{context.end - length - 1, context.size - length - 1};
  return match(beyond, differing - 1, 0, limit).length;
}

}  // namespace das

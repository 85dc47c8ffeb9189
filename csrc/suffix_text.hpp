// Token text read backwards: the meaning of "context", "match" and "differing token" in the whole index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace das {

using Token = int32_t;                // real tokens are >= 0
constexpr Token kStart = -1;          // precedes the first token of every response
constexpr uint32_t kMost = 16;        // places that one search of a text visits (live text: per chain)
using Text = std::vector<Token>;

// The last `size` tokens before `end`, last one first.
struct Context {
  const Token* end;
  uint32_t size;

  Token operator[](uint32_t back) const { return end[-1 - static_cast<ptrdiff_t>(back)]; }
  Context without_last() const { return {end - 1, size - 1}; }
};

// Match of a context with a place in a text whose last context token is *last; the text begins with kStart.
struct Match {
  uint32_t length;  // equal tokens, kStart included, at most `depth`
  bool ended;       // nothing lies beyond it: kStart matched, `depth` was reached, or the context ran out
};

inline Match match(Context context, const Token* last, uint32_t depth, uint32_t from = 0) {
  const uint32_t limit = context.size < depth ? context.size : depth;
  for (uint32_t i = from; i < limit; ++i) {
    if (context[i] != last[-static_cast<ptrdiff_t>(i)]) return {i, false};
    if (context[i] == kStart) return {i + 1, true};
  }
  return {limit, true};
}

// Equal tokens beyond a single differing one at `length` (a substitution), at most `limit`.
inline uint32_t match_beyond(Context context, const Token* last, uint32_t length, uint32_t limit) {
  const Token* place = last - length;
  if (length >= context.size || *place == kStart) return 0;
  return match({context.end - length - 1, context.size - length - 1}, place - 1, limit).length;
}

}  // namespace das

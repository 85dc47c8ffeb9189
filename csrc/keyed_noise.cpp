// Gumbel-max sampling whose noise is a pure function of (seed, position, token): see
// engine/v1/keyed_sample.py.
//
// A row's sample is argmax over v of logits[v] + G with G = -log(E), E = -log(1 - u)
// and u made of a 32-bit hash h. Few tokens can win: G <= (1 + leading zeros of h) *
// log 2, so the logarithms are only evaluated where logit + bound reaches the best
// score so far.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

namespace nb = nanobind;

namespace {

inline uint32_t rotated(uint32_t x, int bits) {
  return (x << bits) | (x >> (32 - bits));
}

inline uint32_t mix(uint32_t h, uint32_t word) {  // a round of Murmur3
  word = rotated(word * 0xcc9e2d51u, 15) * 0x1b873593u;
  return rotated(h ^ word, 13) * 5u + 0xe6546b64u;
}

inline uint32_t finalise(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  return h ^ (h >> 16);
}

inline uint32_t row_state(uint64_t seed, uint64_t position) {
  const uint32_t h =
      mix(mix(0, static_cast<uint32_t>(seed)), static_cast<uint32_t>(seed >> 32));
  return mix(h, static_cast<uint32_t>(position));
}

inline uint32_t token_hash(uint32_t state, uint32_t token) {
  return finalise(mix(state, token) ^ 16u);
}

inline float rounded_log(float x) {
  return static_cast<float>(std::log(static_cast<double>(x)));
}

// Every operation is rounded to float32, in this order (compiled with
// -ffp-contract=off).
float gumbel(uint32_t h) {
  const float u = static_cast<float>(h >> 16) * 0x1p-16f +
                  (static_cast<float>(h & 0xffffu) + 0.5f) * 0x1p-32f;
  if (!(u < 0.25f)) return -rounded_log(-rounded_log(std::max(1.0f - u, 0x1p-24f)));
  float series = 1.0f / 8;
  for (const float d : {7.f, 6.f, 5.f, 4.f, 3.f, 2.f, 1.f})
    series = 1.0f / d + u * series;
  return -rounded_log(u * series);
}

constexpr int kBlock = 256;

int64_t sample_row(const float* logits, int64_t vocab, uint32_t state) {
  // Start from the most likely token, so that the bound excludes tokens from the first
  // block on.
  int64_t winner = 0;
  for (int64_t v = 1; v < vocab; ++v)
    if (logits[v] > logits[winner]) winner = v;
  if (!(logits[winner] > -std::numeric_limits<float>::infinity())) return winner;
  float best =
      logits[winner] + gumbel(token_hash(state, static_cast<uint32_t>(winner)));
  uint32_t h[kBlock];
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int n = static_cast<int>(std::min<int64_t>(kBlock, vocab - begin));
    for (int i = 0; i < n; ++i)
      h[i] = token_hash(state, static_cast<uint32_t>(begin + i));
    for (int i = 0; i < n; ++i) {
      const float logit = logits[begin + i];
      // h = 0 has 32 leading zeros; u >= 2^-33 then still holds, hence the 1. The rest
      // allows for rounding.
      const int zeros = h[i] ? __builtin_clz(h[i]) : 32;
      const float bound = (zeros + 1) * 0.6931472f + 1e-4f + 1e-6f * std::abs(logit);
      // NaN where top-k or top-p left the token out.
      if (!(logit + bound >= best)) continue;
      const float score = logit + gumbel(h[i]);
      if (score > best || (score == best && begin + i < winner)) {
        best = score;
        winner = begin + i;
      }
    }
  }
  return winner;
}

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void sample(const Logits& logits, const Ints& seeds, const Ints& positions,
            Tokens& out) {
  const size_t rows = logits.shape(0);
  const auto vocab = static_cast<int64_t>(logits.shape(1));
  if (seeds.size() != rows || positions.size() != rows || out.size() != rows)
    throw std::invalid_argument(
        "keyed noise: the arguments differ in their number of rows");
  const float* x = logits.data();
  const int64_t* seed = seeds.data();
  const int64_t* position = positions.data();
  int64_t* token = out.data();
  nb::gil_scoped_release release;
  for (size_t r = 0; r < rows; ++r) {
    const uint32_t state =
        row_state(static_cast<uint64_t>(seed[r]), static_cast<uint64_t>(position[r]));
    token[r] = sample_row(x + r * vocab, vocab, state);
  }
}

}  // namespace

void bind_keyed_noise(nb::module_& m) {
  m.def("keyed_sample", &sample, nb::arg("logits"), nb::arg("seeds"),
        nb::arg("positions"), nb::arg("out"),
        "Write the keyed-noise sample of each row of float32 logits [rows, vocab] to "
        "out int64 [rows]; seeds and positions of the input tokens int64 [rows].");
}

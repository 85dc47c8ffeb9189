// Gumbel-max sampling whose noise is a pure function of (row key, token): see das_adapter/core/noise.py.
//
// A row's sample is argmax over v of logits[v] + G(key, v) with G = -log(E), E = -log1p(-u), u = (h + 1/2) / 2^32
// and h a 32-bit hash of (key, v). Few tokens can win: -log(E) <= (1 + leading zeros of h) * log 2, so the two
// logarithms are only evaluated where logit + bound exceeds the best score so far.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

namespace nb = nanobind;

namespace {

inline uint32_t finalise(uint32_t h) {  // an invertible 32-bit mixer of full avalanche
  h ^= h >> 16;
  h *= 0x21f0aaadu;
  h ^= h >> 15;
  h *= 0x735a2d97u;
  h ^= h >> 15;
  return h;
}

inline uint32_t token_hash(uint32_t k0, uint32_t k1, uint32_t token) {
  return finalise(finalise(token * 0x9e3779b1u + k0) ^ k1);
}

inline double gumbel(uint32_t h) { return -std::log(-std::log1p(-((h + 0.5) * 0x1p-32))); }

constexpr int kBlock = 256;

int64_t sample_row(const float* logits, int64_t vocab, uint64_t key) {
  const auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  // Start from the most likely token, so that the bound excludes tokens from the first block on.
  int64_t winner = 0;
  for (int64_t v = 1; v < vocab; ++v)
    if (logits[v] > logits[winner]) winner = v;
  if (!(logits[winner] > -std::numeric_limits<float>::infinity())) return winner;
  double best = logits[winner] + gumbel(token_hash(k0, k1, static_cast<uint32_t>(winner)));
  uint32_t h[kBlock];
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int n = static_cast<int>(std::min<int64_t>(kBlock, vocab - begin));
    for (int i = 0; i < n; ++i) h[i] = token_hash(k0, k1, static_cast<uint32_t>(begin + i));
    for (int i = 0; i < n; ++i) {
      const double logit = logits[begin + i];
      // h = 0 has 32 leading zeros; u >= 2^-33 then still holds, hence the 1.
      const int zeros = h[i] ? __builtin_clz(h[i]) : 32;
      if (logit + (zeros + 1) * 0.6931471805599453 < best) continue;
      const double score = logit + gumbel(h[i]);
      if (score > best || (score == best && begin + i < winner)) best = score, winner = begin + i;
    }
  }
  return winner;
}

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void sample(const Logits& logits, const Keys& keys, Tokens& out) {
  const int64_t rows = logits.shape(0), vocab = logits.shape(1);
  if (static_cast<int64_t>(keys.size()) != rows || static_cast<int64_t>(out.size()) != rows)
    throw std::invalid_argument("keyed noise: logits, keys and out differ in their number of rows");
  const float* x = logits.data();
  const uint64_t* key = keys.data();
  int64_t* token = out.data();
  nb::gil_scoped_release release;
  for (int64_t r = 0; r < rows; ++r) token[r] = sample_row(x + r * vocab, vocab, key[r]);
}

}  // namespace

void bind_keyed_noise(nb::module_& m) {
  m.def("keyed_sample", &sample, nb::arg("logits"), nb::arg("keys"), nb::arg("out"),
        "Write the keyed-noise sample of each row of float32 logits [rows, vocab] under keys uint64 [rows] "
        "to out int64 [rows].");
}

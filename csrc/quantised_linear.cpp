// Linear layers with 4- or 8-bit weights for a CPU: y = W x with W = scale (code -
// zero) per row and group of 128 inputs, x quantised to 8 bits per token and group.
// Decoding reads every weight in each step, so time follows their bytes.
//
// Sixteen output rows form a block. In a block, four consecutive inputs of one row form
// one 32-bit lane, which the VNNI instruction multiplies and adds. Codes of a block:
// [inputs / 4][16 rows][4] bytes; with 4 bits two such steps share their bytes, the
// earlier one in the low halves. Scales (float32) and zeros (uint8): [block][group][16
// rows].
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "parallel.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define DAS_VNNI 1
#endif

namespace nb = nanobind;

namespace {

constexpr int kRows = 16;
constexpr int kGroup = 128;
constexpr int kSteps = kGroup / 4;

inline float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t to_bf16(float f) {  // round to nearest even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Nearest integer, ties to even, for |x| < 2^22; unlike nearbyint it needs no library
// call.
inline float nearest(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

struct Shape {
  int64_t rows, inputs, groups;
  int bits;
  Shape(int64_t n, int64_t k, int b)
      : rows(n), inputs(k), groups((k + kGroup - 1) / kGroup), bits(b) {}
  int64_t blocks() const { return (rows + kRows - 1) / kRows; }
  int64_t group_bytes() const { return kRows * kGroup * bits / 8; }
  int64_t block_bytes() const { return groups * group_bytes(); }
};

void load_row(const void* data, bool bf16, int64_t offset, int64_t count, float* out) {
  if (bf16)
    for (int64_t i = 0; i < count; ++i)
      out[i] = from_bf16(static_cast<const uint16_t*>(data)[offset + i]);
  else
    std::memcpy(out, static_cast<const float*>(data) + offset, count * sizeof(float));
}

void quantise_block(const Shape& s, int64_t block, const void* weight, bool bf16,
                    uint8_t* codes, float* scales, uint8_t* zeros) {
  const float top = s.bits == 4 ? 15.0f : 255.0f;
  float w[kGroup];
  codes += block * s.block_bytes();
  std::memset(codes, 0, s.block_bytes());
  for (int r = 0; r < kRows; ++r)
    for (int64_t g = 0; g < s.groups; ++g) {
      const int64_t row = block * kRows + r;
      const int64_t at = (block * s.groups + g) * kRows + r;
      scales[at] = 0.0f;
      zeros[at] = 0;
      if (row >= s.rows) continue;
      const int n = static_cast<int>(std::min<int64_t>(kGroup, s.inputs - g * kGroup));
      load_row(weight, bf16, row * s.inputs + g * kGroup, n, w);
      float low = 0.0f;
      float high = 0.0f;
      for (int i = 0; i < n; ++i) {
        low = std::min(low, w[i]);
        high = std::max(high, w[i]);
      }
      const float scale = high > low ? (high - low) / top : 1.0f;
      const float zero = nearest(-low / scale);
      scales[at] = scale;
      zeros[at] = static_cast<uint8_t>(zero);
      uint8_t* out = codes + g * s.group_bytes() + r * 4;
      for (int i = 0; i < n; ++i) {
        const auto code =
            static_cast<uint8_t>(std::clamp(nearest(w[i] / scale) + zero, 0.0f, top));
        const int step = i / 4;
        const int j = i % 4;
        if (s.bits == 8)
          out[step * 64 + j] = code;
        else
          out[step / 2 * 64 + j] |= step % 2 ? code << 4 : code;
      }
    }
}

// Quantises one token's inputs to 8 bits; groups past the end are zero and add nothing.
struct Activations {
  std::vector<int8_t> codes;
  std::vector<float> scales, sums;
};

void quantise_token(const Shape& s, const void* x, bool bf16, int64_t t,
                    Activations& a) {
  float v[kGroup];
  for (int64_t g = 0; g < s.groups; ++g) {
    const int n = static_cast<int>(std::min<int64_t>(kGroup, s.inputs - g * kGroup));
    load_row(x, bf16, t * s.inputs + g * kGroup, n, v);
    float top = 0.0f;
    for (int i = 0; i < n; ++i) top = std::max(top, std::fabs(v[i]));
    const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    int8_t* out = a.codes.data() + (t * s.groups + g) * kGroup;
    int sum = 0;
    for (int i = 0; i < n; ++i) {
      const int code = static_cast<int>(nearest(v[i] * inverse));
      out[i] = static_cast<int8_t>(code);
      sum += code;
    }
    a.scales[t * s.groups + g] = top / 127.0f;
    a.sums[t * s.groups + g] = static_cast<float>(sum);
  }
}

struct Weights {
  const uint8_t* codes;
  const float* scales;
  const uint8_t* zeros;
};

// Multiplies one block of rows with tokens [t, t + T); `out` is [T][16]. This portable
// form defines the result.
template <int kBits>
void multiply(const Shape& s, const Weights& w, int64_t block, const Activations& a,
              int64_t t, int count, float* out) {
  const uint8_t* codes = w.codes + block * s.block_bytes();
  for (int i = 0; i < count; ++i) {
    const int8_t* x = a.codes.data() + (t + i) * s.groups * kGroup;
    float* y = out + i * kRows;
    std::fill(y, y + kRows, 0.0f);
    for (int64_t g = 0; g < s.groups; ++g) {
      int32_t dot[kRows] = {};
      for (int step = 0; step < kSteps; ++step)
        for (int r = 0; r < kRows; ++r)
          for (int j = 0; j < 4; ++j) {
            const uint8_t byte = codes[g * s.group_bytes() +
                                       (kBits == 8 ? step : step / 2) * 64 + r * 4 + j];
            const int code = kBits == 8 ? byte : step % 2 ? byte >> 4 : byte & 15;
            dot[r] += code * x[g * kGroup + step * 4 + j];
          }
      const int64_t at = (block * s.groups + g) * kRows;
      const float scale = a.scales[(t + i) * s.groups + g];
      const float sum = a.sums[(t + i) * s.groups + g];
      for (int r = 0; r < kRows; ++r)
        y[r] = std::fma(static_cast<float>(dot[r]) - w.zeros[at + r] * sum,
                        w.scales[at + r] * scale, y[r]);
    }
  }
}

#ifdef DAS_VNNI
template <int kBits, int T>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) void multiply_vnni(
    const Shape& s, const Weights& w, int64_t block, const Activations& a, int64_t t,
    float* out) {
  const __m512i low = _mm512_set1_epi8(15);
  const uint8_t* codes = w.codes + block * s.block_bytes();
  const int64_t stride = s.groups * kGroup;
  const int8_t* x = a.codes.data() + t * stride;
  __m512 y[T];
#pragma GCC unroll 8
  for (int i = 0; i < T; ++i) y[i] = _mm512_setzero_ps();
  for (int64_t g = 0; g < s.groups; ++g, codes += s.group_bytes(), x += kGroup) {
    __m512i even[T], odd[T];
#pragma GCC unroll 8
    for (int i = 0; i < T; ++i) even[i] = odd[i] = _mm512_setzero_si512();
    for (int step = 0; step < kSteps; step += 2) {
      __m512i first, second;
      if constexpr (kBits == 8) {
        first = _mm512_loadu_si512(codes + step * 64);
        second = _mm512_loadu_si512(codes + step * 64 + 64);
      } else {
        const __m512i both = _mm512_loadu_si512(codes + step * 32);
        first = _mm512_and_si512(both, low);
        second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      }
#pragma GCC unroll 8
      for (int i = 0; i < T; ++i) {
        // Four inputs, broadcast from memory.
        const auto* four = reinterpret_cast<const int32_t*>(x + i * stride) + step;
        even[i] = _mm512_dpbusd_epi32(even[i], first, _mm512_set1_epi32(four[0]));
        odd[i] = _mm512_dpbusd_epi32(odd[i], second, _mm512_set1_epi32(four[1]));
      }
    }
    const int64_t at = (block * s.groups + g) * kRows;
    const __m512 scale = _mm512_loadu_ps(w.scales + at);
    const __m512 zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.zeros + at))));
#pragma GCC unroll 8
    for (int i = 0; i < T; ++i) {
      const int64_t of = (t + i) * s.groups + g;
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(even[i], odd[i]));
      // Both factors are integers below 2^24: the product and the difference are exact,
      // as in the portable form.
      const __m512 value = _mm512_fnmadd_ps(zero, _mm512_set1_ps(a.sums[of]), dot);
      y[i] = _mm512_fmadd_ps(value, _mm512_mul_ps(scale, _mm512_set1_ps(a.scales[of])),
                             y[i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < T; ++i) _mm512_storeu_ps(out + i * kRows, y[i]);
}

bool has_vnni() {
  static const bool found = __builtin_cpu_supports("avx512vnni") &&
                            __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl");
  return found;
}
#endif

template <int kBits>
void multiply_block(const Shape& s, const Weights& w, int64_t block,
                    const Activations& a, int64_t tokens, bool portable, float* out) {
#ifdef DAS_VNNI
  if (!portable && has_vnni()) {
    int64_t t = 0;
    for (; t + 8 <= tokens; t += 8)
      multiply_vnni<kBits, 8>(s, w, block, a, t, out + t * kRows);
    for (; t + 4 <= tokens; t += 4)
      multiply_vnni<kBits, 4>(s, w, block, a, t, out + t * kRows);
    for (; t + 2 <= tokens; t += 2)
      multiply_vnni<kBits, 2>(s, w, block, a, t, out + t * kRows);
    for (; t < tokens; ++t) multiply_vnni<kBits, 1>(s, w, block, a, t, out + t * kRows);
    return;
  }
#else
  (void)portable;
#endif
  multiply<kBits>(s, w, block, a, 0, static_cast<int>(tokens), out);
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void check(int bits, int64_t n, int64_t k) {
  if ((bits != 4 && bits != 8) || n < 1 || k < 1)
    throw std::invalid_argument(
        "quantised linear: found bits, rows or inputs out of range; bits: 4 or 8");
}

void quantise(uintptr_t weight, bool bf16, int64_t n, int64_t k, int bits,
              uintptr_t codes, uintptr_t scales, uintptr_t zeros, int threads) {
  check(bits, n, k);
  const Shape s(n, k, bits);
  nb::gil_scoped_release release;
  das::parallel_for(s.blocks(), threads, [&](int64_t block) {
    quantise_block(s, block, pointer<void>(weight), bf16, pointer<uint8_t>(codes),
                   pointer<float>(scales), pointer<uint8_t>(zeros));
  });
}

void linear(uintptr_t x, bool bf16, int64_t tokens, int64_t n, int64_t k, int bits,
            uintptr_t codes, uintptr_t scales, uintptr_t zeros, uintptr_t out,
            int threads, bool portable) {
  check(bits, n, k);
  const Shape s(n, k, bits);
  const Weights w{pointer<uint8_t>(codes), pointer<float>(scales),
                  pointer<uint8_t>(zeros)};
  nb::gil_scoped_release release;
  Activations a{std::vector<int8_t>(tokens * s.groups * kGroup),
                std::vector<float>(tokens * s.groups),
                std::vector<float>(tokens * s.groups)};
  das::parallel_for(tokens, tokens < 4 ? 1 : threads, [&](int64_t t) {
    quantise_token(s, pointer<void>(x), bf16, t, a);
  });
  das::parallel_for(s.blocks(), threads, [&](int64_t block) {
    thread_local std::vector<float> tile;
    tile.resize(tokens * kRows);
    const auto multiply_rows = bits == 4 ? multiply_block<4> : multiply_block<8>;
    multiply_rows(s, w, block, a, tokens, portable, tile.data());
    const int64_t first = block * kRows;
    const int64_t count = std::min<int64_t>(kRows, n - first);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t r = 0; r < count; ++r) {
        const float value = tile[t * kRows + r];
        const int64_t place = t * n + first + r;
        if (bf16)
          pointer<uint16_t>(out)[place] = to_bf16(value);
        else
          pointer<float>(out)[place] = value;
      }
  });
}

}  // namespace

void bind_quantised_linear(nb::module_& m) {
  m.def("quantise", &quantise, nb::arg("weight"), nb::arg("bf16"), nb::arg("rows"),
        nb::arg("inputs"), nb::arg("bits"), nb::arg("codes"), nb::arg("scales"),
        nb::arg("zeros"), nb::arg("threads"),
        "Quantise a weight [rows, inputs] (float32 or bfloat16), to nearest. All "
        "buffers by address; see das_adapter/engine/quantised.py.");
  m.def("quantised_linear", &linear, nb::arg("x"), nb::arg("bf16"), nb::arg("tokens"),
        nb::arg("rows"), nb::arg("inputs"), nb::arg("bits"), nb::arg("codes"),
        nb::arg("scales"), nb::arg("zeros"), nb::arg("out"), nb::arg("threads"),
        nb::arg("portable") = false,
        "Put x [tokens, inputs] times the quantised weight into out [tokens, rows], in "
        "x's dtype.");
}

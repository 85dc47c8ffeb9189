// The native core: das_adapter._native.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_controller(nb::module_& m);
void bind_keyed_noise(nb::module_& m);
void bind_live_texts(nb::module_& m);
void bind_quantised_linear(nb::module_& m);
void bind_suffix_index(nb::module_& m);

NB_MODULE(_native, m) {
  m.doc() =
      "Native core of das-adapter: keyed-noise sampling, the suffix index, the "
      "allocation of draft tokens, quantised linear layers.";
  bind_controller(m);
  bind_keyed_noise(m);
  bind_live_texts(m);
  bind_quantised_linear(m);
  bind_suffix_index(m);
}

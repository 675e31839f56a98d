#include <nanobind/nanobind.h>

#include "bindings.hpp"

NB_MODULE(_native, m) {
  m.doc() = "Native CPU library of EdgeTransformerEngine.";
  ete::bind_pool(m);
  ete::bind_linear(m);
  ete::bind_batch(m);
  ete::bind_attention(m);
  ete::bind_elementwise(m);
  ete::bind_gated_delta(m);
  ete::bind_formats(m);
  ete::bind_quantize(m);
  ete::bind_text(m);
}

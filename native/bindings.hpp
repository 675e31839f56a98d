// Each source file of native/ binds what it holds; module.cpp only calls these.
#pragma once
#include <nanobind/nanobind.h>

namespace ete {

void bind_pool(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_batch(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_elementwise(nanobind::module_& m);
void bind_gated_delta(nanobind::module_& m);
void bind_formats(nanobind::module_& m);
void bind_quantize(nanobind::module_& m);
void bind_text(nanobind::module_& m);

}  // namespace ete

// Kernels are added as files here; this one gives every instruction set an object.
#include "simd.hpp"

// The process's kernels by the key of their cubin, and the cubins that an exported program carries.
#ifndef JAX_FA4_FFI_REGISTRY_H_
#define JAX_FA4_FFI_REGISTRY_H_

#include <string>
#include <string_view>

#include "driver.h"
#include "plan.h"
#include "status.h"

namespace jax_fa4 {

// Makes a kernel known, in place of one known before under the same key. Thread-safe, as are the functions below.
void RegisterKernel(const Key& key, CuKernel kernel);

// Checks the form of the `images` attribute, which jax_fa4/plan/encode.py describes; no image at all is an empty view.
Status CheckImages(std::string_view images);

// The kernel of a launch: one that is known, else one that is loaded from `images` (and known from then on).
Status ResolveKernel(const Driver& driver, const Launch& launch, std::string_view images, CuKernel* kernel);

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_REGISTRY_H_

// The process's kernels by the key of their cubin, and the cubins that an exported program carries.
#ifndef JAX_FA4_FFI_REGISTRY_H_
#define JAX_FA4_FFI_REGISTRY_H_

#include <string>
#include <string_view>

#include "driver.h"
#include "plan.h"
#include "status.h"

namespace jax_fa4 {

// Keeps a copy of a cubin for the process's life; a key that is known already stays as it is. Thread-safe, as are the
// functions below. Loading waits for the first launch, so a program can be lowered where there is no driver.
void RegisterImage(const Key& key, std::string_view image);

// Checks the form of the `images` attribute, which jax_fa4/plan/encode.py describes; no image at all is an empty view.
Status CheckImages(std::string_view images);

// The kernel of a launch, loaded on first use from the registered cubin of its key, else from `images`.
Status ResolveKernel(const Driver& driver, const Launch& launch, std::string_view images, CuKernel* kernel);

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_REGISTRY_H_

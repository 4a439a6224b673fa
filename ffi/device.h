// A plan on one device: its kernels, made ready once, and its runs.
#ifndef JAX_FA4_FFI_DEVICE_H_
#define JAX_FA4_FFI_DEVICE_H_

#include <mutex>
#include <string_view>
#include <vector>

#include "buffers.h"
#include "driver.h"
#include "limits.h"
#include "plan.h"
#include "ready.h"
#include "status.h"

namespace jax_fa4 {

struct Device {
  const Variant* variant = nullptr;
  CuKernel kernels[kMaxLaunches] = {};
  int64_t multiprocessors = 0;

  // The last few runs, of which the next one most likely repeats one.
  std::mutex mutex;
  std::vector<ReadyPlan> ready;
  size_t oldest = 0;
};

// Chooses the device's variant, finds or loads its kernels and raises their shared-memory limit on this device.
Status PrepareDevice(const Driver& driver, const Plan& plan, std::string_view images, int ordinal, Device* prepared);

// Launches everything, in order. Neither allocates nor synchronises.
Status RunPlan(const Driver& driver, Device* device, Buffers* buffers, CuStream stream);

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_DEVICE_H_

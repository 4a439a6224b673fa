// One run of a plan: kernels made ready for a device, launches evaluated against the buffers, and sent to a stream.
#ifndef JAX_FA4_FFI_LAUNCH_H_
#define JAX_FA4_FFI_LAUNCH_H_

#include <string_view>

#include "buffers.h"
#include "driver.h"
#include "limits.h"
#include "plan.h"
#include "status.h"
#include "tensor_map.h"

namespace jax_fa4 {

// A plan's kernels on one device.
struct DeviceKernels {
  const Variant* variant = nullptr;
  CuKernel kernels[kMaxLaunches] = {};
};

// Chooses the device's variant, finds or loads its kernels and raises their shared-memory limit on this device.
Status PrepareDevice(const Driver& driver, const Plan& plan, std::string_view images, int ordinal,
                     DeviceKernels* prepared);

// One launch in numbers. Left uninitialised: only what the launch has is written.
struct EvaluatedLaunch {
  uint32_t grid[3];  // a zero extent: nothing is launched, and nothing below is set
  TensorMapFields maps[kMaxTensorMaps];
  unsigned char bytes[kMaxParamBytes];  // the records one after the other
  uint16_t places[kMaxParams];          // per param: index into maps, or where its record starts in bytes

  bool launches_nothing() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
};

struct EvaluatedPlan {
  EvaluatedLaunch launches[kMaxLaunches];
};

// Evaluates every launch before any is sent, so that a bad one launches nothing. Checks the buffers first.
Status EvaluatePlan(const Variant& variant, Buffers* buffers, EvaluatedPlan* evaluated);

// EvaluatePlan, then the launches in order. Neither allocates nor synchronises.
Status RunPlan(const Driver& driver, const DeviceKernels& prepared, Buffers* buffers, CuStream stream);

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_LAUNCH_H_

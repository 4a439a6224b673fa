// Launches in numbers: a plan's expressions evaluated against the buffers of a run.
#ifndef JAX_FA4_FFI_LAUNCH_H_
#define JAX_FA4_FFI_LAUNCH_H_

#include <cstdint>

#include "buffers.h"
#include "limits.h"
#include "plan.h"
#include "status.h"
#include "tensor_map.h"

namespace jax_fa4 {

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

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_LAUNCH_H_

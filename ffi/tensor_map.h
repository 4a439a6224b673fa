// Tensor maps: from a plan's expressions to checked numbers, and from these to the driver's opaque 128 bytes.
#ifndef JAX_FA4_FFI_TENSOR_MAP_H_
#define JAX_FA4_FFI_TENSOR_MAP_H_

#include <cstdint>

#include "buffers.h"
#include "driver.h"
#include "plan.h"
#include "status.h"

namespace jax_fa4 {

// The arguments of cuTensorMapEncodeTiled.
struct TensorMapFields {
  const Dtype* dtype;
  uint32_t rank;
  void* address;
  uint64_t dims[kTensorRankLimit];
  uint64_t strides[kTensorRankLimit];  // one fewer than dims
  uint32_t box[kTensorRankLimit];
  uint8_t swizzle;
  uint16_t l2_promotion;
};

// Every element that the map can reach lies in its buffer. An empty map becomes one of a single element in some other
// buffer: the driver accepts no empty one, and the kernel's own bounds keep it from touching the element.
Status EvaluateTensorMap(const TensorMapParam& param, const Variant& variant, const Buffers& buffers,
                         TensorMapFields* fields);

Status EncodeTensorMap(const Driver& driver, const TensorMapFields& fields, CuTensorMap* map);

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_TENSOR_MAP_H_

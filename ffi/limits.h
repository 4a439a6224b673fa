// Fixed sizes and driver limits. Storage is bounded so that a launch allocates nothing; jax_fa4/plan/limits.py has the
// same numbers.
#ifndef JAX_FA4_FFI_LIMITS_H_
#define JAX_FA4_FFI_LIMITS_H_

#include <cstddef>
#include <cstdint>

namespace jax_fa4 {

inline constexpr size_t kMaxVariants = 8;
inline constexpr size_t kMaxBuffers = 64;
inline constexpr size_t kMaxLaunches = 8;
inline constexpr size_t kMaxParams = 64;
inline constexpr size_t kMaxTensorMaps = 16;
inline constexpr size_t kMaxParamBytes = 4096;
inline constexpr size_t kMaxExprDepth = 16;
inline constexpr size_t kMaxTail = 8;
inline constexpr size_t kMaxName = 255;
inline constexpr size_t kMaxEntry = 4095;
inline constexpr int kMaxDevices = 64;  // GPUs of one process

// CUDA programming guide, technical specifications of compute capability 9.0 and 10.0.
inline constexpr int64_t kGridLimitX = (int64_t{1} << 31) - 1;
inline constexpr int64_t kGridLimitYZ = 65535;
inline constexpr uint32_t kBlockLimit = 1024;
inline constexpr uint32_t kSmemLimit = 227 * 1024;
inline constexpr uint32_t kClusterLimit = 16;
inline constexpr uint32_t kPortableClusterLimit = 8;  // more must be allowed kernel by kernel

// cuTensorMapEncodeTiled.
inline constexpr size_t kTensorRankLimit = 5;
inline constexpr uint32_t kBoxLimit = 256;
inline constexpr int64_t kTensorDimLimit = int64_t{1} << 32;
inline constexpr int64_t kTensorStrideLimit = int64_t{1} << 40;  // exclusive
inline constexpr int64_t kTensorAlign = 16;                      // bytes, of address, strides and a box's rows

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_LIMITS_H_

// The few functions of the CUDA driver that a launch needs, found in libcuda at run time: building needs no CUDA.
// The types have the layout of the driver's ABI (cuda.h), which its stable entry points keep.
#ifndef JAX_FA4_FFI_DRIVER_H_
#define JAX_FA4_FFI_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "status.h"

namespace jax_fa4 {

using CuResult = int;  // 0 is success
using CuDevice = int;
using CuLibrary = struct CuLibraryHandle*;
using CuKernel = struct CuKernelHandle*;  // valid in every context; passes for a CUfunction
using CuStream = struct CuStreamHandle*;

struct alignas(128) CuTensorMap {
  uint64_t opaque[16];
};

struct CuLaunchAttribute {
  int32_t id;
  char pad[4];
  union {
    char bytes[64];
    uint32_t cluster[3];
    int32_t programmatic_stream_serialization;
  } value;
};
static_assert(sizeof(CuLaunchAttribute) == 72);

struct CuLaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t smem_bytes;
  CuStream stream;
  CuLaunchAttribute* attributes;
  uint32_t num_attributes;
};
static_assert(sizeof(CuLaunchConfig) == 56 && offsetof(CuLaunchConfig, stream) == 32);

enum : int32_t {  // CUlaunchAttributeID
  kLaunchClusterDimension = 4,
  kLaunchProgrammaticStreamSerialization = 6,
};
enum : int32_t {  // CUdevice_attribute
  kDeviceMultiprocessors = 16,
  kDeviceCapabilityMajor = 75,
  kDeviceCapabilityMinor = 76,
  kDeviceSmemOptin = 97,
};
enum : int32_t {  // CUfunction_attribute
  kKernelMaxDynamicSmem = 8,
  kKernelNonPortableCluster = 14,
};

struct Driver {
  CuResult (*cuInit)(unsigned flags);
  CuResult (*cuGetErrorName)(CuResult error, const char** name);
  CuResult (*cuDeviceGet)(CuDevice* device, int ordinal);
  CuResult (*cuDeviceGetAttribute)(int* value, int32_t attribute, CuDevice device);
  CuResult (*cuLibraryLoadData)(CuLibrary* library, const void* code, void* jit_options, void** jit_values,
                                unsigned num_jit, void* options, void** values, unsigned num_options);
  CuResult (*cuLibraryUnload)(CuLibrary library);
  CuResult (*cuLibraryGetKernel)(CuKernel* kernel, CuLibrary library, const char* name);
  CuResult (*cuKernelGetFunction)(void** function, CuKernel kernel);  // in the current context
  CuResult (*cuKernelGetAttribute)(int* value, int32_t attribute, CuKernel kernel, CuDevice device);
  CuResult (*cuKernelSetAttribute)(int32_t attribute, int value, CuKernel kernel, CuDevice device);
  CuResult (*cuLaunchKernelEx)(const CuLaunchConfig* config, CuKernel kernel, void** params, void** extra);
  CuResult (*cuTensorMapEncodeTiled)(CuTensorMap* map, int32_t dtype, uint32_t rank, void* address,
                                     const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                                     const uint32_t* element_strides, int32_t interleave, int32_t swizzle,
                                     int32_t l2_promotion, int32_t fill);
  // Since CUDA 12.4; null in an older driver.
  CuResult (*cuKernelGetParamInfo)(CuKernel kernel, size_t index, size_t* offset, size_t* size);

  // "CUDA_ERROR_INVALID_VALUE (1)".
  std::string ErrorText(CuResult error) const;
  // Success, or an error that names the failed call.
  Status Check(CuResult result, const char* call) const;
};

// Opens libcuda once per process.
Status GetDriver(const Driver** driver);

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_DRIVER_H_

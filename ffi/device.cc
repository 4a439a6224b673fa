#include "device.h"

#include <algorithm>

#include "registry.h"

namespace jax_fa4 {
namespace {

constexpr size_t kReadyPlans = 4;  // XLA's allocator hands a loop's buffers out in turns, two as a rule

// The driver's sizes of the kernel's parameters against the plan's: the driver copies as many bytes as the kernel has.
Status CheckParams(const Driver& driver, const Launch& launch, CuKernel kernel) {
  if (driver.cuKernelGetParamInfo == nullptr) return {};
  size_t offset = 0, size = 0;
  for (size_t i = 0; i < launch.params.size(); ++i) {
    const auto* record = std::get_if<RecordParam>(&launch.params[i]);
    const size_t planned = record == nullptr ? sizeof(CuTensorMap) : record->size;
    if (driver.cuKernelGetParamInfo(kernel, i, &offset, &size) != 0) {
      return Status::Invalid("the plan has ", launch.params.size(), " params, the kernel ", i);
    }
    if (size != planned) return Status::Invalid("param ", i, ": the plan has ", planned, " bytes, the kernel ", size);
  }
  if (driver.cuKernelGetParamInfo(kernel, launch.params.size(), &offset, &size) == 0) {
    return Status::Invalid("the plan has ", launch.params.size(), " params, the kernel has more");
  }
  return {};
}

// Dynamic shared memory above 48 KiB, and clusters of more than eight, must be allowed kernel by kernel and device by
// device. A limit is only ever raised: plans may share a kernel.
Status RaiseLimits(const Driver& driver, const Launch& launch, CuKernel kernel, CuDevice device) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  int limit = 0, optin = 0;
  FA4_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGetAttribute(&optin, kDeviceSmemOptin, device),
                                   "cuDeviceGetAttribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)"));
  const auto smem_bytes = static_cast<int>(launch.smem_bytes);
  if (smem_bytes > optin) {
    return Status(Code::kFailedPrecondition,
                  Text("smem_bytes is ", smem_bytes, ", but a block of this device has at most ", optin));
  }
  FA4_RETURN_IF_ERROR(driver.Check(driver.cuKernelGetAttribute(&limit, kKernelMaxDynamicSmem, kernel, device),
                                   "cuKernelGetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)"));
  if (smem_bytes > limit) {
    FA4_RETURN_IF_ERROR(driver.Check(driver.cuKernelSetAttribute(kKernelMaxDynamicSmem, smem_bytes, kernel, device),
                                     "cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)"));
  }
  if (uint32_t{launch.cluster[0]} * launch.cluster[1] * launch.cluster[2] <= kPortableClusterLimit) return {};
  return driver.Check(driver.cuKernelSetAttribute(kKernelNonPortableCluster, 1, kernel, device),
                      "cuKernelSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)");
}

Status PrepareKernel(const Driver& driver, const Launch& launch, CuKernel kernel, CuDevice device) {
  // Puts the code on the device now: by default the first launch does, which may come while a graph is captured.
  // Without a current context nothing happens, and the launch has to do it after all.
  void* function = nullptr;
  driver.cuKernelGetFunction(&function, kernel);
  FA4_RETURN_IF_ERROR(CheckParams(driver, launch, kernel));
  return RaiseLimits(driver, launch, kernel, device);
}

}  // namespace

Status PrepareDevice(const Driver& driver, const Plan& plan, std::string_view images, int ordinal,
                     Device* prepared) {
  CuDevice device = 0;
  int major = 0, minor = 0, multiprocessors = 0;
  FA4_RETURN_IF_ERROR_AT(driver.Check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet"), "device ", ordinal);
  FA4_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGetAttribute(&major, kDeviceCapabilityMajor, device),
                                   "cuDeviceGetAttribute(COMPUTE_CAPABILITY_MAJOR)"));
  FA4_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGetAttribute(&minor, kDeviceCapabilityMinor, device),
                                   "cuDeviceGetAttribute(COMPUTE_CAPABILITY_MINOR)"));
  FA4_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGetAttribute(&multiprocessors, kDeviceMultiprocessors, device),
                                   "cuDeviceGetAttribute(MULTIPROCESSOR_COUNT)"));
  prepared->multiprocessors = multiprocessors;
  prepared->variant = plan.For(major, minor);
  if (prepared->variant == nullptr) {
    return Status(Code::kFailedPrecondition, Text("the program has kernels for ", plan.Archs(), ", but device ",
                                                  ordinal, " is of compute capability ", major, ".", minor));
  }
  const auto& launches = prepared->variant->launches;
  for (size_t i = 0; i < launches.size(); ++i) {
    const Launch& launch = launches[i];
    FA4_RETURN_IF_ERROR_AT(ResolveKernel(driver, launch, images, &prepared->kernels[i]), launch.entry, " for ",
                           prepared->variant->arch.name, " on device ", ordinal, " of compute capability ", major, ".",
                           minor);
    FA4_RETURN_IF_ERROR_AT(PrepareKernel(driver, launch, prepared->kernels[i], device), launch.entry);
  }
  prepared->ready.assign(kReadyPlans, ReadyPlan(*prepared->variant));
  return {};
}

Status RunPlan(const Driver& driver, Device* device, Buffers* buffers, CuStream stream) {
  const Signature signature = Signature::Of(*buffers);
  const std::lock_guard<std::mutex> lock(device->mutex);
  auto ready = std::find_if(device->ready.begin(), device->ready.end(),
                            [&](const ReadyPlan& plan) { return plan.IsFor(signature); });
  if (ready == device->ready.end()) {
    ready = device->ready.begin() + static_cast<ptrdiff_t>(device->oldest);
    device->oldest = (device->oldest + 1) % device->ready.size();
    buffers->multiprocessors = device->multiprocessors;
    FA4_RETURN_IF_ERROR(ready->Make(driver, *device->variant, signature, buffers));
  }
  return ready->Send(driver, *device->variant, device->kernels, stream);
}

}  // namespace jax_fa4

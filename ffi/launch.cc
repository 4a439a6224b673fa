#include "launch.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>

#include "registry.h"

namespace jax_fa4 {
namespace {

// Turns one launch's expressions into numbers.
class LaunchEvaluator {
 public:
  LaunchEvaluator(const Variant& variant, const Buffers& buffers, EvaluatedLaunch* out)
      : variant_(variant), buffers_(buffers), out_(*out) {}

  Status Evaluate(const Launch& launch) {
    FA4_RETURN_IF_ERROR(EvaluateGrid(launch));
    if (out_.launches_nothing()) return {};
    size_t num_maps = 0, num_bytes = 0;
    for (size_t i = 0; i < launch.params.size(); ++i) {
      if (const auto* map = std::get_if<TensorMapParam>(&launch.params[i])) {
        out_.places[i] = static_cast<uint16_t>(num_maps++);
        FA4_RETURN_IF_ERROR_AT(EvaluateTensorMap(*map, variant_, buffers_, &out_.maps[out_.places[i]]), "param ", i);
      } else {
        const auto& record = std::get<RecordParam>(launch.params[i]);
        out_.places[i] = static_cast<uint16_t>(num_bytes);
        num_bytes += record.size;
        FA4_RETURN_IF_ERROR_AT(EvaluateRecord(record, out_.bytes + out_.places[i]), "param ", i);
      }
    }
    return {};
  }

 private:
  Status EvaluateGrid(const Launch& launch) {
    bool divisible = true;
    for (size_t i = 0; i < 3; ++i) {
      const int64_t limit = i == 0 ? kGridLimitX : kGridLimitYZ;
      int64_t extent = 0;
      FA4_RETURN_IF_ERROR_AT(jax_fa4::Evaluate(launch.grid[i], buffers_, &extent), "grid[", i, "]");
      if (extent < 0 || extent > limit) {
        return Status::Invalid("grid[", i, "] must be in [0, ", limit, "], got ", extent);
      }
      out_.grid[i] = static_cast<uint32_t>(extent);
      divisible &= extent % launch.cluster[i] == 0;
    }
    if (divisible) return {};
    return Status::Invalid("grid (", out_.grid[0], ", ", out_.grid[1], ", ", out_.grid[2],
                           ") must be a multiple of cluster (", int{launch.cluster[0]}, ", ", int{launch.cluster[1]},
                           ", ", int{launch.cluster[2]}, ")");
  }

  Status EvaluateRecord(const RecordParam& record, unsigned char* bytes) {
    std::memset(bytes, 0, record.size);
    for (const Field& field : record.fields) {
      unsigned char* place = bytes + field.offset;
      const auto* pointer = std::get_if<PointerValue>(&field.value);
      Status status = pointer != nullptr ? EvaluatePointer(*pointer, place)
                                         : EvaluateScalar(std::get<ScalarValue>(field.value), place);
      if (!status.ok() && record.fields.size() > 1) return status.At("field at byte ", field.offset);
      if (!status.ok()) return status;
    }
    return {};
  }

  Status EvaluatePointer(const PointerValue& pointer, unsigned char* place) {
    const Buffer& buffer = buffers_.items[pointer.buffer];
    const std::string& name = variant_.buffers[pointer.buffer].name;
    int64_t offset = 0, extent = 0;
    FA4_RETURN_IF_ERROR_AT(jax_fa4::Evaluate(pointer.offset, buffers_, &offset), "pointer to ", name, ": offset");
    if (pointer.extent.has_value()) {
      FA4_RETURN_IF_ERROR_AT(jax_fa4::Evaluate(*pointer.extent, buffers_, &extent), "pointer to ", name, ": extent");
    }
    if (offset < 0 || offset > buffer.bytes || extent < 0 || extent > buffer.bytes - offset) {
      return Status::Invalid("pointer to ", name, ": ", extent, " bytes from byte ", offset, " are not inside its ",
                             buffer.bytes, " bytes");
    }
    const auto address = reinterpret_cast<uintptr_t>(buffer.data) + static_cast<uintptr_t>(offset);
    if (buffer.bytes > 0 && (buffer.data == nullptr || address % pointer.align != 0)) {
      return Status::Invalid("pointer to ", name, ": its address must be a multiple of ", pointer.align, ", got ",
                             address);
    }
    std::memcpy(place, &address, sizeof(address));
    return {};
  }

  Status EvaluateScalar(const ScalarValue& scalar, unsigned char* place) {
    if (scalar.type == ScalarType::kF32) {
      std::memcpy(place, &scalar.constant, sizeof(scalar.constant));
      return {};
    }
    int64_t value = 0;
    FA4_RETURN_IF_ERROR_AT(jax_fa4::Evaluate(scalar.value, buffers_, &value), "scalar");
    switch (scalar.type) {
      case ScalarType::kI32:
        return StoreScalar<int32_t>("i32", value, place);
      case ScalarType::kU32:
        return StoreScalar<uint32_t>("u32", value, place);
      default:
        return StoreScalar<int64_t>("i64", value, place);
    }
  }

  template <typename T>
  static Status StoreScalar(const char* type, int64_t value, unsigned char* place) {
    if (value < int64_t{std::numeric_limits<T>::min()} || value > int64_t{std::numeric_limits<T>::max()}) {
      return Status::Invalid("scalar: ", value, " does not fit ", type);
    }
    const auto stored = static_cast<T>(value);
    std::memcpy(place, &stored, sizeof(stored));
    return {};
  }

  const Variant& variant_;
  const Buffers& buffers_;
  EvaluatedLaunch& out_;
};

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

size_t FillAttributes(const Launch& launch, CuLaunchAttribute* attributes) {
  size_t count = 0;
  if (launch.cluster[0] > 1 || launch.cluster[1] > 1 || launch.cluster[2] > 1) {
    attributes[count].id = kLaunchClusterDimension;
    std::copy(launch.cluster.begin(), launch.cluster.end(), attributes[count].value.cluster);
    ++count;
  }
  if (launch.programmatic) {
    attributes[count].id = kLaunchProgrammaticStreamSerialization;
    attributes[count].value.programmatic_stream_serialization = 1;
    ++count;
  }
  return count;
}

Status Send(const Driver& driver, const Launch& launch, CuKernel kernel, EvaluatedLaunch* evaluated, CuStream stream) {
  CuTensorMap maps[kMaxTensorMaps];
  void* params[kMaxParams];
  for (size_t i = 0; i < launch.params.size(); ++i) {
    const uint16_t place = evaluated->places[i];
    if (std::holds_alternative<TensorMapParam>(launch.params[i])) {
      FA4_RETURN_IF_ERROR_AT(EncodeTensorMap(driver, evaluated->maps[place], &maps[place]), "param ", i);
      params[i] = &maps[place];
    } else {
      params[i] = evaluated->bytes + place;
    }
  }
  CuLaunchAttribute attributes[2] = {};
  CuLaunchConfig config = {};
  std::copy(evaluated->grid, evaluated->grid + 3, config.grid);
  config.block[0] = launch.block;
  config.block[1] = config.block[2] = 1;
  config.smem_bytes = launch.smem_bytes;
  config.stream = stream;
  config.attributes = attributes;
  config.num_attributes = static_cast<uint32_t>(FillAttributes(launch, attributes));
  return driver.Check(driver.cuLaunchKernelEx(&config, kernel, params, nullptr), "cuLaunchKernelEx");
}

// What a message about a failed launch starts with.
std::string Describe(const Launch& launch, const EvaluatedLaunch& evaluated) {
  return Text("launch of ", launch.entry, " with grid (", evaluated.grid[0], ", ", evaluated.grid[1], ", ",
              evaluated.grid[2], "), block ", launch.block, ", cluster (", int{launch.cluster[0]}, ", ",
              int{launch.cluster[1]}, ", ", int{launch.cluster[2]}, "), ", launch.smem_bytes,
              " bytes of shared memory");
}

// A call without a byte in any buffer has nothing to read or write, nor a place for its tensor maps.
bool IsEmpty(const Buffers& buffers) {
  return std::all_of(buffers.items, buffers.items + buffers.size(), [](const Buffer& b) { return b.bytes == 0; });
}

}  // namespace

Status PrepareDevice(const Driver& driver, const Plan& plan, std::string_view images, int ordinal,
                     DeviceKernels* prepared) {
  CuDevice device = 0;
  int major = 0, minor = 0;
  FA4_RETURN_IF_ERROR_AT(driver.Check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet"), "device ", ordinal);
  FA4_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGetAttribute(&major, kDeviceCapabilityMajor, device),
                                   "cuDeviceGetAttribute(COMPUTE_CAPABILITY_MAJOR)"));
  FA4_RETURN_IF_ERROR(driver.Check(driver.cuDeviceGetAttribute(&minor, kDeviceCapabilityMinor, device),
                                   "cuDeviceGetAttribute(COMPUTE_CAPABILITY_MINOR)"));
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
  return {};
}

Status EvaluatePlan(const Variant& variant, Buffers* buffers, EvaluatedPlan* evaluated) {
  FA4_RETURN_IF_ERROR(CheckBuffers(variant, buffers));
  const bool empty = IsEmpty(*buffers);
  for (size_t i = 0; i < variant.launches.size(); ++i) {
    const Launch& launch = variant.launches[i];
    EvaluatedLaunch* out = &evaluated->launches[i];
    if (empty) {
      std::fill_n(out->grid, 3, 0U);
      continue;
    }
    FA4_RETURN_IF_ERROR_AT(LaunchEvaluator(variant, *buffers, out).Evaluate(launch), launch.entry);
  }
  return {};
}

Status RunPlan(const Driver& driver, const DeviceKernels& prepared, Buffers* buffers, CuStream stream) {
  EvaluatedPlan evaluated;
  FA4_RETURN_IF_ERROR(EvaluatePlan(*prepared.variant, buffers, &evaluated));
  for (size_t i = 0; i < prepared.variant->launches.size(); ++i) {
    const Launch& launch = prepared.variant->launches[i];
    EvaluatedLaunch& out = evaluated.launches[i];
    if (out.launches_nothing()) continue;
    FA4_RETURN_IF_ERROR_AT(Send(driver, launch, prepared.kernels[i], &out, stream), Describe(launch, out));
  }
  return {};
}

}  // namespace jax_fa4

#include "ready.h"

#include <algorithm>
#include <cstring>

namespace jax_fa4 {
namespace {

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

// What a message about a failed launch starts with.
std::string Describe(const Launch& launch, const uint32_t* grid) {
  return Text("launch of ", launch.entry, " with grid (", grid[0], ", ", grid[1], ", ", grid[2], "), block ",
              launch.block, ", cluster (", int{launch.cluster[0]}, ", ", int{launch.cluster[1]}, ", ",
              int{launch.cluster[2]}, "), ", launch.smem_bytes, " bytes of shared memory");
}

}  // namespace

Signature Signature::Of(const Buffers& buffers) {
  Signature signature;
  size_t count = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& buffer = buffers.items[i];
    if (count + 2 + static_cast<size_t>(buffer.rank) > kCapacity) return signature;
    signature.words_[count++] = static_cast<int64_t>(reinterpret_cast<intptr_t>(buffer.data));
    signature.words_[count++] = buffer.dtype * int64_t{256} + buffer.rank;
    std::copy_n(buffer.dims, buffer.rank, signature.words_ + count);
    count += static_cast<size_t>(buffer.rank);
  }
  signature.count_ = count;
  return signature;
}

bool Signature::operator==(const Signature& other) const {
  return count_ > 0 && count_ == other.count_ && std::equal(words_, words_ + count_, other.words_);
}

ReadyPlan::ReadyPlan(const Variant& variant) : launches_(variant.launches.size()) {
  for (size_t i = 0; i < launches_.size(); ++i) {
    size_t num_maps = 0, num_bytes = 0;
    for (const auto& param : variant.launches[i].params) {
      const auto* record = std::get_if<RecordParam>(&param);
      if (record == nullptr) {
        ++num_maps;
      } else {
        num_bytes += record->size;
      }
    }
    launches_[i].maps.resize(num_maps);
    launches_[i].bytes.resize(num_bytes);
    launches_[i].params.resize(variant.launches[i].params.size());
  }
}

Status ReadyPlan::Make(const Driver& driver, const Variant& variant, const Signature& signature, Buffers* buffers) {
  signature_ = Signature();  // equals nothing until all is well
  EvaluatedPlan evaluated;
  FA4_RETURN_IF_ERROR(EvaluatePlan(variant, buffers, &evaluated));
  for (size_t i = 0; i < launches_.size(); ++i) {
    const Launch& launch = variant.launches[i];
    const EvaluatedLaunch& from = evaluated.launches[i];
    One& one = launches_[i];
    std::copy(from.grid, from.grid + 3, one.grid);
    if (from.launches_nothing()) continue;
    std::copy_n(from.bytes, one.bytes.size(), one.bytes.begin());
    for (size_t p = 0; p < launch.params.size(); ++p) {
      const uint16_t place = from.places[p];
      if (std::holds_alternative<TensorMapParam>(launch.params[p])) {
        FA4_RETURN_IF_ERROR_AT(EncodeTensorMap(driver, from.maps[place], &one.maps[place]), Describe(launch, one.grid),
                               ": param ", p);
        one.params[p] = &one.maps[place];
      } else {
        one.params[p] = one.bytes.data() + place;
      }
    }
  }
  signature_ = signature;
  return {};
}

Status ReadyPlan::Send(const Driver& driver, const Variant& variant, const CuKernel* kernels, CuStream stream) {
  for (size_t i = 0; i < launches_.size(); ++i) {
    const Launch& launch = variant.launches[i];
    One& one = launches_[i];
    if (one.grid[0] == 0 || one.grid[1] == 0 || one.grid[2] == 0) continue;
    CuLaunchAttribute attributes[2] = {};
    CuLaunchConfig config = {};
    std::copy(one.grid, one.grid + 3, config.grid);
    config.block[0] = launch.block;
    config.block[1] = config.block[2] = 1;
    config.smem_bytes = launch.smem_bytes;
    config.stream = stream;
    config.attributes = attributes;
    config.num_attributes = static_cast<uint32_t>(FillAttributes(launch, attributes));
    const CuResult result = driver.cuLaunchKernelEx(&config, kernels[i], one.params.data(), nullptr);
    FA4_RETURN_IF_ERROR_AT(driver.Check(result, "cuLaunchKernelEx"), Describe(launch, one.grid));
  }
  return {};
}

}  // namespace jax_fa4

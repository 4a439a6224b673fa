#include "launch.h"

#include <algorithm>
#include <cstring>
#include <limits>

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

// A call without a byte in any buffer has nothing to read or write, nor a place for its tensor maps.
bool IsEmpty(const Buffers& buffers) {
  return std::all_of(buffers.items, buffers.items + buffers.size(), [](const Buffer& b) { return b.bytes == 0; });
}

}  // namespace

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

}  // namespace jax_fa4

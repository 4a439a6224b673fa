#include "tensor_map.h"

#include <algorithm>
#include <limits>

namespace jax_fa4 {
namespace {

__extension__ using Int128 = __int128;

bool IsAligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kTensorAlign == 0; }

// A place for maps without elements. Results come first: a kernel that wrote there by mistake would spoil no input.
void* StandIn(const Buffers& buffers) {
  for (size_t i = buffers.size(); i-- > 0;) {
    const Buffer& buffer = buffers.items[i];
    if (buffer.data != nullptr && buffer.bytes >= kTensorAlign && IsAligned(buffer.data)) return buffer.data;
  }
  return nullptr;
}

Status MakeSingleElement(const Buffers& buffers, TensorMapFields* fields) {
  fields->address = StandIn(buffers);
  if (fields->address == nullptr) return Status::Invalid("it is empty, and no buffer of the call can stand in for it");
  std::fill_n(fields->dims, fields->rank, uint64_t{1});
  std::fill_n(fields->strides, fields->rank - 1, static_cast<uint64_t>(kTensorAlign));
  return {};
}

Status EvaluateDims(const TensorMapParam& param, const Buffers& buffers, TensorMapFields* fields) {
  for (size_t i = 0; i < param.dims.size(); ++i) {
    int64_t dim = 0;
    FA4_RETURN_IF_ERROR_AT(Evaluate(param.dims[i], buffers, &dim), "dims[", i, "]");
    if (dim < 0 || dim > kTensorDimLimit) return Status::Invalid("dims[", i, "] must be in [0, 2^32], got ", dim);
    fields->dims[i] = static_cast<uint64_t>(dim);
  }
  return {};
}

Status EvaluateStrides(const TensorMapParam& param, const Buffers& buffers, TensorMapFields* fields) {
  for (size_t i = 0; i < param.strides.size(); ++i) {
    int64_t stride = 0;
    FA4_RETURN_IF_ERROR_AT(Evaluate(param.strides[i], buffers, &stride), "strides[", i, "]");
    if (stride < 0 || stride >= kTensorStrideLimit || stride % kTensorAlign != 0) {
      return Status::Invalid("strides[", i, "] must be a multiple of 16 in [0, 2^40), got ", stride);
    }
    fields->strides[i] = static_cast<uint64_t>(stride);
  }
  return {};
}

Status CheckReach(const TensorMapFields& fields, const Buffer& buffer, int64_t offset) {
  if (offset < 0) return Status::Invalid("offset must be >= 0, got ", offset);
  Int128 reach = Int128{offset} + Int128{fields.dims[0]} * fields.dtype->itemsize;  // each product is below 2^72
  for (uint32_t i = 1; i < fields.rank; ++i) reach += Int128{fields.dims[i] - 1} * fields.strides[i - 1];
  if (reach > buffer.bytes) {
    const auto shown = static_cast<int64_t>(std::min<Int128>(reach, std::numeric_limits<int64_t>::max()));
    return Status::Invalid("its elements reach byte ", shown, " of a buffer of ", buffer.bytes, " bytes");
  }
  return {};
}

}  // namespace

Status EvaluateTensorMap(const TensorMapParam& param, const Variant& variant, const Buffers& buffers,
                         TensorMapFields* fields) {
  const Buffer& buffer = buffers.items[param.buffer];
  fields->dtype = param.dtype;
  fields->rank = static_cast<uint32_t>(param.dims.size());
  fields->swizzle = param.swizzle;
  fields->l2_promotion = param.l2_promotion;
  std::copy(param.box.begin(), param.box.end(), fields->box);
  const std::string& name = variant.buffers[param.buffer].name;
  FA4_RETURN_IF_ERROR_AT(EvaluateDims(param, buffers, fields), "tensor map of ", name);
  const bool empty = buffer.bytes == 0 || std::count(fields->dims, fields->dims + fields->rank, uint64_t{0}) > 0;
  if (empty) {
    FA4_RETURN_IF_ERROR_AT(MakeSingleElement(buffers, fields), "tensor map of ", name);
    return {};
  }
  int64_t offset = 0;
  FA4_RETURN_IF_ERROR_AT(EvaluateStrides(param, buffers, fields), "tensor map of ", name);
  FA4_RETURN_IF_ERROR_AT(Evaluate(param.offset, buffers, &offset), "tensor map of ", name, ": offset");
  FA4_RETURN_IF_ERROR_AT(CheckReach(*fields, buffer, offset), "tensor map of ", name);
  fields->address = static_cast<char*>(buffer.data) + offset;
  if (buffer.data == nullptr || !IsAligned(fields->address)) {
    return Status::Invalid("tensor map of ", name, ": its address must be a multiple of 16, got ", fields->address);
  }
  return {};
}

Status EncodeTensorMap(const Driver& driver, const TensorMapFields& fields, CuTensorMap* map) {
  constexpr uint32_t kOnes[kTensorRankLimit] = {1, 1, 1, 1, 1};
  // CUtensorMapSwizzle and CUtensorMapL2promotion count 0, 1, 2, 3 for nothing and each power of two from the first.
  const int32_t swizzle = fields.swizzle == 0 ? 0 : __builtin_ctz(fields.swizzle) - 4;
  const int32_t l2_promotion = fields.l2_promotion == 0 ? 0 : __builtin_ctz(fields.l2_promotion) - 5;
  const CuResult result = driver.cuTensorMapEncodeTiled(
      map, fields.dtype->tensor_map, fields.rank, fields.address, fields.dims, fields.strides, fields.box, kOnes,
      /*interleave=*/0, swizzle, l2_promotion, /*fill=*/0);
  return driver.Check(result, "cuTensorMapEncodeTiled");
}

}  // namespace jax_fa4

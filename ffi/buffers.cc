#include "buffers.h"

#include <algorithm>
#include <string>

namespace jax_fa4 {
namespace {

std::string ShapeText(const int64_t* dims, int64_t rank) {
  std::string text = "[";
  for (int64_t i = 0; i < rank; ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

// How messages name a buffer: "operand 1 (k)".
std::string Name(const Variant& variant, size_t index) {
  return Text(variant.Role(index), " ", variant.Number(index), " (", variant.buffers[index].name, ")");
}

Status CheckCount(const char* what, size_t expected, size_t got) {
  return expected == got ? Status() : Status::Invalid("the plan has ", expected, " ", what, ", the call ", got);
}

Status CheckDtypeAndRank(const BufferSpec& spec, const Buffer& buffer) {
  if (buffer.dtype != spec.dtype->code) {
    const Dtype* dtype = FindDtype(buffer.dtype);
    return dtype == nullptr ? Status::Invalid("dtype must be ", spec.dtype->name, ", got XLA's type ", buffer.dtype)
                            : Status::Invalid("dtype must be ", spec.dtype->name, ", got ", dtype->name);
  }
  const auto rank = static_cast<int64_t>(spec.min_rank());
  if (buffer.rank < rank || (!spec.batched && buffer.rank != rank)) {
    return Status::Invalid("rank must be ", spec.batched ? ">= " : "", rank, ", got ", buffer.rank);
  }
  return {};
}

Status MeasureBytes(const BufferSpec& spec, Buffer* buffer) {
  int64_t bytes = spec.dtype->itemsize;
  bool overflow = false;
  for (int64_t i = 0; i < buffer->rank; ++i) {
    if (buffer->dims[i] < 0) return Status::Invalid("axis ", i, " must be >= 0, got ", buffer->dims[i]);
    overflow |= __builtin_mul_overflow(bytes, buffer->dims[i], &bytes);
  }
  if (overflow) return Status::Invalid("shape ", ShapeText(buffer->dims, buffer->rank), " has too many bytes");
  buffer->bytes = bytes;
  return {};
}

// Compares the buffers' sizes with the plan's: exact ones, those of one name, and the batch axes.
class SizeChecker {
 public:
  SizeChecker(const Variant& variant, const Buffers& buffers) : variant_(variant), buffers_(buffers) {
    std::fill_n(first_of_, 256, kNone);
  }

  Status Check(size_t index) {
    const BufferSpec& spec = variant_.buffers[index];
    const Buffer& buffer = buffers_.items[index];
    const int64_t lead = buffer.rank - static_cast<int64_t>(spec.tail.size());
    for (size_t i = 0; i < spec.tail.size(); ++i) {
      FA4_RETURN_IF_ERROR(CheckAxis(spec.tail[i], index, lead + static_cast<int64_t>(i)));
    }
    return spec.batched ? CheckLead(index, lead) : Status();
  }

 private:
  static constexpr int16_t kNone = -1;

  Status CheckAxis(const Axis& axis, size_t index, int64_t position) {
    const int64_t size = buffers_.items[index].dims[position];
    if (axis.kind == Axis::Kind::kExact && size != axis.size) {
      return Status::Invalid("axis ", position, " must be ", axis.size, ", got ", size);
    }
    if (axis.kind != Axis::Kind::kNamed) return {};
    if (first_of_[axis.symbol] == kNone) {
      first_of_[axis.symbol] = static_cast<int16_t>(index);
      sizes_[axis.symbol] = size;
    } else if (sizes_[axis.symbol] != size) {
      return Status::Invalid("axis ", position, " (", variant_.symbols[axis.symbol], ") must be ", sizes_[axis.symbol],
                             " as in ", Name(variant_, static_cast<size_t>(first_of_[axis.symbol])), ", got ", size);
    }
    return {};
  }

  Status CheckLead(size_t index, int64_t lead) {
    const Buffer& buffer = buffers_.items[index];
    if (batched_ == kNone) {
      batched_ = static_cast<int16_t>(index);
      lead_ = lead;
      return {};
    }
    const Buffer& first = buffers_.items[batched_];
    if (lead != lead_ || !std::equal(first.dims, first.dims + lead, buffer.dims)) {
      return Status::Invalid("leading axes must be ", ShapeText(first.dims, lead_), " as in ",
                             Name(variant_, static_cast<size_t>(batched_)), ", got ", ShapeText(buffer.dims, lead));
    }
    return {};
  }

  const Variant& variant_;
  const Buffers& buffers_;
  int16_t first_of_[256];  // the first buffer with an axis of that name
  int64_t sizes_[256];
  int16_t batched_ = kNone;  // the first batched buffer
  int64_t lead_ = 0;
};

// left / right, towards minus or plus infinity, for a positive divisor.
int64_t Divide(int64_t left, int64_t right, bool up) {
  const int64_t quotient = left / right, rest = left % right;  // towards zero, the rest has the sign of `left`
  return quotient + (up ? (rest > 0 ? 1 : 0) : (rest < 0 ? -1 : 0));
}

// False where the result does not fit or a divisor is not positive.
bool Apply(OpCode code, int64_t left, int64_t right, int64_t* out) {
  switch (code) {
    case OpCode::kAdd:
      return !__builtin_add_overflow(left, right, out);
    case OpCode::kSub:
      return !__builtin_sub_overflow(left, right, out);
    case OpCode::kMul:
      return !__builtin_mul_overflow(left, right, out);
    case OpCode::kFloorDiv:
    case OpCode::kCeilDiv:
      if (right <= 0) return false;
      *out = Divide(left, right, code == OpCode::kCeilDiv);
      return true;
    case OpCode::kMin:
      *out = std::min(left, right);
      return true;
    default:  // kMax: the parser lets no other code through
      *out = std::max(left, right);
      return true;
  }
}

Status ApplyError(OpCode code, int64_t left, int64_t right) {
  if (code == OpCode::kFloorDiv || code == OpCode::kCeilDiv) {
    return Status::Invalid("cannot divide ", left, " by ", right, ": a divisor must be positive");
  }
  return Status::Invalid("an operation on ", left, " and ", right, " does not fit an int64");
}

// The product of all sizes before the last `count`. False where it does not fit, which CheckBuffers leaves possible
// only for a buffer without elements.
bool Lead(const Buffer& buffer, int64_t count, int64_t* product) {
  bool fits = true;
  *product = 1;
  for (int64_t i = 0; i < buffer.rank - count; ++i) fits &= !__builtin_mul_overflow(*product, buffer.dims[i], product);
  return fits;
}

}  // namespace

Status CheckBuffers(const Variant& variant, Buffers* buffers) {
  FA4_RETURN_IF_ERROR(CheckCount("operands", variant.num_operands, buffers->num_operands));
  FA4_RETURN_IF_ERROR(CheckCount("results", variant.buffers.size() - variant.num_operands, buffers->num_results));
  SizeChecker sizes(variant, *buffers);
  for (size_t i = 0; i < variant.buffers.size(); ++i) {
    FA4_RETURN_IF_ERROR_AT(CheckDtypeAndRank(variant.buffers[i], buffers->items[i]), Name(variant, i));
    FA4_RETURN_IF_ERROR_AT(MeasureBytes(variant.buffers[i], &buffers->items[i]), Name(variant, i));
    FA4_RETURN_IF_ERROR_AT(sizes.Check(i), Name(variant, i));
  }
  return {};
}

Status Evaluate(const Expr& expr, const Buffers& buffers, int64_t* value) {
  int64_t stack[kMaxExprDepth];
  size_t depth = 0;
  for (const Op& op : expr) {
    const Buffer& buffer = buffers.items[op.buffer];
    switch (op.code) {
      case OpCode::kConst:
        stack[depth++] = op.value;
        break;
      case OpCode::kDim:
        stack[depth++] = buffer.dims[buffer.rank - op.axis];
        break;
      case OpCode::kLead:
        if (!Lead(buffer, op.axis, &stack[depth++])) {
          return Status::Invalid("the product of leading axes does not fit an int64");
        }
        break;
      case OpCode::kMultiprocessors:
        stack[depth++] = buffers.multiprocessors;
        break;
      default: {
        const int64_t left = stack[depth - 2], right = stack[depth - 1];
        depth -= 1;
        if (!Apply(op.code, left, right, &stack[depth - 1])) return ApplyError(op.code, left, right);
      }
    }
  }
  *value = stack[0];
  return {};
}

}  // namespace jax_fa4

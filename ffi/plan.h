// A launch plan in memory: immutable once parsed, and valid as far as it can be known without the buffers.
#ifndef JAX_FA4_FFI_PLAN_H_
#define JAX_FA4_FFI_PLAN_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "dtype.h"
#include "limits.h"
#include "status.h"

namespace jax_fa4 {

using Key = std::array<uint8_t, 32>;  // of a cubin

std::string Hex(const Key& key);
std::optional<Key> ParseHex(std::string_view hex);

// Operations of a stack machine over int64, in the order of their codes in the plan.
enum class OpCode : uint8_t {
  kConst, kDim, kLead, kAdd, kSub, kMul, kFloorDiv, kCeilDiv, kMin, kMax, kMultiprocessors
};

struct Op {
  OpCode code = OpCode::kConst;
  uint8_t buffer = 0;  // kDim, kLead
  uint8_t axis = 0;    // kDim: 1 is the last axis; kLead: how many of the last axes are left out
  int64_t value = 0;   // kConst
};

using Expr = std::vector<Op>;  // postfix; its stack never underflows, ends with one value, stays below kMaxExprDepth

// One axis of a buffer after its batch.
struct Axis {
  enum class Kind : uint8_t { kAny, kExact, kNamed };
  Kind kind = Kind::kAny;
  int64_t size = 0;    // kExact
  uint8_t symbol = 0;  // kNamed: index into Variant::symbols
};

struct BufferSpec {
  std::string name;
  const Dtype* dtype = nullptr;
  bool batched = false;    // one or more leading axes, equal among all batched buffers
  std::vector<Axis> tail;  // the axes after them

  size_t min_rank() const { return tail.size() + (batched ? 1 : 0); }
};

// A CUtensorMap over one buffer; innermost axis first.
struct TensorMapParam {
  uint8_t buffer = 0;
  const Dtype* dtype = nullptr;
  std::vector<Expr> dims;     // elements
  std::vector<Expr> strides;  // bytes, of all axes but the innermost
  std::vector<uint16_t> box;  // elements
  uint8_t swizzle = 0;        // bytes: 0, 32, 64, 128
  uint16_t l2_promotion = 0;  // bytes: 0, 64, 128, 256
  Expr offset;                // bytes
};

struct PointerValue {
  uint8_t buffer = 0;
  uint16_t align = 1;  // bytes
  Expr offset;         // bytes
  std::optional<Expr> extent;
};

enum class ScalarType : uint8_t { kI32, kU32, kI64, kF32 };

struct ScalarValue {
  ScalarType type = ScalarType::kI32;
  Expr value;          // all but kF32
  float constant = 0;  // kF32
};

struct Field {
  uint16_t offset = 0;  // bytes
  std::variant<PointerValue, ScalarValue> value;

  size_t size() const;  // bytes
};

// A parameter by value; a lone pointer or scalar is a struct of one field.
struct RecordParam {
  uint16_t size = 0;  // bytes
  std::vector<Field> fields;
};

using Param = std::variant<TensorMapParam, RecordParam>;

struct Launch {
  Key key{};
  std::string entry;
  std::array<Expr, 3> grid;
  uint16_t block = 0;                  // threads
  std::array<uint8_t, 3> cluster{};    // CTAs
  uint32_t smem_bytes = 0;             // dynamic
  bool programmatic = false;           // may overlap with the launch before it
  std::vector<Param> params;
};

struct Arch {
  std::string name;  // "sm_90a"
  int major = 0, minor = 0;
  char suffix = 0;  // 'a': only this capability; 'f': its family from `minor` on; 0: the major version from `minor` on

  bool RunsOn(int device_major, int device_minor) const;
};

// What the call does on devices of one architecture.
struct Variant {
  Arch arch;
  std::vector<std::string> symbols;  // names of sizes
  size_t num_operands = 0;
  std::vector<BufferSpec> buffers;  // operands, then results
  std::vector<Launch> launches;

  const char* Role(size_t buffer) const { return buffer < num_operands ? "operand" : "result"; }
  size_t Number(size_t buffer) const { return buffer < num_operands ? buffer : buffer - num_operands; }
};

struct Plan {
  std::vector<Variant> variants;

  // The first variant that runs on a device of this compute capability, or null.
  const Variant* For(int major, int minor) const;
  std::string Archs() const;
};

// Parses the `plan` attribute, whose format jax_fa4/plan/encode.py describes.
Status ParsePlan(std::string_view bytes, Plan* plan);

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_PLAN_H_

#include "plan.h"

#include <algorithm>

#include "reader.h"

namespace jax_fa4 {
namespace {

constexpr std::string_view kMagic = "FA4P";
constexpr uint16_t kVersion = 1;
constexpr uint8_t kAnyAxis = 255;
enum ParamKind : uint8_t { kTensorMap, kPointer, kScalar, kRecord };

// Reads one variant; the buffers come first in the bytes, so later parts can be checked against them.
class VariantParser {
 public:
  VariantParser(Reader* reader, Variant* variant) : reader_(*reader), variant_(*variant) {}

  Status Parse() {
    FA4_RETURN_IF_ERROR(ParseArch());
    FA4_RETURN_IF_ERROR(ParseSymbols());
    FA4_RETURN_IF_ERROR(ParseBuffers());
    uint8_t count = 0;
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("number of launches", 0, kMaxLaunches, &count));
    variant_.launches.resize(count);
    for (size_t i = 0; i < count; ++i) {
      FA4_RETURN_IF_ERROR_AT(ParseLaunch(&variant_.launches[i]), "launch ", i);
    }
    return {};
  }

 private:
  Status ParseArch() {
    Arch& arch = variant_.arch;
    FA4_RETURN_IF_ERROR(reader_.String("arch", kMaxName, &arch.name));
    std::string_view digits = arch.name;
    const bool known = digits.substr(0, 3) == "sm_";
    digits.remove_prefix(known ? 3 : 0);
    if (!digits.empty() && (digits.back() == 'a' || digits.back() == 'f')) {
      arch.suffix = digits.back();
      digits.remove_suffix(1);
    }
    const bool numeric = std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (!known || !numeric || digits.size() < 2 || digits.size() > 3) {
      return Status::Invalid("arch must be like sm_90a, got ", arch.name);
    }
    for (char c : digits.substr(0, digits.size() - 1)) arch.major = 10 * arch.major + (c - '0');
    arch.minor = digits.back() - '0';
    return {};
  }

  Status ParseSymbols() {
    uint8_t count = 0;
    FA4_RETURN_IF_ERROR(reader_.Number("number of symbols", &count));
    variant_.symbols.resize(count);
    for (std::string& symbol : variant_.symbols) FA4_RETURN_IF_ERROR(reader_.String("symbol", kMaxName, &symbol));
    return {};
  }

  Status ParseBuffers() {
    uint8_t operands = 0, results = 0;
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("number of operands", 0, kMaxBuffers, &operands));
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("number of results", 0, kMaxBuffers, &results));
    const size_t count = size_t{operands} + results;
    if (count > kMaxBuffers) return Status::Invalid("number of buffers must be <= ", kMaxBuffers, ", got ", count);
    variant_.num_operands = operands;
    variant_.buffers.resize(count);
    for (size_t i = 0; i < count; ++i) {
      FA4_RETURN_IF_ERROR_AT(ParseBuffer(&variant_.buffers[i]), variant_.Role(i), " ", variant_.Number(i));
    }
    return {};
  }

  Status ParseBuffer(BufferSpec* spec) {
    uint8_t rank = 0;
    FA4_RETURN_IF_ERROR(reader_.String("name", kMaxName, &spec->name));
    FA4_RETURN_IF_ERROR(ParseDtype(&spec->dtype));
    FA4_RETURN_IF_ERROR(reader_.Flag("batched", &spec->batched));
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("number of axes", 0, kMaxTail, &rank));
    spec->tail.resize(rank);
    for (Axis& axis : spec->tail) FA4_RETURN_IF_ERROR(ParseAxis(&axis));
    return {};
  }

  Status ParseDtype(const Dtype** dtype) {
    uint8_t code = 0;
    FA4_RETURN_IF_ERROR(reader_.Number("dtype", &code));
    *dtype = FindDtype(code);
    if (*dtype == nullptr) return Status::Invalid("dtype: XLA's type ", int{code}, " is not supported");
    return {};
  }

  Status ParseAxis(Axis* axis) {
    uint8_t kind = 0;
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("kind of an axis", 0, 2, &kind));
    axis->kind = static_cast<Axis::Kind>(kind);
    if (axis->kind == Axis::Kind::kExact) {
      FA4_RETURN_IF_ERROR(reader_.Varint("size of an axis", &axis->size));
      if (axis->size < 0) return Status::Invalid("size of an axis must be >= 0, got ", axis->size);
    } else if (axis->kind == Axis::Kind::kNamed) {
      FA4_RETURN_IF_ERROR(reader_.Number("symbol of an axis", &axis->symbol));
      if (axis->symbol >= variant_.symbols.size()) {
        return Status::Invalid("symbol of an axis must be < ", variant_.symbols.size(), ", got ", int{axis->symbol});
      }
    }
    return {};
  }

  Status ParseLaunch(Launch* launch) {
    std::string_view key;
    FA4_RETURN_IF_ERROR(reader_.Bytes("key", launch->key.size(), &key));
    std::copy(key.begin(), key.end(), launch->key.begin());
    FA4_RETURN_IF_ERROR(reader_.String("entry", kMaxEntry, &launch->entry));
    FA4_RETURN_IF_ERROR_AT(ParseGeometry(launch), launch->entry);
    uint8_t count = 0;
    FA4_RETURN_IF_ERROR_AT(reader_.Number<uint8_t>("number of params", 0, kMaxParams, &count), launch->entry);
    launch->params.resize(count);
    for (size_t i = 0; i < count; ++i) {
      FA4_RETURN_IF_ERROR_AT(ParseParam(&launch->params[i]), launch->entry, ": param ", i);
    }
    FA4_RETURN_IF_ERROR_AT(CheckStorage(*launch), launch->entry);
    return {};
  }

  Status ParseGeometry(Launch* launch) {
    for (size_t i = 0; i < 3; ++i) FA4_RETURN_IF_ERROR_AT(ParseExpr(&launch->grid[i]), "grid[", i, "]");
    FA4_RETURN_IF_ERROR(reader_.Number<uint16_t>("block", 1, kBlockLimit, &launch->block));
    uint32_t ctas = 1;
    for (uint8_t& extent : launch->cluster) {
      FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("cluster", 1, kClusterLimit, &extent));
      ctas *= extent;
    }
    if (ctas > kClusterLimit) return Status::Invalid("cluster must have <= ", kClusterLimit, " CTAs, got ", ctas);
    FA4_RETURN_IF_ERROR(reader_.Number<uint32_t>("smem_bytes", 0, kSmemLimit, &launch->smem_bytes));
    return reader_.Flag("programmatic", &launch->programmatic);
  }

  static Status CheckStorage(const Launch& launch) {
    size_t maps = 0, bytes = 0;
    for (const Param& param : launch.params) {
      const auto* record = std::get_if<RecordParam>(&param);
      maps += record == nullptr;
      bytes += record == nullptr ? 0 : record->size;
    }
    if (maps > kMaxTensorMaps) {
      return Status::Invalid("number of tensor maps must be <= ", kMaxTensorMaps, ", got ", maps);
    }
    if (bytes > kMaxParamBytes) {
      return Status::Invalid("params without tensor maps must have <= ", kMaxParamBytes, " bytes, got ", bytes);
    }
    return {};
  }

  Status ParseParam(Param* param) {
    uint8_t kind = 0;
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("kind", kTensorMap, kRecord, &kind));
    if (kind == kTensorMap) return ParseTensorMap(&param->emplace<TensorMapParam>());
    auto& record = param->emplace<RecordParam>();
    if (kind == kRecord) return ParseRecord(&record);
    record.fields.resize(1);
    FA4_RETURN_IF_ERROR(ParseValue(kind, &record.fields[0]));
    record.size = static_cast<uint16_t>(record.fields[0].size());
    return {};
  }

  Status ParseRecord(RecordParam* record) {
    uint8_t count = 0;
    FA4_RETURN_IF_ERROR(reader_.Number<uint16_t>("size", 1, kMaxParamBytes, &record->size));
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("number of fields", 0, kMaxParams, &count));
    record->fields.resize(count);
    size_t end = 0;
    for (size_t i = 0; i < count; ++i) {
      FA4_RETURN_IF_ERROR_AT(ParseField(record->size, &end, &record->fields[i]), "field ", i);
    }
    return {};
  }

  // `end` is where the field before ends, and then where this one does.
  Status ParseField(size_t record_size, size_t* end, Field* field) {
    uint8_t kind = 0;
    FA4_RETURN_IF_ERROR(reader_.Number("offset", &field->offset));
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("kind", kPointer, kScalar, &kind));
    FA4_RETURN_IF_ERROR(ParseValue(kind, field));
    if (field->offset < *end || field->offset + field->size() > record_size) {
      return Status::Invalid("offset must be in [", *end, ", ", record_size, " - ", field->size(), "], got ",
                             field->offset);
    }
    *end = field->offset + field->size();
    return {};
  }

  Status ParseValue(uint8_t kind, Field* field) {
    return kind == kPointer ? ParsePointer(&field->value.emplace<PointerValue>())
                            : ParseScalar(&field->value.emplace<ScalarValue>());
  }

  Status ParsePointer(PointerValue* pointer) {
    bool has_extent = false;
    FA4_RETURN_IF_ERROR(ParseBufferIndex(&pointer->buffer));
    FA4_RETURN_IF_ERROR(reader_.Number<uint16_t>("align", 1, 256, &pointer->align));
    if ((pointer->align & (pointer->align - 1)) != 0) {
      return Status::Invalid("align must be a power of two, got ", pointer->align);
    }
    FA4_RETURN_IF_ERROR_AT(ParseExpr(&pointer->offset), "offset");
    FA4_RETURN_IF_ERROR(reader_.Flag("has_extent", &has_extent));
    if (has_extent) FA4_RETURN_IF_ERROR_AT(ParseExpr(&pointer->extent.emplace()), "extent");
    return {};
  }

  Status ParseScalar(ScalarValue* scalar) {
    uint8_t type = 0;
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("type", 0, 3, &type));
    scalar->type = static_cast<ScalarType>(type);
    if (scalar->type == ScalarType::kF32) return reader_.Number("value", &scalar->constant);
    FA4_RETURN_IF_ERROR_AT(ParseExpr(&scalar->value), "value");
    return {};
  }

  Status ParseTensorMap(TensorMapParam* map) {
    uint8_t rank = 0;
    FA4_RETURN_IF_ERROR(ParseBufferIndex(&map->buffer));
    FA4_RETURN_IF_ERROR(ParseDtype(&map->dtype));
    if (map->dtype->tensor_map < 0) return Status::Invalid("dtype: TMA does not copy ", map->dtype->name);
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("rank", 1, kTensorRankLimit, &rank));
    map->dims.resize(rank);
    map->strides.resize(rank - 1);
    map->box.resize(rank);
    for (size_t i = 0; i < map->dims.size(); ++i) FA4_RETURN_IF_ERROR_AT(ParseExpr(&map->dims[i]), "dims[", i, "]");
    for (size_t i = 0; i < map->strides.size(); ++i) {
      FA4_RETURN_IF_ERROR_AT(ParseExpr(&map->strides[i]), "strides[", i, "]");
    }
    for (uint16_t& extent : map->box) FA4_RETURN_IF_ERROR(reader_.Number<uint16_t>("box", 1, kBoxLimit, &extent));
    FA4_RETURN_IF_ERROR(ParseOneOf("swizzle", {0, 32, 64, 128}, &map->swizzle));
    FA4_RETURN_IF_ERROR(ParseOneOf("l2_promotion", {0, 64, 128, 256}, &map->l2_promotion));
    FA4_RETURN_IF_ERROR_AT(ParseExpr(&map->offset), "offset");
    return CheckRow(*map);
  }

  // What the driver asks of the bytes that one row of a box has in shared memory.
  static Status CheckRow(const TensorMapParam& map) {
    const int64_t row = int64_t{map.box[0]} * map.dtype->itemsize;
    if (row % kTensorAlign != 0) {
      return Status::Invalid("a row of the box must be a multiple of ", kTensorAlign, " bytes, got ", row);
    }
    if (map.swizzle != 0 && row > map.swizzle) {
      return Status::Invalid("a row of the box must be <= ", int{map.swizzle}, " bytes (swizzle), got ", row);
    }
    return {};
  }

  template <typename T>
  Status ParseOneOf(const char* field, std::initializer_list<int> choices, T* out) {
    FA4_RETURN_IF_ERROR(reader_.Number(field, out));
    if (std::find(choices.begin(), choices.end(), *out) == choices.end()) {
      return Status::Invalid(field, ": ", int{*out}, " is not one of its values");
    }
    return {};
  }

  Status ParseBufferIndex(uint8_t* buffer) {
    FA4_RETURN_IF_ERROR(reader_.Number("buffer", buffer));
    if (*buffer >= variant_.buffers.size()) {
      return Status::Invalid("buffer must be < ", variant_.buffers.size(), ", got ", int{*buffer});
    }
    return {};
  }

  Status ParseExpr(Expr* expr) {
    uint8_t count = 0;
    FA4_RETURN_IF_ERROR(reader_.Number("number of operations", &count));
    expr->resize(count);
    size_t depth = 0;
    for (size_t i = 0; i < count; ++i) FA4_RETURN_IF_ERROR_AT(ParseOp(&depth, &(*expr)[i]), "operation ", i);
    if (depth != 1) return Status::Invalid("an expression must leave 1 value, it leaves ", depth);
    return {};
  }

  // `depth` counts the values on the stack.
  Status ParseOp(size_t* depth, Op* op) {
    uint8_t code = 0;
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("code", 0, static_cast<uint8_t>(OpCode::kMultiprocessors), &code));
    op->code = static_cast<OpCode>(code);
    if (op->code >= OpCode::kAdd && op->code <= OpCode::kMax) {
      if (*depth < 2) return Status::Invalid("an operator needs 2 values, there are ", *depth);
      *depth -= 1;
      return {};
    }
    *depth += 1;
    if (*depth > kMaxExprDepth) return Status::Invalid("an expression must hold <= ", kMaxExprDepth, " values at once");
    if (op->code == OpCode::kMultiprocessors) return {};
    if (op->code == OpCode::kConst) return reader_.Varint("constant", &op->value);
    FA4_RETURN_IF_ERROR(ParseBufferIndex(&op->buffer));
    FA4_RETURN_IF_ERROR(reader_.Number<uint8_t>("axis", op->code == OpCode::kDim ? 1 : 0, kAnyAxis, &op->axis));
    const BufferSpec& spec = variant_.buffers[op->buffer];
    if (op->axis > spec.min_rank()) {
      return Status::Invalid("axis must be <= ", spec.min_rank(), ", the rank of ", spec.name, ", got ", int{op->axis});
    }
    return {};
  }

  Reader& reader_;
  Variant& variant_;
};

}  // namespace

std::string Hex(const Key& key) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (uint8_t byte : key) hex.append({kDigits[byte >> 4], kDigits[byte & 15]});
  return hex;
}

std::optional<Key> ParseHex(std::string_view hex) {
  Key key{};
  if (hex.size() != 2 * key.size()) return std::nullopt;
  for (size_t i = 0; i < hex.size(); ++i) {
    const char c = hex[i];
    int digit = 0;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else {
      return std::nullopt;
    }
    key[i / 2] = static_cast<uint8_t>(key[i / 2] << 4 | digit);
  }
  return key;
}

size_t Field::size() const {
  const auto* scalar = std::get_if<ScalarValue>(&value);
  return scalar == nullptr || scalar->type == ScalarType::kI64 ? 8 : 4;
}

bool Arch::RunsOn(int device_major, int device_minor) const {
  return device_major == major && (suffix == 'a' ? device_minor == minor : device_minor >= minor);
}

const Variant* Plan::For(int major, int minor) const {
  for (const Variant& variant : variants) {
    if (variant.arch.RunsOn(major, minor)) return &variant;
  }
  return nullptr;
}

std::string Plan::Archs() const {
  std::string names;
  for (const Variant& variant : variants) names += (names.empty() ? "" : ", ") + variant.arch.name;
  return names;
}

Status ParsePlan(std::string_view bytes, Plan* plan) {
  Reader reader(bytes);
  std::string_view magic;
  uint16_t version = 0;
  uint8_t count = 0;
  FA4_RETURN_IF_ERROR_AT(reader.Bytes("magic", kMagic.size(), &magic), "plan");
  if (magic != kMagic) return Status::Invalid("plan: the bytes do not start with ", kMagic);
  FA4_RETURN_IF_ERROR_AT(reader.Number("version", &version), "plan");
  if (version != kVersion) return Status::Invalid("plan: version must be ", kVersion, ", got ", version);
  FA4_RETURN_IF_ERROR_AT(reader.Number<uint8_t>("number of variants", 1, kMaxVariants, &count), "plan");
  plan->variants.resize(count);
  for (size_t i = 0; i < count; ++i) {
    FA4_RETURN_IF_ERROR_AT(VariantParser(&reader, &plan->variants[i]).Parse(), "plan: variant ", i);
  }
  if (reader.remaining() != 0) return Status::Invalid("plan: ", reader.remaining(), " bytes follow its end");
  return {};
}

}  // namespace jax_fa4

// Entry points for tests without XLA: what a plan comes to for given buffers, and a run of it against any libcuda.
// The answer is JSON text: {"error": {"code", "message"}}, or the evaluated launches.

#include <algorithm>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>

#include "buffers.h"
#include "device.h"
#include "driver.h"
#include "launch.h"
#include "plan.h"
#include "registry.h"
#include "status.h"

namespace jax_fa4 {
namespace {

constexpr size_t kTestRank = 8;

// Mirrors the ctypes structure of tests/ffi/library.py.
struct TestBuffer {
  int32_t dtype;
  int32_t rank;
  int64_t dims[kTestRank];
  void* data;
};

struct TestCall {
  const char* plan;
  size_t plan_size;
  const char* images;
  size_t images_size;
  const TestBuffer* buffers;
  size_t num_operands, num_results;
  int32_t major, minor, multiprocessors;  // of the device, of jax_fa4_test_evaluate
  int32_t ordinal;       // device, of jax_fa4_test_run
  int32_t runs, sets;    // of jax_fa4_test_run: run i takes set i % sets, whose addresses lie that many times 1 MiB higher
};

std::string Quote(std::string_view text) {
  std::ostringstream out;
  out << '"';
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out << '\\' << c;
    } else if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7E) {
      out << '?';  // a damaged plan may hold any bytes in its names
    } else {
      out << c;
    }
  }
  out << '"';
  return out.str();
}

template <typename T>
std::string List(const T* items, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(items[i]);
  return text + "]";
}

std::string ErrorJson(const Status& status) {
  static constexpr const char* kNames[] = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "INTERNAL"};
  return Text(R"({"error": {"code": ")", kNames[static_cast<size_t>(status.code())], R"(", "message": )",
              Quote(status.message()), "}}");
}

std::string MapJson(const TensorMapFields& map) {
  return Text(R"({"address": )", reinterpret_cast<uintptr_t>(map.address), R"(, "dtype": )", Quote(map.dtype->name),
              R"(, "dims": )", List(map.dims, map.rank), R"(, "strides": )", List(map.strides, map.rank - 1),
              R"(, "box": )", List(map.box, map.rank), R"(, "swizzle": )", int{map.swizzle}, R"(, "l2_promotion": )",
              map.l2_promotion, "}");
}

std::string BytesJson(const unsigned char* bytes, size_t size) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex = "\"";
  for (size_t i = 0; i < size; ++i) hex.append({kDigits[bytes[i] >> 4], kDigits[bytes[i] & 15]});
  return hex + "\"";
}

std::string LaunchJson(const Launch& launch, const EvaluatedLaunch& evaluated) {
  const bool nothing = evaluated.launches_nothing();
  std::string params;
  for (size_t i = 0; i < launch.params.size() && !nothing; ++i) {
    const auto* record = std::get_if<RecordParam>(&launch.params[i]);
    const uint16_t place = evaluated.places[i];
    params += (i ? ", " : "") + (record == nullptr ? MapJson(evaluated.maps[place])
                                                   : BytesJson(evaluated.bytes + place, record->size));
  }
  return Text(R"({"cubin": ")", Hex(launch.key), R"(", "entry": )", Quote(launch.entry), R"(, "grid": )",
              List(evaluated.grid, 3), R"(, "block": )", launch.block, R"(, "cluster": )",
              List(launch.cluster.data(), 3), R"(, "smem_bytes": )", launch.smem_bytes, R"(, "programmatic": )",
              launch.programmatic ? "true" : "false", R"(, "params": [)", params, "]}");
}

Status FillBuffers(const TestCall& call, Buffers* buffers) {
  if (call.num_operands + call.num_results > kMaxBuffers) return Status::Invalid("too many buffers");
  buffers->num_operands = call.num_operands;
  buffers->num_results = call.num_results;
  for (size_t i = 0; i < buffers->size(); ++i) {
    const TestBuffer& buffer = call.buffers[i];
    buffers->items[i] = {buffer.dtype, buffer.rank, buffer.dims, buffer.data, 0};
  }
  return {};
}

Status Parse(const TestCall& call, Plan* plan) {
  FA4_RETURN_IF_ERROR(ParsePlan(std::string_view(call.plan, call.plan_size), plan));
  return CheckImages(std::string_view(call.images, call.images_size));
}

Status EvaluateCall(const TestCall& call, std::string* json) {
  Plan plan;
  Buffers buffers;
  FA4_RETURN_IF_ERROR(Parse(call, &plan));
  FA4_RETURN_IF_ERROR(FillBuffers(call, &buffers));
  const Variant* variant = plan.For(call.major, call.minor);
  if (variant == nullptr) return Status(Code::kFailedPrecondition, Text("the program has kernels for ", plan.Archs()));
  const auto evaluated = std::make_unique<EvaluatedPlan>();
  buffers.multiprocessors = call.multiprocessors;
  FA4_RETURN_IF_ERROR(EvaluatePlan(*variant, &buffers, evaluated.get()));
  std::string launches;
  for (size_t i = 0; i < variant->launches.size(); ++i) {
    launches += (i ? ", " : "") + LaunchJson(variant->launches[i], evaluated->launches[i]);
  }
  *json = Text(R"({"arch": )", Quote(variant->arch.name), R"(, "launches": [)", launches, "]}");
  return {};
}

Status RunCall(const TestCall& call, void* stream) {
  Plan plan;
  Buffers buffers;
  Device prepared;
  const Driver* driver = nullptr;
  FA4_RETURN_IF_ERROR(Parse(call, &plan));
  FA4_RETURN_IF_ERROR(FillBuffers(call, &buffers));
  FA4_RETURN_IF_ERROR(GetDriver(&driver));
  const std::string_view images(call.images, call.images_size);
  FA4_RETURN_IF_ERROR(PrepareDevice(*driver, plan, images, call.ordinal, &prepared));
  for (int32_t run = 0; run < call.runs; ++run) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers.items[i].data = static_cast<char*>(call.buffers[i].data) + (ptrdiff_t{run % call.sets} << 20);
    }
    FA4_RETURN_IF_ERROR(RunPlan(*driver, &prepared, &buffers, static_cast<CuStream>(stream)));
  }
  return {};
}

// Copies as much text as fits and returns how long it is.
size_t Answer(const std::string& text, char* out, size_t capacity) {
  std::memcpy(out, text.data(), std::min(text.size(), capacity));
  return text.size();
}

}  // namespace
}  // namespace jax_fa4

#define FA4_EXPORT extern "C" __attribute__((visibility("default")))

FA4_EXPORT size_t jax_fa4_test_evaluate(const jax_fa4::TestCall* call, char* out, size_t capacity) {
  std::string json;
  const jax_fa4::Status status = jax_fa4::EvaluateCall(*call, &json);
  return jax_fa4::Answer(status.ok() ? json : jax_fa4::ErrorJson(status), out, capacity);
}

// Finds the kernels, and launches on `stream` for the buffers' device addresses.
FA4_EXPORT size_t jax_fa4_test_run(const jax_fa4::TestCall* call, void* stream, char* out, size_t capacity) {
  const jax_fa4::Status status = jax_fa4::RunCall(*call, stream);
  return jax_fa4::Answer(status.ok() ? "{}" : jax_fa4::ErrorJson(status), out, capacity);
}

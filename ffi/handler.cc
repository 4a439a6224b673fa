// The custom-call target jax_fa4_launch_v1: what XLA calls at each stage of an executable's life.
//
//     instantiate  once a call site, also when compiling without a GPU: parses the plan, never touches CUDA
//     initialize   before each run on a device: kernels and their limits, of which the first run does the work
//     execute      each run, also while a CUDA graph is captured: launches what the plan says of the buffers

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "buffers.h"
#include "device.h"
#include "driver.h"
#include "limits.h"
#include "plan.h"
#include "registry.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fa4 {
namespace {

namespace ffi = xla::ffi;

constexpr std::string_view kPlan = "plan";
constexpr std::string_view kImages = "images";

ffi::Error ToError(const Status& status) {
  static constexpr ffi::ErrorCode kCodes[] = {ffi::ErrorCode::kOk, ffi::ErrorCode::kInvalidArgument,
                                              ffi::ErrorCode::kNotFound, ffi::ErrorCode::kFailedPrecondition,
                                              ffi::ErrorCode::kInternal};
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(kCodes[static_cast<size_t>(status.code())], "jax_fa4: " + status.message());
}

Status CheckOrdinal(int ordinal) {
  if (ordinal >= 0 && ordinal < kMaxDevices) return {};
  return Status::Invalid("device ordinal must be in [0, ", kMaxDevices, "), got ", ordinal);
}

// The parsed plan of one call site. All devices of the executable share it, at the same time.
class State {
 public:
  static ffi::TypeId id;

  explicit State(Plan plan) : plan_(std::move(plan)) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    for (auto& slot : devices_) delete slot.load(std::memory_order_relaxed);
  }

  // The kernels that Prepare has left for a device, or null.
  Device* Prepared(int ordinal) const { return devices_[ordinal].load(std::memory_order_acquire); }

  Status Prepare(std::string_view images, int ordinal) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Prepared(ordinal) != nullptr) return {};
    const Driver* driver = nullptr;
    FA4_RETURN_IF_ERROR(GetDriver(&driver));
    auto prepared = std::make_unique<Device>();
    FA4_RETURN_IF_ERROR(PrepareDevice(*driver, plan_, images, ordinal, prepared.get()));
    devices_[ordinal].store(prepared.release(), std::memory_order_release);
    return {};
  }

 private:
  const Plan plan_;
  std::mutex mutex_;
  std::atomic<Device*> devices_[kMaxDevices] = {};
};

ffi::TypeId State::id = XLA_FFI_UNKNOWN_TYPE_ID;

Status GetBytes(const ffi::Dictionary& attributes, std::string_view name, std::string_view* bytes) {
  auto value = attributes.get<std::string_view>(name);
  if (!value.has_value()) return Status::Invalid("attribute ", name, " must be bytes: ", value.error().message());
  *bytes = *value;
  return {};
}

// The images of an exported program; empty where it has none.
Status GetImages(const ffi::Dictionary& attributes, std::string_view* images) {
  return attributes.contains(kImages) ? GetBytes(attributes, kImages, images) : Status();
}

Status ParseAttributes(const ffi::Dictionary& attributes, Plan* plan) {
  std::string_view bytes, images;
  FA4_RETURN_IF_ERROR(GetBytes(attributes, kPlan, &bytes));
  FA4_RETURN_IF_ERROR(ParsePlan(bytes, plan));
  FA4_RETURN_IF_ERROR(GetImages(attributes, &images));
  return CheckImages(images);
}

ffi::ErrorOr<std::unique_ptr<State>> Instantiate(ffi::Dictionary attributes) {
  Plan plan;
  if (Status status = ParseAttributes(attributes, &plan); !status.ok()) return ffi::Unexpected(ToError(status));
  return std::make_unique<State>(std::move(plan));
}

Status PrepareState(State* state, const ffi::Dictionary& attributes, int ordinal) {
  FA4_RETURN_IF_ERROR(CheckOrdinal(ordinal));
  if (state->Prepared(ordinal) != nullptr) return {};
  std::string_view images;
  FA4_RETURN_IF_ERROR(GetImages(attributes, &images));
  return state->Prepare(images, ordinal);
}

ffi::Error Initialize(State* state, int32_t ordinal, ffi::Dictionary attributes) {
  return ToError(PrepareState(state, attributes, ordinal));
}

Buffer ToBuffer(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {static_cast<int32_t>(buffer.element_type()), static_cast<int64_t>(dims.size()), dims.begin(),
          buffer.untyped_data(), 0};
}

Status CollectBuffers(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, Buffers* buffers) {
  if (args.size() + rets.size() > kMaxBuffers) {
    return Status::Invalid("number of buffers must be <= ", kMaxBuffers, ", got ", args.size() + rets.size());
  }
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return Status::Invalid("operand ", i, ": ", buffer.error().message());
    buffers->items[buffers->num_operands++] = ToBuffer(*buffer);
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return Status::Invalid("result ", i, ": ", buffer.error().message());
    buffers->items[buffers->num_operands + buffers->num_results++] = ToBuffer(**buffer);
  }
  return {};
}

Status Run(const State& state, CuStream stream, int ordinal, const ffi::RemainingArgs& args,
           const ffi::RemainingRets& rets) {
  FA4_RETURN_IF_ERROR(CheckOrdinal(ordinal));
  Device* prepared = state.Prepared(ordinal);
  if (prepared == nullptr) return Status(Code::kFailedPrecondition, "execute was called before initialize");
  const Driver* driver = nullptr;
  FA4_RETURN_IF_ERROR(GetDriver(&driver));
  Buffers buffers;
  FA4_RETURN_IF_ERROR(CollectBuffers(args, rets, &buffers));
  return RunPlan(*driver, prepared, &buffers, stream);
}

ffi::Error Execute(State* state, CuStream stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return ToError(Run(*state, stream, ordinal, args, rets));
}

const ffi::TypeInfo kStateInfo = ffi::MakeTypeInfo<State>();

}  // namespace
}  // namespace jax_fa4

#define FA4_EXPORT extern "C" __attribute__((visibility("default")))

FA4_EXPORT XLA_FFI_Error* jax_fa4_instantiate(XLA_FFI_CallFrame* frame);
FA4_EXPORT XLA_FFI_Error* jax_fa4_initialize(XLA_FFI_CallFrame* frame);
FA4_EXPORT XLA_FFI_Error* jax_fa4_execute(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fa4_instantiate, jax_fa4::Instantiate,
                              xla::ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fa4_initialize, jax_fa4::Initialize,
                              xla::ffi::Ffi::BindInitialize()
                                  .Ctx<xla::ffi::State<jax_fa4::State>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_fa4_execute, jax_fa4::Execute,
                              xla::ffi::Ffi::BindExecute()
                                  .Ctx<xla::ffi::State<jax_fa4::State>>()
                                  .Ctx<xla::ffi::PlatformStream<jax_fa4::CuStream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

FA4_EXPORT XLA_FFI_TypeId* jax_fa4_state_type_id() { return &jax_fa4::State::id; }

FA4_EXPORT const XLA_FFI_TypeInfo* jax_fa4_state_type_info() { return &jax_fa4::kStateInfo; }

// 0, or 1 for a key that is not 64 lower-case hex digits, or an empty image.
FA4_EXPORT int jax_fa4_register_image(const char* key, const char* image, size_t size) {
  const auto parsed = jax_fa4::ParseHex(key);
  if (!parsed.has_value() || size == 0) return 1;
  jax_fa4::RegisterImage(*parsed, std::string_view(image, size));
  return 0;
}

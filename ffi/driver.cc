#include "driver.h"

#include <dlfcn.h>

namespace jax_fa4 {
namespace {

constexpr const char* kLibcuda = "libcuda.so.1";

// Looks `name` up; the address of a function and of data have one size on every system with libcuda.
template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

#define FA4_REQUIRE(name) \
  if (!Find(library, #name, &driver->name)) return Status(Code::kFailedPrecondition, Text(kLibcuda, " lacks " #name))

Status Load(Driver* driver) {
  void* library = dlopen(kLibcuda, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Status(Code::kFailedPrecondition, Text("the CUDA driver did not open: ", dlerror()));
  FA4_REQUIRE(cuInit);
  FA4_REQUIRE(cuGetErrorName);
  FA4_REQUIRE(cuDeviceGet);
  FA4_REQUIRE(cuDeviceGetAttribute);
  FA4_REQUIRE(cuLibraryLoadData);
  FA4_REQUIRE(cuLibraryUnload);
  FA4_REQUIRE(cuLibraryGetKernel);
  FA4_REQUIRE(cuKernelGetFunction);
  FA4_REQUIRE(cuKernelGetAttribute);
  FA4_REQUIRE(cuKernelSetAttribute);
  FA4_REQUIRE(cuLaunchKernelEx);
  FA4_REQUIRE(cuTensorMapEncodeTiled);
  Find(library, "cuKernelGetParamInfo", &driver->cuKernelGetParamInfo);
  return driver->Check(driver->cuInit(0), "cuInit");
}

#undef FA4_REQUIRE

}  // namespace

std::string Driver::ErrorText(CuResult error) const {
  const char* name = nullptr;
  if (cuGetErrorName(error, &name) != 0 || name == nullptr) name = "unknown CUDA error";
  return Text(name, " (", error, ")");
}

Status Driver::Check(CuResult result, const char* call) const {
  return result == 0 ? Status() : Status(Code::kInternal, Text(call, ": ", ErrorText(result)));
}

Status GetDriver(const Driver** driver) {
  static Driver table{};
  static const Status status = Load(&table);
  *driver = &table;
  return status.ok() ? Status() : Status(status.code(), status.message());
}

}  // namespace jax_fa4

#include "registry.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "reader.h"

namespace jax_fa4 {
namespace {

constexpr std::string_view kMagic = "FA4I";
constexpr uint16_t kVersion = 1;

// Kernels are never unloaded: executables that the process still holds may launch them.
struct Registry {
  std::mutex mutex;
  std::map<Key, std::string> images;
  std::map<std::pair<Key, std::string>, CuKernel> kernels;  // by cubin and entry
};

Registry& TheRegistry() {
  static auto* registry = new Registry;  // never destroyed: XLA's threads may outlive static destruction
  return *registry;
}

// Walks through the images; `image` becomes that of `key` where `key` is given and present.
Status ReadImages(std::string_view images, const Key* key, std::string_view* image) {
  Reader reader(images);
  std::string_view magic, name, bytes;
  uint16_t version = 0, count = 0;
  uint32_t size = 0;
  FA4_RETURN_IF_ERROR(reader.Bytes("magic", kMagic.size(), &magic));
  if (magic != kMagic) return Status::Invalid("the bytes do not start with ", kMagic);
  FA4_RETURN_IF_ERROR(reader.Number("version", &version));
  if (version != kVersion) return Status::Invalid("version must be ", kVersion, ", got ", version);
  FA4_RETURN_IF_ERROR(reader.Number("number of images", &count));
  for (size_t i = 0; i < count; ++i) {
    FA4_RETURN_IF_ERROR_AT(reader.Bytes("key", sizeof(Key), &name), "image ", i);
    FA4_RETURN_IF_ERROR_AT(reader.Number("size", &size), "image ", i);
    FA4_RETURN_IF_ERROR_AT(reader.Bytes("cubin", size, &bytes), "image ", i);
    const bool found = key != nullptr && std::equal(key->begin(), key->end(), name.begin(), [](uint8_t a, char b) {
      return a == static_cast<uint8_t>(b);
    });
    if (found) *image = bytes;
  }
  if (reader.remaining() != 0) return Status::Invalid(reader.remaining(), " bytes follow their end");
  return {};
}

Status LoadKernel(const Driver& driver, const Launch& launch, std::string_view image, CuKernel* kernel) {
  CuLibrary library = nullptr;
  FA4_RETURN_IF_ERROR(driver.Check(
      driver.cuLibraryLoadData(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData"));
  Status status = driver.Check(driver.cuLibraryGetKernel(kernel, library, launch.entry.c_str()), "cuLibraryGetKernel");
  if (!status.ok()) driver.cuLibraryUnload(library);
  return status;
}

}  // namespace

void RegisterImage(const Key& key, std::string_view image) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.images.try_emplace(key, image);
}

Status CheckImages(std::string_view images) {
  if (images.empty()) return {};
  FA4_RETURN_IF_ERROR_AT(ReadImages(images, nullptr, nullptr), "images");
  return {};
}

Status ResolveKernel(const Driver& driver, const Launch& launch, std::string_view images, CuKernel* kernel) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto known = registry.kernels.find({launch.key, launch.entry});
  if (known != registry.kernels.end()) {
    *kernel = known->second;
    return {};
  }
  std::string_view image;
  if (const auto registered = registry.images.find(launch.key); registered != registry.images.end()) {
    image = registered->second;
  } else if (!images.empty()) {
    FA4_RETURN_IF_ERROR_AT(ReadImages(images, &launch.key, &image), "images");
  }
  if (image.empty()) {
    return Status(Code::kNotFound,
                  Text("no cubin of key ", Hex(launch.key),
                       " is known in this process, and the program carries none. An executable that was deserialised "
                       "never lowers its program, which is what loads cubins: call or lower the program in this "
                       "process (`python -m jax_fa4 build` compiles its cubins ahead of time), or export it with "
                       "jax.export, which embeds them"));
  }
  FA4_RETURN_IF_ERROR_AT(LoadKernel(driver, launch, image, kernel), "cubin of key ", Hex(launch.key));
  registry.kernels[{launch.key, launch.entry}] = *kernel;
  return {};
}

}  // namespace jax_fa4

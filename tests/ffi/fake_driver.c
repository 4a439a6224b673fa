/* A libcuda for tests: every call succeeds and is logged, except the one that FAKE_FAIL names ("cuInit=100").
 * FAKE_CAPABILITY is the device's ("90"), FAKE_PARAMS the sizes of a kernel's parameters ("128,8"). */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct attribute {
  int32_t id;
  char pad[4];
  uint32_t value[16];
};

struct config {
  uint32_t grid[3], block[3], smem_bytes;
  void* stream;
  struct attribute* attributes;
  uint32_t num_attributes;
};

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

static FILE* line(void) {
  static FILE* file;
  if (!file) {
    file = fopen(setting("FAKE_LOG", "/dev/null"), "w");
    setvbuf(file, NULL, _IOLBF, 4096);
  }
  return file;
}

static int result_of(const char* call) {
  const char* fail = setting("FAKE_FAIL", "");
  size_t size = strlen(call);
  return strncmp(fail, call, size) == 0 && fail[size] == '=' ? atoi(fail + size + 1) : 0;
}

/* The size of parameter `index`, or 0 beyond the last. */
static size_t param_size(size_t index) {
  const char* sizes = setting("FAKE_PARAMS", "");
  while (index-- && sizes) sizes = strchr(sizes, ',') ? strchr(sizes, ',') + 1 : NULL;
  return sizes ? (size_t)atoi(sizes) : 0;
}

int cuInit(unsigned flags) { return flags ? 1 : result_of("cuInit"); }

int cuGetErrorName(int error, const char** name) {
  *name = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == 1 ? "CUDA_ERROR_INVALID_VALUE" : NULL;
  return *name ? 0 : 1;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = 100 + ordinal;
  return result_of("cuDeviceGet");
}

int cuDeviceGetAttribute(int* value, int32_t attribute, int device) {
  int capability = atoi(setting("FAKE_CAPABILITY", "90"));
  (void)device;
  *value = attribute == 75   ? capability / 10
           : attribute == 76 ? capability % 10
           : attribute == 16 ? 132
                             : atoi(setting("FAKE_SMEM", "232448"));
  return result_of("cuDeviceGetAttribute");
}

int cuLibraryLoadData(void** library, const char* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  fprintf(line(), "load %s\n", code);
  *library = (void*)0x11;
  return result_of("cuLibraryLoadData");
}

int cuLibraryUnload(void* library) {
  fprintf(line(), "unload %p\n", library);
  return 0;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  fprintf(line(), "kernel %s of %p\n", name, library);
  *kernel = (void*)0x22;
  return result_of("cuLibraryGetKernel");
}

int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return result_of("cuKernelGetFunction");
}

static int limit;

int cuKernelGetAttribute(int* value, int32_t attribute, void* kernel, int device) {
  (void)attribute, (void)kernel, (void)device;
  *value = limit;
  return result_of("cuKernelGetAttribute");
}

int cuKernelSetAttribute(int32_t attribute, int value, void* kernel, int device) {
  fprintf(line(), "attribute %d = %d of %p on %d\n", attribute, value, kernel, device);
  if (attribute == 8) limit = value;
  return result_of("cuKernelSetAttribute");
}

int cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* size) {
  (void)kernel;
  *offset = 0;
  *size = param_size(index);
  return *size ? 0 : 1;
}

int cuTensorMapEncodeTiled(uint64_t* map, int32_t dtype, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                           int32_t interleave, int32_t swizzle, int32_t l2_promotion, int32_t fill) {
  uint32_t i;
  fprintf(line(), "map dtype %d address %p dims", dtype, address);
  for (i = 0; i < rank; ++i) fprintf(line(), " %lu", (unsigned long)dims[i]);
  fprintf(line(), " strides");
  for (i = 0; i + 1 < rank; ++i) fprintf(line(), " %lu", (unsigned long)strides[i]);
  fprintf(line(), " box");
  for (i = 0; i < rank; ++i) fprintf(line(), " %u", box[i] * element_strides[i]);
  fprintf(line(), " modes %d %d %d %d\n", interleave, swizzle, l2_promotion, fill);
  memset(map, 0xEE, 128);
  return (uintptr_t)map % 64 ? 1 : result_of("cuTensorMapEncodeTiled");
}

int cuLaunchKernelEx(const struct config* config, void* kernel, void** params, void** extra) {
  uint32_t i;
  size_t byte;
  fprintf(line(), "launch %p grid %u %u %u block %u %u %u smem %u stream %p", kernel, config->grid[0], config->grid[1],
          config->grid[2], config->block[0], config->block[1], config->block[2], config->smem_bytes, config->stream);
  for (i = 0; i < config->num_attributes; ++i) {
    const struct attribute* a = &config->attributes[i];
    fprintf(line(), " attribute %d (%u %u %u)", a->id, a->value[0], a->value[1], a->value[2]);
  }
  for (i = 0; param_size(i); ++i) {
    fprintf(line(), " ");
    for (byte = 0; byte < param_size(i); ++byte) fprintf(line(), "%02x", ((unsigned char*)params[i])[byte]);
  }
  fprintf(line(), "\n");
  return extra ? 1 : result_of("cuLaunchKernelEx");
}

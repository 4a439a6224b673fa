// Launches ready to be sent. A program runs with the same few sets of buffers over and over, so a call site keeps the last
// few sets' parameters: evaluating and encoding them again would cost about as much as the launch.
#ifndef JAX_FA4_FFI_READY_H_
#define JAX_FA4_FFI_READY_H_

#include <cstdint>
#include <vector>

#include "buffers.h"
#include "driver.h"
#include "launch.h"
#include "plan.h"
#include "status.h"

namespace jax_fa4 {

// Addresses and shapes of a run's buffers: all that parameters depend on.
class Signature {
 public:
  static Signature Of(const Buffers& buffers);

  bool operator==(const Signature& other) const;

 private:
  static constexpr size_t kCapacity = 4 * kMaxBuffers;

  int64_t words_[kCapacity];
  size_t count_ = 0;  // 0: there were too many words, which equals nothing
};

// The launches of a variant with every parameter as the driver takes it.
class ReadyPlan {
 public:
  explicit ReadyPlan(const Variant& variant);  // allocates all that there will be

  bool IsFor(const Signature& signature) const { return signature == signature_; }

  // Evaluates and encodes every launch, so that a bad one sends nothing.
  Status Make(const Driver& driver, const Variant& variant, const Signature& signature, Buffers* buffers);

  Status Send(const Driver& driver, const Variant& variant, const CuKernel* kernels, CuStream stream);

 private:
  struct One {
    uint32_t grid[3] = {};
    std::vector<CuTensorMap> maps;
    std::vector<unsigned char> bytes;
    std::vector<void*> params;  // into maps and bytes
  };

  Signature signature_;
  std::vector<One> launches_;
};

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_READY_H_

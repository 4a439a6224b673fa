// The operands and results of one run, checked against what the plan expects of them.
#ifndef JAX_FA4_FFI_BUFFERS_H_
#define JAX_FA4_FFI_BUFFERS_H_

#include <cstddef>
#include <cstdint>

#include "limits.h"
#include "plan.h"
#include "status.h"

namespace jax_fa4 {

struct Buffer {
  int32_t dtype = 0;  // xla.PrimitiveType
  int64_t rank = 0;
  const int64_t* dims = nullptr;
  void* data = nullptr;
  int64_t bytes = 0;  // set by CheckBuffers
};

struct Buffers {
  Buffer items[kMaxBuffers];  // operands, then results
  size_t num_operands = 0, num_results = 0;
  int64_t multiprocessors = 0;  // of the device that they lie on

  size_t size() const { return num_operands + num_results; }
};

// Number, dtypes, ranks, sizes and equal batch axes; fills in each buffer's size in bytes.
Status CheckBuffers(const Variant& variant, Buffers* buffers);

// The value of an expression for these buffers, which CheckBuffers has accepted.
Status Evaluate(const Expr& expr, const Buffers& buffers, int64_t* value);

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_BUFFERS_H_

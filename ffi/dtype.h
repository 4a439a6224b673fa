// Element types that a plan may name.
#ifndef JAX_FA4_FFI_DTYPE_H_
#define JAX_FA4_FFI_DTYPE_H_

#include <cstdint>

namespace jax_fa4 {

struct Dtype {
  int32_t code;        // xla.PrimitiveType
  const char* name;    // numpy's
  int32_t itemsize;    // bytes
  int32_t tensor_map;  // CUtensorMapDataType, or -1 where TMA has none; only the size matters to a copy
};

inline constexpr Dtype kDtypes[] = {
    {1, "bool", 1, 0},     {2, "int8", 1, 0},         {3, "int16", 2, -1},          {4, "int32", 4, 3},
    {5, "int64", 8, 5},    {6, "uint8", 1, 0},        {7, "uint16", 2, 1},          {8, "uint32", 4, 2},
    {9, "uint64", 8, 4},   {10, "float16", 2, 6},     {11, "float32", 4, 7},        {12, "float64", 8, 8},
    {16, "bfloat16", 2, 9}, {19, "float8_e5m2", 1, 0}, {20, "float8_e4m3fn", 1, 0},
};

// The type with XLA's number `code`, or null.
inline const Dtype* FindDtype(int32_t code) {
  for (const Dtype& dtype : kDtypes) {
    if (dtype.code == code) return &dtype;
  }
  return nullptr;
}

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_DTYPE_H_

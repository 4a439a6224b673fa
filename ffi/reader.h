// Reads little-endian fields from bytes and never past their end.
#ifndef JAX_FA4_FFI_READER_H_
#define JAX_FA4_FFI_READER_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "status.h"

namespace jax_fa4 {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "fields are copied as they are");

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  size_t remaining() const { return bytes_.size() - position_; }

  Status Bytes(const char* field, size_t size, std::string_view* out) {
    if (size > remaining()) {
      return Status::Invalid(field, ": needs ", size, " bytes at byte ", position_, ", but ", remaining(), " are left");
    }
    *out = bytes_.substr(position_, size);
    position_ += size;
    return {};
  }

  template <typename T>
  Status Number(const char* field, T* out) {
    std::string_view raw;
    FA4_RETURN_IF_ERROR(Bytes(field, sizeof(T), &raw));
    std::memcpy(out, raw.data(), sizeof(T));
    return {};
  }

  // A number in [first, last].
  template <typename T>
  Status Number(const char* field, T first, T last, T* out) {
    FA4_RETURN_IF_ERROR(Number(field, out));
    if (*out < first || *out > last) {
      return Status::Invalid(field, " must be in [", uint64_t{first}, ", ", uint64_t{last}, "], got ", uint64_t{*out});
    }
    return {};
  }

  Status Flag(const char* field, bool* out) {
    uint8_t raw = 0;
    FA4_RETURN_IF_ERROR(Number<uint8_t>(field, 0, 1, &raw));
    *out = raw == 1;
    return {};
  }

  // A u16 length from 1 to `limit`, and that many bytes without NUL.
  Status String(const char* field, size_t limit, std::string* out) {
    uint16_t size = 0;
    std::string_view raw;
    FA4_RETURN_IF_ERROR(Number(field, &size));
    if (size < 1 || size > limit) return Status::Invalid(field, " must have 1 to ", limit, " bytes, got ", size);
    FA4_RETURN_IF_ERROR(Bytes(field, size, &raw));
    if (raw.find('\0') != std::string_view::npos) return Status::Invalid(field, " must not hold NUL");
    *out = std::string(raw);
    return {};
  }

  // LEB128 of the zigzag code of an int64: seven bits a byte, low bits first, the sign in bit 0.
  Status Varint(const char* field, int64_t* out) {
    uint64_t code = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      uint8_t byte = 0;
      FA4_RETURN_IF_ERROR(Number(field, &byte));
      const uint64_t bits = byte & 0x7F;
      if (shift == 63 && bits > 1) break;
      code |= bits << shift;
      if ((byte & 0x80) == 0) {
        *out = static_cast<int64_t>(code >> 1) ^ -static_cast<int64_t>(code & 1);
        return {};
      }
    }
    return Status::Invalid(field, ": a varint does not fit an int64");
  }

 private:
  std::string_view bytes_;
  size_t position_ = 0;
};

}  // namespace jax_fa4

#endif  // JAX_FA4_FFI_READER_H_

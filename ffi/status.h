// Success, or an error's code and text. Success costs nothing; text is put together only on the way out.
#ifndef JAX_FA4_FFI_STATUS_H_
#define JAX_FA4_FFI_STATUS_H_

#include <memory>
#include <sstream>
#include <string>
#include <utility>

namespace jax_fa4 {

enum class Code { kOk, kInvalidArgument, kNotFound, kFailedPrecondition, kInternal };

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : error_(new Error{code, std::move(message)}) {}

  template <typename... Parts>
  static Status Invalid(const Parts&... parts) {
    return Status(Code::kInvalidArgument, Text(parts...));
  }

  bool ok() const { return error_ == nullptr; }
  Code code() const { return ok() ? Code::kOk : error_->code; }
  const std::string& message() const { return error_->message; }  // of an error only

  // The same error with its place in front.
  template <typename... Place>
  Status At(const Place&... place) const {
    return Status(code(), Text(place..., ": ", message()));
  }

 private:
  struct Error {
    Code code;
    std::string message;
  };
  std::unique_ptr<const Error> error_;  // one pointer: success is passed on hot paths
};

}  // namespace jax_fa4

// Leaves the function with the error of `expr`, if there is one; the other arguments name the place.
#define FA4_RETURN_IF_ERROR(expr) \
  if (::jax_fa4::Status status_ = (expr); !status_.ok()) return status_
#define FA4_RETURN_IF_ERROR_AT(expr, ...) \
  if (::jax_fa4::Status status_ = (expr); !status_.ok()) return status_.At(__VA_ARGS__)

#endif  // JAX_FA4_FFI_STATUS_H_

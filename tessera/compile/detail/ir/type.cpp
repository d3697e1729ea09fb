#include "tessera/compile/detail/ir/type.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <ostream>
#include <utility>

namespace tessera::compiler {
namespace {

constexpr std::pair<c10::ScalarType, const char*> kDtypeNames[] = {
    {c10::kFloat, "f32"},        {c10::kDouble, "f64"},      {c10::kHalf, "f16"},         {c10::kBFloat16, "bf16"},
    {c10::kLong, "i64"},         {c10::kInt, "i32"},         {c10::kShort, "i16"},        {c10::kChar, "i8"},
    {c10::kByte, "u8"},          {c10::kBool, "bool"},       {c10::kComplexFloat, "c64"}, {c10::kComplexDouble, "c128"},
    {c10::kUInt16, "u16"},       {c10::kUInt32, "u32"},      {c10::kUInt64, "u64"},       {c10::kFloat8_e4m3fn, "f8e4"},
    {c10::kFloat8_e5m2, "f8e5"}, {c10::kComplexHalf, "c32"},
};

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = next;
    if (__builtin_mul_overflow(next, std::max<int64_t>(sizes[d], 1), &next)) next = 0;  // no tensor has such sizes
  }
  return strides;
}

void print_comma_separated(std::ostream& out, const std::vector<int64_t>& list) {
  for (size_t i = 0; i < list.size(); i++) out << (i ? ", " : "") << list[i];
}

}  // namespace

Type Type::contiguous(c10::ScalarType dtype, std::vector<int64_t> sizes, c10::Device device) {
  auto strides = contiguous_strides(sizes);
  return {dtype, std::move(sizes), std::move(strides), device, false, false};
}

Type Type::of(const at::Tensor& t) {
  return {t.scalar_type(), t.sizes().vec(), t.strides().vec(), t.device(), t.is_conj(), t.is_neg()};
}

int64_t Type::numel() const {
  int64_t n = 1;
  for (const auto size : sizes) n *= size;
  return n;
}

int64_t Type::span() const {
  if (numel() == 0) return 0;
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); d++) last += (sizes[d] - 1) * strides[d];
  return last + 1;
}

bool Type::is_contiguous() const {
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] != 1 && strides[d] != next) return numel() == 0;
    next *= sizes[d];
  }
  return true;
}

std::string sizes_error(c10::ScalarType dtype, const std::vector<int64_t>& sizes) {
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));  // as if empty dims had one element: of the strides
  for (const auto size : sizes) {
    if (size < 0) return c10::str("a size is ", size);
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return "it has more than 2^63 bytes";
  }
  return "";
}

std::string type_error(const Type& type) {
  auto error = sizes_error(type.dtype, type.sizes);
  if (!error.empty()) return error;
  if (type.sizes.size() != type.strides.size())
    return c10::str("it has ", type.sizes.size(), " sizes and ", type.strides.size(), " strides");
  int64_t last = 0, bytes = 0;
  for (size_t d = 0; d < type.sizes.size(); d++) {
    if (type.strides[d] < 0) return c10::str("a stride is ", type.strides[d]);
    int64_t reach = 0;
    if (__builtin_mul_overflow(std::max<int64_t>(type.sizes[d] - 1, 0), type.strides[d], &reach) ||
        __builtin_add_overflow(last, reach, &last))
      return "its strides exceed 2^63";
  }
  if (__builtin_add_overflow(last, 1, &last) || __builtin_mul_overflow(last, type.itemsize(), &bytes))
    return "its strides exceed 2^63";
  return "";
}

std::ostream& operator<<(std::ostream& out, const Type& type) {
  out << short_name(type.dtype) << "[";
  print_comma_separated(out, type.sizes);
  out << "]";
  if (type.strides != contiguous_strides(type.sizes)) {
    out << "{";
    print_comma_separated(out, type.strides);
    out << "}";
  }
  if (!type.device.is_cpu()) out << " " << type.device;
  if (type.conj) out << " conj";
  if (type.neg) out << " neg";
  return out;
}

const char* short_name(c10::ScalarType dtype) {
  for (const auto& [type, name] : kDtypeNames)
    if (type == dtype) return name;
  TESSERA_FAIL(UsageError, "compile: dtype ", c10::toString(dtype), " is not supported; use an eager step for it");
}

c10::ScalarType dtype_from(std::string_view name) {
  for (const auto& [type, known] : kDtypeNames)
    if (name == known) return type;
  TESSERA_FAIL(UsageError, "unknown dtype '", name, "'; write for example f32, f64, f16, bf16, i64, i32 or bool");
}

}  // namespace tessera::compiler

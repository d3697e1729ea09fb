#include "tessera/comm/detail/region/reduce.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/region/widen.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e4m3fnuz.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Float8_e5m2fnuz.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <functional>
#include <type_traits>

namespace tessera::comm::region {
namespace {

constexpr int64_t kBlock = 1024;  // elements per block: the partial results stay in the L1 cache

// NaN propagates, as in at::min. No short-circuit operators: they prevent vectorisation.
constexpr auto kMin = [](auto a, auto b) { return ((b < a) | (b != b)) ? b : a; };
constexpr auto kMax = [](auto a, auto b) { return ((a < b) | (b != b)) ? b : a; };

// T: storage type. Sum: accumulation type.
template <class T, class Sum, class Op>
void fold(Op op, char* out, std::span<const char* const> ins, int64_t count, Sum divisor) {
  Sum sums[kBlock], wide[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const auto in = [&](size_t r) { return reinterpret_cast<const T*>(ins[r]) + begin; };
    widen(in(0), sums, n);
    for (size_t r = 1; r < ins.size(); r++) {
      const Sum* next = wide;
      if constexpr (std::is_same_v<T, Sum>)
        next = in(r);
      else
        widen(in(r), wide, n);
      for (int64_t i = 0; i < n; i++) sums[i] = op(sums[i], next[i]);
    }
    if (divisor != Sum(1))
      for (int64_t i = 0; i < n; i++) sums[i] = sums[i] / divisor;
    narrow(sums, reinterpret_cast<T*>(out) + begin, n);
  }
}

using Fold = void (*)(WireOp, char*, std::span<const char* const>, int64_t);

template <class T, class Sum>
void fold_ordered(WireOp op, char* out, std::span<const char* const> ins, int64_t count) {
  const auto plus = [](Sum a, Sum b) { return static_cast<Sum>(a + b); };
  const auto times = [](Sum a, Sum b) { return static_cast<Sum>(a * b); };
  switch (op) {
    case WireOp::Sum:
      return fold<T, Sum>(plus, out, ins, count, Sum(1));
    case WireOp::Avg:
      return fold<T, Sum>(plus, out, ins, count, static_cast<Sum>(ins.size()));
    case WireOp::Product:
      return fold<T, Sum>(times, out, ins, count, Sum(1));
    case WireOp::Min:
      return fold<T, Sum>(kMin, out, ins, count, Sum(1));
    case WireOp::Max:
      return fold<T, Sum>(kMax, out, ins, count, Sum(1));
    case WireOp::BitAnd:
    case WireOp::BitOr:
    case WireOp::BitXor:
      if constexpr (std::is_integral_v<T>) {
        if (op == WireOp::BitAnd) return fold<T, Sum>(std::bit_and<Sum>(), out, ins, count, Sum(1));
        if (op == WireOp::BitOr) return fold<T, Sum>(std::bit_or<Sum>(), out, ins, count, Sum(1));
        return fold<T, Sum>(std::bit_xor<Sum>(), out, ins, count, Sum(1));
      }
      break;
  }
}

// For bool a sum is "any" and a product is "all", as elsewhere in LibTorch.
void fold_bool(WireOp op, char* out, std::span<const char* const> ins, int64_t count) {
  const bool any = op == WireOp::Sum || op == WireOp::Max || op == WireOp::BitOr;
  if (op == WireOp::BitXor) return fold<uint8_t, uint8_t>(std::bit_xor<uint8_t>(), out, ins, count, 1);
  if (any) return fold<uint8_t, uint8_t>(std::bit_or<uint8_t>(), out, ins, count, 1);
  fold<uint8_t, uint8_t>(std::bit_and<uint8_t>(), out, ins, count, 1);
}

template <class T, class Sum = T>
void fold_complex(WireOp op, char* out, std::span<const char* const> ins, int64_t count) {
  const auto plus = [](Sum a, Sum b) { return a + b; };
  const auto times = [](Sum a, Sum b) { return a * b; };
  if (op == WireOp::Product) return fold<T, Sum>(times, out, ins, count, Sum(1));
  fold<T, Sum>(plus, out, ins, count, op == WireOp::Avg ? Sum(static_cast<float>(ins.size())) : Sum(1));
}

enum class DtypeClass : uint8_t { Float, Integer, Bool, Complex };
struct DtypeRow {
  c10::ScalarType dtype;
  DtypeClass is;
  Fold fold;
};
constexpr DtypeRow kDtypes[] = {
    {c10::kFloat, DtypeClass::Float, fold_ordered<float, float>},
    {c10::kDouble, DtypeClass::Float, fold_ordered<double, double>},
    {c10::kBFloat16, DtypeClass::Float, fold_ordered<c10::BFloat16, float>},
    {c10::kHalf, DtypeClass::Float, fold_ordered<c10::Half, float>},
    {c10::kLong, DtypeClass::Integer, fold_ordered<int64_t, int64_t>},
    {c10::kInt, DtypeClass::Integer, fold_ordered<int32_t, int32_t>},
    {c10::kShort, DtypeClass::Integer, fold_ordered<int16_t, int16_t>},
    {c10::kChar, DtypeClass::Integer, fold_ordered<int8_t, int8_t>},
    {c10::kByte, DtypeClass::Integer, fold_ordered<uint8_t, uint8_t>},
    {c10::kUInt16, DtypeClass::Integer, fold_ordered<uint16_t, uint16_t>},
    {c10::kUInt32, DtypeClass::Integer, fold_ordered<uint32_t, uint32_t>},
    {c10::kUInt64, DtypeClass::Integer, fold_ordered<uint64_t, uint64_t>},
    {c10::kFloat8_e4m3fn, DtypeClass::Float, fold_ordered<c10::Float8_e4m3fn, float>},
    {c10::kFloat8_e4m3fnuz, DtypeClass::Float, fold_ordered<c10::Float8_e4m3fnuz, float>},
    {c10::kFloat8_e5m2, DtypeClass::Float, fold_ordered<c10::Float8_e5m2, float>},
    {c10::kFloat8_e5m2fnuz, DtypeClass::Float, fold_ordered<c10::Float8_e5m2fnuz, float>},
    {c10::kBool, DtypeClass::Bool, fold_bool},
    {c10::kComplexFloat, DtypeClass::Complex, fold_complex<c10::complex<float>>},
    {c10::kComplexHalf, DtypeClass::Complex, fold_complex<c10::complex<c10::Half>, c10::complex<float>>},
    {c10::kComplexDouble, DtypeClass::Complex, fold_complex<c10::complex<double>>},
};

const DtypeRow* find(c10::ScalarType dtype) {
  for (const DtypeRow& row : kDtypes)
    if (row.dtype == dtype) return &row;
  return nullptr;
}

}  // namespace

void check_reducible(WireOp op, c10::ScalarType dtype) {
  constexpr const char* kOps[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  const DtypeRow* row = find(dtype);
  const bool ordered = op == WireOp::Min || op == WireOp::Max, bits = op >= WireOp::BitAnd;
  const bool known = row && op <= WireOp::BitXor && !(row->is == DtypeClass::Complex && (ordered || bits)) &&
                     !(row->is == DtypeClass::Float && bits) &&
                     !(op == WireOp::Avg && (row->is == DtypeClass::Integer || row->is == DtypeClass::Bool));
  TESSERA_CHECK(known, UsageError, "cannot reduce ", dtype, " with ",
                op <= WireOp::BitXor ? kOps[static_cast<size_t>(op)] : "this op",
                "; cast the tensor to a dtype that supports it first");
}

void reduce(WireOp op, c10::ScalarType dtype, char* out, std::span<const char* const> ins, int64_t count) {
  find(dtype)->fold(op, out, ins, count);
}

}  // namespace tessera::comm::region

#pragma once
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>

// Which of LibTorch's matrix product (MKL) and tiled_product() is faster for a shape on this machine.
namespace tessera::compiler::codegen {

// out (m, n) = a (m, k) @ b (k, n) with this number of threads; which operands are transposed in memory.
struct ProductShape {
  int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false, b_transposed = false;
  int64_t threads = 1;
  auto operator<=>(const ProductShape&) const = default;
};
// "512x256x1024 nt 1": m, n, k; n or t for each operand; threads.
std::ostream& operator<<(std::ostream& out, const ProductShape& shape);
std::optional<ProductShape> parse_product_shape(const std::string& text);  // none for other text

// Times both on a shape, alternately, and remembers the answer: in the process, and in the file "products" of the
// kernel cache folder, for the processor and the version of LibTorch. Where the folder cannot be used, each process
// measures for itself.
bool tiled_product_is_faster(const ProductShape& shape);

}  // namespace tessera::compiler::codegen

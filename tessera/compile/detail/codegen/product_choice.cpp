#include "tessera/compile/detail/codegen/product_choice.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/compile/detail/codegen/private_files.h"
#include "tessera/compile/detail/codegen/system_compiler.h"
#include "tessera/numerics/detail/vector/tiled_product.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <limits>
#include <map>
#include <mutex>
#include <ostream>
#include <sstream>

namespace tessera::compiler::codegen {
namespace {

constexpr int kRepetitions = 7;
constexpr double kPreferTiles = 1.05;  // a tie on a busy machine must not decide for MKL: tiles add biases for free

at::Tensor example_matrix(int64_t rows, int64_t columns, bool transposed) {
  return transposed ? at::ones({columns, rows}).t() : at::ones({rows, columns});
}

// The processor time of this thread: on a busy machine, the time of day measures other processes. Threads of a product
// have equal shares, and this thread waits actively for the others.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

bool measure(const ProductShape& shape) {
  const OpModesOff modes_off;
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto a = example_matrix(shape.m, shape.k, shape.a_transposed);
  const auto b = example_matrix(shape.k, shape.n, shape.b_transposed);
  auto out = at::empty({shape.m, shape.n});
  double best[2] = {std::numeric_limits<double>::max(), std::numeric_limits<double>::max()};
  for (int i = 0; i <= kRepetitions; i++)
    for (const bool tiled : {false, true}) {
      const auto begin = cpu_seconds();
      if (tiled)
        numerics::tiled_product(out, a, b);
      else
        at::mm_out(out, a, b);
      if (i > 0) best[tiled] = std::min(best[tiled], cpu_seconds() - begin);  // the first run sets up the library
    }
  return best[true] < kPreferTiles * best[false];
}

using ProductChoices = std::map<ProductShape, bool>;

// The first line names the machine, each other line is "SHAPE: tiled" or "SHAPE: mm".
const std::string& first_line() {
  static const auto* line = new std::string([] {
    auto model = processor_model();
    std::replace(model.begin(), model.end(), '\n', ' ');
    return c10::str("tessera products 3, LibTorch ", TORCH_VERSION, ", ", model);
  }());
  return *line;
}

void read_choices(const std::string& path, ProductChoices& choices) {
  const auto file = read_private_file(path);
  if (!file.bytes) return;
  std::istringstream in(*file.bytes);
  std::string line;
  if (!std::getline(in, line) || line != first_line()) return;
  while (std::getline(in, line)) {
    const auto colon = line.find(": ");
    const auto shape = colon == std::string::npos ? std::nullopt : parse_product_shape(line.substr(0, colon));
    const auto answer = shape ? line.substr(colon + 2) : "";
    if (answer == "tiled" || answer == "mm") choices.try_emplace(*shape, answer == "tiled");
  }
}

// Adds what other processes have written. A file that is written at the same time may lose entries: they are measured
// again.
void write_choices(const std::string& path, ProductChoices choices) {
  read_choices(path, choices);
  std::ostringstream text;
  text << first_line() << "\n";
  for (const auto& [shape, tiled] : choices) text << shape << ": " << (tiled ? "tiled" : "mm") << "\n";
  const auto part = c10::str(path, ".", getpid());
  std::remove(part.c_str());
  write_private_file(part, text.str());
  if (std::rename(part.c_str(), path.c_str()) != 0) std::remove(part.c_str());
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const ProductShape& shape) {
  return out << shape.m << "x" << shape.n << "x" << shape.k << " "
             << "nt"[shape.a_transposed] << "nt"[shape.b_transposed] << " " << shape.threads;
}

std::optional<ProductShape> parse_product_shape(const std::string& text) {
  ProductShape shape;
  long long m = 0, n = 0, k = 0, threads = 0;
  char a = 0, b = 0;
  int end = 0;
  if (std::sscanf(text.c_str(), "%lldx%lldx%lld %c%c %lld%n", &m, &n, &k, &a, &b, &threads, &end) != 6) return {};
  shape = {m, n, k, a == 't', b == 't', threads};
  const bool valid = static_cast<size_t>(end) == text.size() && (a == 'n' || a == 't') && (b == 'n' || b == 't');
  return valid ? std::optional(shape) : std::nullopt;
}

bool tiled_product_is_faster(const ProductShape& shape) {
  static std::mutex mutex;
  static auto* by_file = new std::map<std::string, ProductChoices>;  // "": not in a file
  const std::lock_guard lock(mutex);
  std::string path;
  try {
    path = private_folder(kernel_cache_folder(), "codegen: the kernel cache folder") + "/products";
  } catch (const UsageError&) {  // generate_kernels() warns about it
  }
  const auto [known, is_new] = by_file->try_emplace(path);
  auto& choices = known->second;
  if (is_new && !path.empty()) read_choices(path, choices);
  const auto found = choices.find(shape);
  if (found != choices.end()) return found->second;
  const bool tiled = choices[shape] = measure(shape);
  try {
    if (!path.empty()) write_choices(path, choices);
  } catch (const UsageError&) {  // a full disk: measured again in the next process
  }
  return tiled;
}

}  // namespace tessera::compiler::codegen

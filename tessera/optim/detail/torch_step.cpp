#include "tessera/optim/detail/torch_step.h"

#include "tessera/base/error.h"

#include <sys/mman.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>

namespace tessera::optim::detail {
namespace {

using LossClosure = torch::optim::Optimizer::LossClosure;

TorchStepHandler*& handler() {
  thread_local TorchStepHandler* it = nullptr;
  return it;
}

// How the memory at an address is protected now, as PROT_ flags; nothing if that cannot be read.
std::optional<int> protection_of(const void* address) {
  std::ifstream maps("/proc/self/maps");  // 7f31c000-7f31f000 r--p ...
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string flags;
    std::istringstream text(line);
    if (!(text >> std::hex >> begin >> dash >> end >> flags) || at < begin || at >= end) continue;
    return (flags[0] == 'r' ? PROT_READ : 0) | (flags[1] == 'w' ? PROT_WRITE : 0) | (flags[2] == 'x' ? PROT_EXEC : 0);
  }
  return std::nullopt;
}

// A member function gets its object as the first argument (Itanium C++ ABI).
template <class Torch>
struct StepEntry {
  using Step = at::Tensor (*)(Torch*, LossClosure);
  static inline Step of_libtorch = nullptr;

  static at::Tensor call(Torch* self, LossClosure closure) {
    if (handler())
      if (auto result = handler()->step(*self, closure)) return *std::move(result);
    return of_libtorch(self, std::move(closure));
  }

  // The table of virtual functions: an object starts with its address, and a pointer to a virtual member function is
  // the offset of its entry, plus 1.
  static void exchange(Torch&& object) {
    at::Tensor (Torch::*step)(LossClosure) = &Torch::step;
    uintptr_t offset = 0;
    char* table = nullptr;
    std::memcpy(&offset, &step, sizeof(offset));
    std::memcpy(static_cast<void*>(&table), static_cast<const void*>(&object), sizeof(table));
    TESSERA_CHECK(offset % 2 == 1, InternalError, "compile: step() of an optimizer is not virtual");
    auto* entry = table + offset - 1;
    std::memcpy(reinterpret_cast<void*>(&of_libtorch), entry, sizeof(of_libtorch));
    const auto replacement = &call;
    const auto protection = protection_of(entry);
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = reinterpret_cast<uintptr_t>(entry) / page * page;
    auto* pages = reinterpret_cast<void*>(first);  // NOLINT(performance-no-int-to-ptr)
    const auto bytes = reinterpret_cast<uintptr_t>(entry) + sizeof(replacement) - first;
    // If the system forbids it, captured optimizers are refused, because two traces of such a step differ.
    if (!protection || mprotect(pages, bytes, *protection | PROT_WRITE) != 0) return;
    std::memcpy(entry, reinterpret_cast<const void*>(&replacement), sizeof(replacement));
    mprotect(pages, bytes, *protection);
  }
};

template <class Torch, class Options>
void exchange_step(const Options& options) {
  StepEntry<Torch>::exchange(Torch(std::vector<at::Tensor>{}, options));
}

void exchange_all() {
  namespace to = torch::optim;
  exchange_step<to::SGD>(to::SGDOptions(0.1));
  exchange_step<to::Adam>(to::AdamOptions());
  exchange_step<to::AdamW>(to::AdamWOptions());
  exchange_step<to::RMSprop>(to::RMSpropOptions());
  exchange_step<to::Adagrad>(to::AdagradOptions());
  exchange_step<to::LBFGS>(to::LBFGSOptions());
}

}  // namespace

TorchStepHandler::TorchStepHandler() : outer_(handler()) {
  static std::once_flag once;
  std::call_once(once, exchange_all);
  handler() = this;
}
TorchStepHandler::~TorchStepHandler() { handler() = outer_; }

}  // namespace tessera::optim::detail

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

#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
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

// Writes one entry of a table of virtual functions. Other threads may call it meanwhile: they get the old or the new
// function, and both do the step. If the system forbids the write, nothing changes, and captured optimizers are
// refused, because two traces of such a step differ.
void write_entry(void** entry, void* function) {
  const auto protection = protection_of(entry);
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* begin = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(entry) / page * page);  // NOLINT
  // An entry is aligned, so it is in one page.
  if (!protection || mprotect(begin, page, *protection | PROT_WRITE) != 0) return;
  std::atomic_ref<void*>(*entry).store(function, std::memory_order_release);
  mprotect(begin, page, *protection);
}

// A member function gets its object as the first argument (Itanium C++ ABI).
template <class Torch>
struct StepEntry {
  using Step = at::Tensor (*)(Torch*, LossClosure);
  static inline std::atomic<Step> of_libtorch = nullptr;

  static at::Tensor call(Torch* self, LossClosure closure) {
    if (handler())
      if (auto result = handler()->step(*self, closure)) return *std::move(result);
    return of_libtorch.load(std::memory_order_acquire)(self, std::move(closure));
  }

  // The table of virtual functions: an object starts with its address, and a pointer to a virtual member function is
  // the offset of its entry, plus 1.
  static void** entry_of(Torch&& object) {
    at::Tensor (Torch::*step)(LossClosure) = &Torch::step;
    uintptr_t offset = 0;
    char* table = nullptr;
    std::memcpy(&offset, &step, sizeof(offset));
    std::memcpy(static_cast<void*>(&table), static_cast<const void*>(&object), sizeof(table));
    TESSERA_CHECK(offset % sizeof(void*) == 1, InternalError, "compile: step() of an optimizer is not virtual");
    return reinterpret_cast<void**>(table + offset - 1);
  }

  // The destructor restores the entry: the library may be unloaded before LibTorch is.
  explicit StepEntry(Torch&& object) : entry(entry_of(std::move(object))) {
    of_libtorch.store(reinterpret_cast<Step>(*entry), std::memory_order_release);
    write_entry(entry, reinterpret_cast<void*>(&call));
  }
  ~StepEntry() { write_entry(entry, reinterpret_cast<void*>(of_libtorch.load(std::memory_order_acquire))); }
  StepEntry(const StepEntry&) = delete;
  void** entry;
};

void exchange_all() {
  namespace to = torch::optim;
  static const StepEntry<to::SGD> sgd(to::SGD(std::vector<at::Tensor>{}, to::SGDOptions(0.1)));
  static const StepEntry<to::Adam> adam(to::Adam(std::vector<at::Tensor>{}, to::AdamOptions()));
  static const StepEntry<to::AdamW> adamw(to::AdamW(std::vector<at::Tensor>{}, to::AdamWOptions()));
  static const StepEntry<to::RMSprop> rmsprop(to::RMSprop(std::vector<at::Tensor>{}, to::RMSpropOptions()));
  static const StepEntry<to::Adagrad> adagrad(to::Adagrad(std::vector<at::Tensor>{}, to::AdagradOptions()));
  static const StepEntry<to::LBFGS> lbfgs(to::LBFGS(std::vector<at::Tensor>{}, to::LBFGSOptions()));
}

}  // namespace

TorchStepHandler::TorchStepHandler() : outer_(handler()) {
  static const bool exchanged = (exchange_all(), true);
  (void)exchanged;
  handler() = this;
}
TorchStepHandler::~TorchStepHandler() { handler() = outer_; }

}  // namespace tessera::optim::detail

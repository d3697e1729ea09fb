#include "tessera/nn/detail/engine.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/python_process.h"
#include "tessera/nn/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera::detail {
namespace {

Unpack ask(const at::Tensor& t, Accepts claims) {
  for (size_t i = packers().size(); i-- > 0;) {
    const auto packer = packers()[i];  // a copy: packing may open scopes of its own
    if (packer->claims != claims) continue;
    auto unpack = packer->pack(t);
    TESSERA_CHECK(unpack || claims == Accepts::SomeTensors, UsageError, "a packer with Accepts::AllTensors declined a tensor of sizes ",
                  t.sizes(), "; make it Accepts::SomeTensors, or keep what it does not want in a VersionedTensor");
    if (unpack) return unpack;
  }
  return {};
}

// One saved tensor while packers are on. Autograd asks for this before it shows the tensor, so it cannot tell whether
// anybody will take it.
struct PackedTensor final : torch::autograd::SavedVariableHooks {
  void call_pack_hook(const at::Tensor& t) override {
    unpack_ = ask(t, Accepts::SomeTensors);
    if (!unpack_) unpack_ = ask(t, Accepts::AllTensors);
    if (!unpack_) unpack_ = [kept = VersionedTensor(t)] { return kept.get(); };
  }
  at::Tensor call_unpack_hook() override { return unpack_(); }

  Unpack unpack_;
};

thread_local constinit const BackwardScope::Take* taken_by = nullptr;

struct HookedEngine final : torch::autograd::Engine {
  using Engine = torch::autograd::Engine;
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& gradients, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    const auto run = [&](bool keep) {
      return Engine::execute(roots, gradients, keep, create_graph, accumulate_grad, outputs);
    };
    if (C10_LIKELY(!taken_by || torch::autograd::get_current_graph_task_id() != -1)) return run(keep_graph);
    return (*taken_by)({roots, gradients, keep_graph, create_graph, accumulate_grad, outputs, run});
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (packers().empty()) return nullptr;
    return std::make_unique<PackedTensor>();
  }
};

torch::autograd::Engine& our_engine() {
  static auto* engine = new HookedEngine;  // never destroyed: device threads wait in it until the process ends
  return *engine;
}

bool install() {
  if (python_torch_loaded()) return false;
  torch::autograd::set_default_engine_stub(&our_engine);
  return true;
}
[[maybe_unused]] const bool installed_at_load = install();

}  // namespace

BackwardScope::BackwardScope(Take take) : take_(std::move(take)), outer_(taken_by) {
  require_engine();
  taken_by = &take_;
}
BackwardScope::~BackwardScope() { taken_by = outer_; }
const BackwardScope::Take* BackwardScope::current() { return taken_by; }

void require_engine() {
  if (C10_LIKELY(&torch::autograd::Engine::get_default_engine() == &our_engine())) return;
  TESSERA_CHECK(install(), UsageError,
                "saved-tensor hooks and activation checkpointing need Tessera's autograd engine, and Python's torch, "
                "which has its own, is loaded in this process; run Tessera in a process of its own");
}

}  // namespace tessera::detail

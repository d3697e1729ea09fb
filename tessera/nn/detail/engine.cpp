#include "tessera/nn/detail/engine.h"

#include "tessera/base/detail/python_process.h"
#include "tessera/base/error.h"
#include "tessera/nn/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <optional>

namespace tessera::detail {
namespace {

// The result of the innermost packer of this kind that accepts `t`. Empty: no packer accepts it.
Unpack pack_with(Accepts kind, const at::Tensor& t) {
  for (size_t i = packers().size(); i-- > 0;) {
    const auto packer = packers()[i];  // a copy: pack() may open scopes
    if (packer->accepts != kind) continue;
    auto unpack = packer->pack(t);
    TESSERA_CHECK(unpack || kind == Accepts::SomeTensors, UsageError,
                  "a packer with Accepts::AllTensors declined a tensor of sizes ", t.sizes(),
                  "; use Accepts::SomeTensors, or save the tensors that it does not pack in a VersionedTensor");
    if (unpack) return unpack;
  }
  return {};
}

// One saved tensor while packers are active. Autograd creates this object before it passes the tensor, so it is not yet
// known whether a packer accepts the tensor.
struct PackedTensor final : torch::autograd::SavedVariableHooks {
  void call_pack_hook(const at::Tensor& t) override {
    unpack_ = pack_with(Accepts::SomeTensors, t);
    if (!unpack_) unpack_ = pack_with(Accepts::AllTensors, t);
    if (!unpack_) saved_.emplace(t);
  }
  at::Tensor call_unpack_hook() override { return saved_ ? saved_->get() : unpack_(); }

  Unpack unpack_;
  std::optional<VersionedTensor> saved_;  // of a tensor that no packer accepts
};

thread_local constinit const BackwardScope::Handler* backward_handler = nullptr;

struct HookedEngine final : torch::autograd::Engine {
  using Engine = torch::autograd::Engine;
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& gradients, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    const auto run = [&](bool keep) {
      return Engine::execute(roots, gradients, keep, create_graph, accumulate_grad, outputs);
    };
    if (C10_LIKELY(!backward_handler || torch::autograd::get_current_graph_task_id() != -1)) return run(keep_graph);
    return (*backward_handler)({roots, gradients, keep_graph, create_graph, accumulate_grad, outputs, run});
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (packers().empty()) return nullptr;
    return std::make_unique<PackedTensor>();
  }
};

torch::autograd::Engine& hooked_engine() {
  static auto* engine = new HookedEngine;  // never destroyed: device threads wait in it until the process ends
  return *engine;
}

bool install_engine() {
  if (python_torch_loaded()) return false;
  torch::autograd::set_default_engine_stub(&hooked_engine);
  return true;
}
[[maybe_unused]] const bool installed_at_load = install_engine();

}  // namespace

BackwardScope::BackwardScope(Handler handler) : handler_(std::move(handler)), outer_(backward_handler) {
  require_engine();
  backward_handler = &handler_;
}
BackwardScope::~BackwardScope() { backward_handler = outer_; }
const BackwardScope::Handler* BackwardScope::current() { return backward_handler; }

void require_engine() {
  if (C10_LIKELY(&torch::autograd::Engine::get_default_engine() == &hooked_engine())) return;
  TESSERA_CHECK(install_engine(), UsageError,
                "saved-tensor hooks and activation checkpointing need Tessera's autograd engine, but Python's torch, "
                "which has its own engine, is loaded in this process; run Tessera in a separate process");
}

}  // namespace tessera::detail

#include "tessera/dtensor/detail/dispatch.h"

#include "tessera/base/detail/deferred_key.h"
#include "tessera/base/error.h"
#include "tessera/tracing/detail/tracer_key.h"
#include "tessera/dtensor/detail/arguments.h"
#include "tessera/dtensor/detail/gather_at_use.h"
#include "tessera/dtensor/detail/redistribute_inputs.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/function.h>

#include <optional>

namespace tessera::detail {

using c10::IValue;
using propagate::ArgKind;
using propagate::Decision;
using propagate::Key;
using propagate::OpEntry;
using torch::jit::Stack;

OpObserver*& op_observer() {
  static thread_local OpObserver* observer = nullptr;
  return observer;
}

namespace {
thread_local constinit const void* forward_again_in = nullptr;  // the node inside of which a forward is run again
const void* current_node() { return torch::autograd::get_current_node().get(); }
}  // namespace

bool in_backward() {
  const void* node = current_node();
  return node != nullptr && node != forward_again_in;
}

ForwardInBackward::ForwardInBackward() : before_(forward_again_in) { forward_again_in = current_node(); }
ForwardInBackward::~ForwardInBackward() { forward_again_in = before_; }

// ---- choose ----

propagate::Call make_call(const OpEntry& entry, c10::ArrayRef<IValue> args, MeshState* mesh) {
  propagate::Call call{entry, args, {}, mesh, in_backward()};
  for_each_tensor(entry, args, [&](const at::Tensor& t, int arg, int element) {
    const auto* spec = spec_or_null(t);
    TESSERA_CHECK(!spec || spec->mesh.state() == mesh, UsageError, entry.name, ": argument ", arg, " '",
                  name_of(entry, arg), "' lies on mesh(", spec->mesh, "), an earlier one on mesh(",
                  DeviceMesh(c10::intrusive_ptr<MeshState>::reclaim_copy(mesh)),
                  "). All tensors of an op must lie on one mesh: take full_tensor() of one and distribute_tensor it on "
                  "the other's.");
    call.tensors.push_back({spec, spec ? c10::IntArrayRef(spec->sizes) : t.sizes(),
                            spec ? c10::IntArrayRef(spec->strides) : t.strides(), t.scalar_type(), arg, element});
  });
  return call;
}

Decision& choose(const OpEntry& entry, c10::ArrayRef<IValue> args, const Key& key) {
  TESSERA_CHECK(key.mesh() != nullptr, InternalError, entry.name, ": dispatched here without a distributed tensor");
  auto& cache = propagate::decision_cache(*key.mesh());
  const auto hash = key.hash();
  if (auto* found = cache.find(entry, key, hash)) return *found;
  TESSERA_CHECK(!key.mesh()->coordinate.empty(), UsageError, entry.name, ": this rank is not part of mesh(",
                DeviceMesh(c10::intrusive_ptr<MeshState>::reclaim_copy(key.mesh())),
                "), so it holds no piece to compute with; call ops on the mesh's ranks only");
  auto decision = propagate::decide(make_call(entry, args, key.mesh()));
  decision->hash = hash;
  for (uint32_t i = 0; i < key.size(); i++) decision->key.push_back(key[i]);
  return cache.insert(entry, std::move(decision));
}

const SpecRef& learn(const OpEntry& entry, Decision::Out& out, const at::Tensor& local, const MeshState& mesh) {
  if (!matches(out.spec.get(), local)) {
    const DeviceMesh handle(c10::intrusive_ptr<MeshState>::reclaim_copy(const_cast<MeshState*>(&mesh)));
    out.spec = intern(handle, out.placements, out.sizes, out.strides, local.scalar_type(), local.device());
    TESSERA_CHECK(local.sizes() == c10::IntArrayRef(out.spec->local_sizes), InternalError, entry.name,
                  ": the rule says ", out.spec->describe(), ", this rank's piece ",
                  c10::IntArrayRef(out.spec->local_sizes), "; the op gave ", local.sizes());
  }
  return out.spec;
}

namespace {

// The local of the i-th tensor of the call, in the place the decision wants it.
class Locals {
 public:
  Locals(const OpEntry& entry, c10::ArrayRef<IValue> args, const Decision& decision) {
    if (C10_LIKELY(!decision.redistributes)) return;
    int index = 0;
    for_each_tensor(entry, args, [&](const at::Tensor& t, int, int) {
      if (decision.want[index]) moves_.push_back({&t, decision.want[index].get(), index, {}});
      index++;
    });
    move_all(entry, moves_);
  }
  // To be called once for each tensor, in order.
  at::Tensor next(const at::Tensor& t) {
    const int index = index_++;
    if (next_move_ < moves_.size() && moves_[next_move_].index == index) return moves_[next_move_++].local;
    return is_dtensor(t) ? local_of(t) : t;
  }

 private:
  std::vector<Moved> moves_;
  size_t next_move_ = 0;
  int index_ = 0;
};

// Puts locals in the place of distributed tensors. Returns their keys.
c10::DispatchKeySet unwrap(const OpEntry& entry, IValue* args, const Decision& decision) {
  Locals locals(entry, c10::ArrayRef<IValue>(args, entry.num_args()), decision);
  c10::DispatchKeySet keys;
  auto take = [&](const at::Tensor& t) {
    auto local = locals.next(t);
    keys = keys | local.key_set();
    return local;
  };
  for (size_t i = 0; i < entry.num_args(); i++) {
    auto& v = args[i];
    switch (entry.kinds[i]) {
      case ArgKind::Tensor:
        if (v.isTensor() && v.toTensor().defined()) v = IValue(take(v.toTensor()));
        break;
      case ArgKind::TensorList: {
        if (!v.isList()) break;
        c10::List<at::Tensor> list;
        const auto old = v.toListRef();
        list.reserve(old.size());
        for (const auto& x : old) list.push_back(x.toTensor().defined() ? take(x.toTensor()) : at::Tensor());
        v = std::move(list);
        break;
      }
      case ArgKind::OptionalTensorList: {
        if (!v.isList()) break;
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& x : v.toListRef())
          list.push_back(x.isTensor() && x.toTensor().defined() ? std::optional(take(x.toTensor())) : std::nullopt);
        v = std::move(list);
        break;
      }
      case ArgKind::Scalar:
      case ArgKind::ScalarList:
      case ArgKind::Other:
        break;
    }
  }
  return keys;
}

// ---- run_local ----

void run_local(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (!below_autograd()) below.emplace();
  keys = keys & kKeysBelowAutograd;
  // Redispatch skips the thread's mode keys and every key of the locals but the backend's: only where neither matters.
  if (keys.highestFunctionalityKey() == c10::DispatchKey::Dense && !tracing())
    op.redispatchBoxed(keys, stack);
  else
    op.callBoxed(stack);
}

// ---- wrap_outputs ----

// What an op writes, to be returned as it was given, and to have its version moved on.
struct Written {
  c10::SmallVector<IValue, 2> args;
  Written(const OpEntry& entry, const IValue* stack_args) {
    for (int w : entry.writes) args.push_back(stack_args[w]);
  }
  void bump(const OpEntry& entry) const {
    for (const auto& v : args) {
      if (v.isTensor() && v.toTensor().defined()) {
        bump_local(v.toTensor());
      } else if (v.isList()) {
        for (const auto& x : v.toListRef()) {
          if (!x.isTensor() || !x.toTensor().defined()) continue;
          bump_local(x.toTensor());
          if (entry.writes_list && !x.toTensor().is_inference()) x.toTensor().unsafeGetTensorImpl()->bump_version();
        }
      }
    }
  }
  static void bump_local(const at::Tensor& t) {
    if (is_dtensor(t) && !meta_of(t).local.is_inference()) meta_of(t).local.unsafeGetTensorImpl()->bump_version();
  }
};

void remember_view(Decision& decision, const at::Tensor& in, const at::Tensor& out) {
  if (decision.view || decision.redistributes || !in.has_storage() || !out.has_storage() ||
      !out.storage().is_alias_of(in.storage()))
    return;
  Decision::ViewShape view;
  view.in_sizes.assign(in.sizes().begin(), in.sizes().end());
  view.in_strides.assign(in.strides().begin(), in.strides().end());
  view.sizes.assign(out.sizes().begin(), out.sizes().end());
  view.strides.assign(out.strides().begin(), out.strides().end());
  view.offset = out.storage_offset() - in.storage_offset();
  decision.view = std::move(view);
}

// The wrapper of a view: keys of its base (inference mode asks for that), and a local that shares its base's version.
at::Tensor wrap_view(at::Tensor local, const SpecRef& spec, const at::Tensor& base_local,
                     c10::DispatchKeySet base_keys) {
  if (!local.is_inference() && !base_local.is_inference())
    local.unsafeGetTensorImpl()->set_version_counter(base_local.unsafeGetTensorImpl()->version_counter());
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);  // CopySlices must not take as_strided
  auto out = wrap(std::move(local), spec);
  static_cast<DTensorImpl*>(out.unsafeGetTensorImpl())->adopt_keys(base_keys);
  return out;
}

struct Outputs {
  const OpEntry& entry;
  Decision& decision;
  const MeshState& mesh;
  size_t next = 0;
  std::vector<const TensorSpec*> specs = {};  // for an observer

  // Without a rule every input was whole, and so is every result.
  Decision::Out& out_for(const at::Tensor& local) {
    if (decision.kind == Decision::Kind::Replicated) {
      if (decision.outs.size() <= next) decision.outs.emplace_back();
      auto& out = decision.outs[next++];
      out.sizes.assign(local.sizes().begin(), local.sizes().end());
      out.strides.assign(local.strides().begin(), local.strides().end());
      out.placements.assign(mesh.shape.size(), Replicate());
      return out;
    }
    TESSERA_CHECK(next < decision.outs.size(), InternalError, entry.name, ": the rule tells of ", decision.outs.size(),
                  " results, the op gave more");
    return decision.outs[next++];
  }

  SpecRef spec_for(const at::Tensor& local) {
    auto spec = learn(entry, out_for(local), local, mesh);
    specs.push_back(spec.get());
    return spec;
  }
};

void wrap_outputs(Outputs& outputs, Stack* stack, const Written& written, const at::Tensor& view_base,
                  const at::Tensor& base_local) {
  const auto& entry = outputs.entry;
  const size_t first = stack->size() - entry.num_returns();
  for (size_t i = 0; i < entry.num_returns(); i++) {
    auto& v = (*stack)[first + i];
    if (entry.return_of[i] >= 0) {
      v = written.args[entry.return_of[i]];
    } else if (v.isTensor()) {
      if (!v.toTensor().defined()) {
        outputs.next++;
        continue;
      }
      auto local = std::move(v).toTensor();
      auto spec = outputs.spec_for(local);
      if (entry.view && view_base.defined()) {
        if (entry.num_returns() == 1) remember_view(outputs.decision, base_local, local);
        v = wrap_view(std::move(local), spec, base_local, view_base.key_set());
      } else {
        v = wrap(std::move(local), std::move(spec));
      }
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& local : v.toTensorList()) {
        auto spec = outputs.spec_for(local);
        list.push_back(entry.view ? wrap_view(local, spec, base_local, view_base.key_set())
                                  : wrap(local, std::move(spec)));
      }
      v = std::move(list);
    }
  }
}

struct Observed {
  OpObserver* observer = op_observer();
  Observed(const OpEntry& entry, c10::ArrayRef<IValue> args) {
    if (C10_LIKELY(!observer)) return;
    std::vector<const TensorSpec*> in;
    for_each_tensor(entry, args, [&](const at::Tensor& t, int, int) { in.push_back(spec_or_null(t)); });
    observer->begin_op(entry, in);
  }
  void end(c10::ArrayRef<const TensorSpec*> out) {
    if (C10_UNLIKELY(observer != nullptr)) observer->end_op(out);
    observer = nullptr;
  }
  ~Observed() { end({}); }
};

// t_, squeeze_ and their like change the geometry of what they are called on. Its local may be shared with other
// tensors, so an alias of it is changed and put in its place.
void run_inplace_view(const OpEntry& entry, Decision& decision, Stack* stack, IValue* args, const MeshState& mesh) {
  const at::Tensor self = args[0].toTensor();
  TESSERA_CHECK(!decision.redistributes, ShardingError, entry.name, " on ", meta_of(self).spec->describe(),
                " would have to communicate; use the form that returns a new tensor.");
  at::Tensor local = local_of(self);
  auto alias = at::Tensor(
      local.unsafeGetTensorImpl()->shallow_copy_and_detach(local.unsafeGetTensorImpl()->version_counter(), true));
  args[0] = alias;
  if (decision.special) {
    for (const auto& v : decision.special_args) stack->push_back(v);
    run_local(*decision.special, alias.key_set(), stack);
    alias = stack->back().toTensor();
  } else {
    run_local(entry.op, alias.key_set(), stack);
  }
  auto& out = decision.outs.at(0);
  replace(self, alias, learn(entry, out, alias, mesh));
  stack->back() = self;
}

}  // namespace

void dispatch_boxed(const OpEntry& entry, Stack* stack) {
  IValue* args = stack->data() + (stack->size() - entry.num_args());
  const c10::ArrayRef<IValue> view(args, entry.num_args());

  if (gather_marked(entry, args)) {  // all plain now
    c10::DispatchKeySet keys;
    for_each_tensor(entry, view, [&](const at::Tensor& t, int, int) { keys = keys | t.key_set(); });
    return run_local(entry.op, keys, stack);
  }
  PromotedPlain promoted(entry, args);
  Observed observed(entry, view);
  Key key;
  read_boxed(entry, view, key);
  auto& decision = choose(entry, view, key);
  const auto& mesh = *key.mesh();
  promoted.convert_written();

  if (decision.kind == Decision::Kind::Decompose) {
    if (const auto op = decision.special) return op->callBoxed(stack);  // a copy: ops below may empty the cache
    return entry.op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
  }
  for (const auto& fix : decision.fixes) args[fix.first] = fix.second;
  if (entry.inplace_view) return run_inplace_view(entry, decision, stack, args, mesh);

  const Written written(entry, args);
  at::Tensor view_base;
  if (entry.view) view_base = args[0].toTensor();
  const auto keys = unwrap(entry, args, decision);
  at::Tensor base_local;
  if (entry.view) base_local = args[0].toTensor();

  if (decision.special) {
    for (const auto& v : decision.special_args) stack->push_back(v);
    run_local(*decision.special, keys, stack);
  } else {
    run_local(entry.op, keys, stack);
  }
  if (!entry.writes.empty()) written.bump(entry);
  Outputs outputs{entry, decision, mesh};
  wrap_outputs(outputs, stack, written, view_base, base_local);
  observed.end(outputs.specs);
}

}  // namespace tessera::detail

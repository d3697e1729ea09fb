#include "tessera/dtensor/dispatch.h"

#include "tessera/base/error.h"
#include "tessera/base/tracer_key.h"
#include "tessera/comm/ops.h"
#include "tessera/dtensor/policy.h"
#include "tessera/redistribute/execute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/node.h>

#include <bit>
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

bool in_backward() { return torch::autograd::get_current_node() != nullptr; }

namespace {

// Calls f(tensor, arg, element) for every defined tensor among the arguments.
template <class F>
void for_each_tensor(const OpEntry& entry, c10::ArrayRef<IValue> args, F f) {
  for (size_t i = 0; i < entry.num_args(); i++) {
    const int arg = static_cast<int>(i);
    switch (entry.kinds[i]) {
      case ArgKind::Tensor:
        if (args[i].isTensor() && args[i].toTensor().defined()) f(args[i].toTensor(), arg, -1);
        break;
      case ArgKind::TensorList:
      case ArgKind::OptionalTensorList: {
        if (!args[i].isList()) break;  // None
        int element = 0;
        for (const auto& v : args[i].toListRef()) {
          if (v.isTensor() && v.toTensor().defined()) f(v.toTensor(), arg, element);
          element++;
        }
        break;
      }
      case ArgKind::Scalar:
      case ArgKind::Other: break;
    }
  }
}

// ---- read ----

void read_static(Reader& reader, const OpEntry& entry, const IValue& v, bool by_value) {
  if (v.isInt()) return reader.read(v.toInt());
  if (v.isNone()) return reader.key.push(propagate::kNone);
  if (v.isBool()) return reader.read(v.toBool());
  if (v.isDouble()) return by_value ? reader.key.push(std::bit_cast<uint64_t>(v.toDouble())) : reader.read(v.toDouble());
  if (v.isList()) {
    const auto list = v.toListRef();
    reader.key.push(list.size());
    for (const auto& x : list) read_static(reader, entry, x, by_value);
    return;
  }
  if (v.isString()) return reader.key.push(std::hash<std::string>{}(v.toStringRef()));
  if (v.isDevice())
    return reader.key.push(static_cast<uint64_t>(v.toDevice().type()) << 8 | static_cast<uint8_t>(v.toDevice().index()));
  if (v.isComplexDouble()) return reader.key.push(3);
  if (v.isGenerator()) return reader.key.push(4);
  if (v.isTensor()) return reader.read(v.toTensor());
  TESSERA_FAIL(InternalError, entry.name, ": no way to key an argument of kind ", v.tagKind());
}

// The same words that Reader makes of typed arguments.
void read_boxed(const OpEntry& entry, c10::ArrayRef<IValue> args, Key& key) {
  Reader reader{key, {}};
  if (entry.view) key.push(in_backward());
  const auto* rule = entry.rule();
  const bool by_value = rule && rule->reads_scalars;
  for (size_t i = 0; i < entry.num_args(); i++) {
    const auto& v = args[i];
    switch (entry.kinds[i]) {
      case ArgKind::Tensor:
        if (v.isTensor())
          reader.read(v.toTensor());
        else
          key.push(propagate::kUndefined);
        break;
      case ArgKind::TensorList:
      case ArgKind::OptionalTensorList: {
        if (!v.isList()) {
          key.push(propagate::kNone);
          break;
        }
        const auto list = v.toListRef();
        key.push(list.size());
        for (const auto& x : list)
          if (x.isTensor())
            reader.read(x.toTensor());
          else
            key.push(propagate::kUndefined);
        break;
      }
      case ArgKind::Scalar:
        if (v.isNone()) {
          key.push(propagate::kNone);
        } else {
          reader.read(v.toScalar());
          if (by_value && !v.isComplexDouble()) key.push(std::bit_cast<uint64_t>(v.toScalar().toDouble()));
        }
        break;
      case ArgKind::Other: read_static(reader, entry, v, by_value); break;
    }
  }
}

// ---- plain tensors among distributed ones ----

const std::string& arg_name(const OpEntry& entry, int arg) { return entry.op.schema().arguments()[arg].name(); }

// A plain tensor of more than one element is refused, with two exceptions: inside ImplicitReplication, and in backward,
// where autograd's own formulas build tensors of global size, the same on every rank. Those become Replicate where they
// stand, so that an in-place op on one gives a distributed result.
bool promote_plain(const OpEntry& entry, c10::ArrayRef<IValue> args) {
  bool found = false;
  const TensorSpec* like = nullptr;
  for_each_tensor(entry, args, [&](const at::Tensor& t, int, int) {
    if (const auto* spec = spec_or_null(t))
      like = spec;
    else
      found |= t.numel() != 1;
  });
  if (!found || !like) return false;
  const bool allowed = implicit_replication() || in_backward();
  for_each_tensor(entry, args, [&](const at::Tensor& t, int arg, int element) {
    if (is_dtensor(t) || t.numel() == 1) return;
    TESSERA_CHECK(allowed, UsageError, entry.name, ": argument ", arg, " '", arg_name(entry, arg), "'",
                  element >= 0 ? c10::str(", element ", element, ",") : std::string(), " is a plain tensor of sizes ", t.sizes(),
                  " next to distributed ones such as ", like->describe(),
                  ". Make it one with distribute_tensor or DTensor::from_local, or open a scope ImplicitReplication "
                  "to take plain tensors as Replicate.");
    Placements whole(like->placements.size(), Replicate());
    at::AutoDispatchBelowADInplaceOrView below;
    auto spec = intern(like->mesh, whole, t.sizes(), t.strides(), t.scalar_type(), t.device());
    auto local = at::Tensor(t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
    t.unsafeGetTensorImpl()->shallow_copy_from(wrap(std::move(local), std::move(spec)).getIntrusivePtr());
  });
  return true;
}

}  // namespace

// ---- choose ----

propagate::Call make_call(const OpEntry& entry, c10::ArrayRef<IValue> args, MeshState* mesh) {
  propagate::Call call{entry, args, {}, mesh, in_backward()};
  for_each_tensor(entry, args, [&](const at::Tensor& t, int arg, int element) {
    const auto* spec = spec_or_null(t);
    TESSERA_CHECK(!spec || spec->mesh.state() == mesh, UsageError, entry.name, ": argument ", arg, " '", arg_name(entry, arg),
                  "' lies on mesh(", spec->mesh, "), an earlier one on mesh(",
                  DeviceMesh(c10::intrusive_ptr<MeshState>::reclaim_copy(mesh)),
                  "). All tensors of an op must lie on one mesh: redistribute(mesh, placements) one of them.");
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
  auto decision = propagate::decide(make_call(entry, args, key.mesh()));
  decision->hash = hash;
  for (uint32_t i = 0; i < key.size(); i++) decision->key.push_back(key[i]);
  return cache.insert(entry, std::move(decision));
}

const SpecRef& learn(const OpEntry& entry, Decision::Out& out, const at::Tensor& local, const MeshState& mesh) {
  if (!matches(out.spec.get(), local)) {
    const DeviceMesh handle(c10::intrusive_ptr<MeshState>::reclaim_copy(const_cast<MeshState*>(&mesh)));
    out.spec = intern(handle, out.placements, out.sizes, out.strides, local.scalar_type(), local.device());
    TESSERA_CHECK(local.sizes() == c10::IntArrayRef(out.spec->local_sizes), InternalError, entry.name, ": the rule says ",
                  out.spec->describe(), ", this rank's piece ", c10::IntArrayRef(out.spec->local_sizes), "; the op gave ",
                  local.sizes());
  }
  return out.spec;
}

namespace {

// ---- redistribute_inputs ----

struct Moved {
  const at::Tensor* tensor;
  const TensorSpec* to;
  int index;  // among the call's tensors
  at::Tensor local;
};

// A value that is used again is worth keeping in its new place. A whole parameter is not: it would stay gathered.
bool worth_remembering(const at::Tensor& t, const TensorSpec& from) {
  return !t.is_inference() && (from.has_partial() || !t.is_leaf());
}

bool recall(const at::Tensor& t, Moved& moved) {
  auto& meta = meta_of(t);
  if (!meta.remembered.defined() || meta.remembered_spec.get() != moved.to || meta.local.is_inference() ||
      meta.remembered_version != meta.local._version())
    return false;
  moved.local = meta.remembered;
  return true;
}

void remember(const at::Tensor& t, const Moved& moved, const TensorSpec& from) {
  auto& meta = meta_of(t);
  if (!worth_remembering(t, from) || meta.local.is_inference() || moved.local.is_same(meta.local)) return;
  meta.remembered = moved.local;
  meta.remembered_spec = SpecRef::reclaim_copy(moved.to);
  meta.remembered_version = meta.local._version();
}

void move_all(const OpEntry& entry, std::vector<Moved>& moves) {
  std::vector<Moved*> open;
  for (auto& move : moves)
    if (!recall(*move.tensor, move)) open.push_back(&move);
  if (open.empty()) return;
  std::vector<const redistribute::Plan*> plans;
  std::vector<at::Tensor> locals;
  std::vector<const TensorSpec*> from, to;
  for (auto* move : open) {
    const auto& spec = *meta_of(*move->tensor).spec;
    const auto& plan = redistribute::plan_between(spec, *move->to);
    if (plan.communicates() && comm_policy() != CommPolicy::Allow)
      check_policy(c10::str(entry.name, " redistributes its tensor ", move->index, ", ", spec.describe(), ", to ",
                            to_string(move->to->placements), "."));
    if (auto* observer = op_observer()) observer->redistributes(move->index, spec, *move->to, false);
    plans.push_back(&plan);
    locals.push_back(local_of(*move->tensor));
    from.push_back(&spec);
    to.push_back(move->to);
  }
  std::vector<redistribute::Local> results;
  if (open.size() == 1)
    results.push_back(redistribute::execute(*plans[0], locals[0], *from[0], *to[0]));
  else
    results = redistribute::execute_many(plans, locals, from, to);
  for (size_t i = 0; i < open.size(); i++) {
    if (results[i].pending) comm::wait(results[i].tensor, results[i].pending);
    open[i]->local = std::move(results[i].tensor);
    remember(*open[i]->tensor, *open[i], *from[i]);
  }
  if (auto* observer = op_observer()) observer->redistributed();
}

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
      case ArgKind::Other: break;
    }
  }
  return keys;
}

// ---- run_local ----

void run_local(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (!below_autograd()) below.emplace();
  keys = keys & c10::after_ADInplaceOrView_keyset;
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
  if (decision.view || decision.redistributes || !in.has_storage() || !out.has_storage() || !out.storage().is_alias_of(in.storage()))
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
at::Tensor wrap_view(at::Tensor local, const SpecRef& spec, const at::Tensor& base_local, c10::DispatchKeySet base_keys) {
  if (!local.is_inference() && !base_local.is_inference())
    local.unsafeGetTensorImpl()->set_version_counter(base_local.unsafeGetTensorImpl()->version_counter());
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);  // CopySlices must not take as_strided
  auto out = wrap(std::move(local), spec);
  static_cast<StampImpl*>(out.unsafeGetTensorImpl())->adopt_keys(base_keys);
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
    if (decision.kind == Decision::Kind::Whole) {
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
        list.push_back(entry.view ? wrap_view(local, spec, base_local, view_base.key_set()) : wrap(local, std::move(spec)));
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
  auto alias = at::Tensor(local.unsafeGetTensorImpl()->shallow_copy_and_detach(
      local.unsafeGetTensorImpl()->version_counter(), true));
  args[0] = alias;
  run_local(entry.op, alias.key_set(), stack);
  auto& out = decision.outs.at(0);
  replace(self, alias, learn(entry, out, alias, mesh));
  stack->back() = self;
}

}  // namespace

void dispatch_boxed(const OpEntry& entry, Stack* stack) {
  IValue* args = stack->data() + (stack->size() - entry.num_args());
  const c10::ArrayRef<IValue> view(args, entry.num_args());

  promote_plain(entry, view);
  Observed observed(entry, view);
  Key key;
  read_boxed(entry, view, key);
  auto& decision = choose(entry, view, key);
  const auto& mesh = *key.mesh();

  if (decision.kind == Decision::Kind::Decompose) {
    if (decision.special) return decision.special->callBoxed(stack);
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

#include "tessera/dtensor/detail/dispatch.h"

#include "tessera/base/detail/deferred_key.h"
#include "tessera/base/detail/same_storage.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/detail/all_gather_on_use.h"
#include "tessera/dtensor/detail/arguments.h"
#include "tessera/dtensor/detail/gathered_view.h"
#include "tessera/dtensor/detail/redistribute_inputs.h"
#include "tessera/dtensor/detail/rng_state.h"
#include "tessera/dtensor/policy.h"
#include "tessera/dtensor/random.h"
#include "tessera/tracing/detail/tracer_key.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/function.h>

#include <optional>

namespace tessera::detail {

using c10::IValue;
using propagate::Decision;
using propagate::Key;
using propagate::OpEntry;
using torch::jit::Stack;

namespace {

// Reports one op to the debug mode of this thread, if there is one: begin_op, then end_op, also if the op throws.
class OpObserverScope {
 public:
  OpObserverScope() = default;
  OpObserverScope(const OpObserverScope&) = delete;
  ~OpObserverScope() {
    if (C10_UNLIKELY(observer_ != nullptr)) observer_->end_op(outputs_);
  }
  void begin(const OpEntry& entry, c10::ArrayRef<IValue> args) {
    if (C10_LIKELY(!op_observer())) return;
    std::vector<const TensorSpec*> inputs;
    for_each_tensor(entry, args, [&](const at::Tensor& t, int, int) { inputs.push_back(spec_or_null(t)); });
    op_observer()->begin_op(entry, inputs);
    observer_ = op_observer();
  }
  void add_output(const TensorSpec* spec) {
    if (C10_UNLIKELY(observer_ != nullptr)) outputs_.push_back(spec);
  }

 private:
  OpObserver* observer_ = nullptr;
  std::vector<const TensorSpec*> outputs_;
};

// An argument that the op writes although its schema does not declare it, or a redistributed copy of an argument that
// it writes.
struct HiddenWrite {
  at::Tensor given, local;
  const TensorSpec* spec;  // of `local` if it is a redistributed copy, else null
};

// One boxed call during the five steps. `args` are the op's arguments at the top of the stack. The steps change them in
// place: DTensors become local tensors, and run_local() replaces the arguments by the results.
struct BoxedCall {
  const OpEntry& entry;
  Stack* stack;
  IValue* args;
  PromotedArgs promoted;
  OpObserverScope observer;
  Key key;
  c10::SmallVector<IValue, 2> written;        // arguments that the op writes, before they become local tensors
  at::Tensor view_base, view_base_local;      // of a view op: the tensor that it aliases, and its local tensor
  c10::intrusive_ptr<GatheredBase> gathered;  // of a view op that redistributed its base
  std::vector<HiddenWrite> hidden_writes;
  c10::DispatchKeySet local_keys;  // of all local tensors

  BoxedCall(const OpEntry& entry, Stack* stack)
      : entry(entry), stack(stack), args(stack->data() + (stack->size() - entry.num_args())) {}
  c10::ArrayRef<IValue> arguments() const { return c10::ArrayRef<IValue>(args, entry.num_args()); }
};

void run_on_plain_tensors(BoxedCall& call);
void read(BoxedCall& call);
Decision& choose(BoxedCall& call);
void decompose(BoxedCall& call, const Decision& decision);
void run_functional_form(BoxedCall& call, const Decision& decision);
void run_inplace_view(BoxedCall& call, Decision& decision);
void redistribute_inputs(BoxedCall& call, const Decision& decision);
void run_local(BoxedCall& call, const Decision& decision);
void wrap_outputs(BoxedCall& call, Decision& decision);

}  // namespace

void dispatch_boxed(const OpEntry& entry, Stack* stack) {
  BoxedCall call(entry, stack);
  if (all_gather_marked_inputs(entry, call.args)) return run_on_plain_tensors(call);

  read(call);
  Decision& decision = choose(call);
  if (decision.kind == Decision::Kind::Decompose) return decompose(call, decision);
  if (decision.kind == Decision::Kind::Functional) return run_functional_form(call, decision);
  if (entry.inplace_view) return run_inplace_view(call, decision);
  redistribute_inputs(call, decision);
  run_local(call, decision);
  wrap_outputs(call, decision);
}

// ---- read ----

namespace {

void read(BoxedCall& call) {
  call.promoted = promote_plain_tensors(call.entry, call.args);
  call.observer.begin(call.entry, call.arguments());
  read_boxed(call.entry, call.arguments(), call.key);
}

}  // namespace

// ---- choose ----

propagate::Call make_call(const OpEntry& entry, c10::ArrayRef<IValue> args, MeshState* mesh) {
  propagate::Call call{entry, args, {}, mesh, in_backward()};
  for_each_tensor(entry, args, [&](const at::Tensor& t, int arg, int element) {
    const auto* spec = spec_or_null(t);
    TESSERA_CHECK(!spec || spec->mesh.state() == mesh, UsageError, entry.name, ": argument ", arg, " '",
                  name_of(entry, arg), "' is on mesh(", spec->mesh, "), an earlier one on mesh(",
                  DeviceMesh(c10::intrusive_ptr<MeshState>::reclaim_copy(mesh)),
                  "). All tensors of an op must be on one mesh: call full_tensor() on one of them and "
                  "distribute_tensor the result on the mesh of the other.");
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
                "), so it has no local tensor to compute with; call ops on the mesh's ranks only");
  auto decision = propagate::choose_strategy(make_call(entry, args, key.mesh()));
  decision->hash = hash;
  for (uint32_t i = 0; i < key.size(); i++) decision->key.push_back(key[i]);
  return cache.insert(entry, std::move(decision));
}

namespace {

Decision& choose(BoxedCall& call) {
  auto& decision = detail::choose(call.entry, call.arguments(), call.key);
  convert_written(call.promoted, call.args);
  return decision;
}

// ---- redistribute_inputs ----

// Static arguments such as sizes become those of the local tensors.
void replace_static_arguments(BoxedCall& call, const Decision& decision) {
  for (const auto& [arg, value] : decision.fixes) call.args[arg] = value;
}

// A random op without a kernel of its own runs on replicated tensors. Every rank gives it a generator with the same
// seed, so that replicas draw equal numbers.
void set_equal_generator(BoxedCall& call) {
  const auto& entry = call.entry;
  const auto arg = entry.op.schema().argumentIndexWithName("generator");
  TESSERA_CHECK(arg, ShardingError, entry.name,
                " has no argument 'generator', so replicas would draw different numbers. Call it on full_tensor(), or "
                "inside local_map.");
  TESSERA_CHECK(call.args[*arg].isNone(), UsageError, entry.name,
                " on a distributed tensor was given a generator. The values are counter-based and the same on every "
                "mesh: omit the generator and call tessera::manual_seed");
  auto& state = random_state(*call.key.mesh());
  static thread_local const auto generator = at::detail::createCPUGenerator();
  seed_generator(generator, state.seed, state.offset++);
  call.args[*arg] = generator;
}

// Communicates. Returns the redistributed inputs in the order of the call's tensors.
std::vector<RedistributedInput> redistribute_where_needed(const BoxedCall& call, const Decision& decision) {
  std::vector<RedistributedInput> inputs;
  int index = 0;
  for_each_tensor(call.entry, call.arguments(), [&](const at::Tensor& t, int, int) {
    if (decision.want[index]) inputs.push_back({&t, decision.want[index].get(), index, {}});
    index++;
  });
  redistribute_all(call.entry, inputs);
  return inputs;
}

// Replaces every tensor argument by its local tensor, after redistribution where the decision needs other placements.
void redistribute_inputs(BoxedCall& call, const Decision& decision) {
  const auto& entry = call.entry;
  replace_static_arguments(call, decision);
  if (C10_UNLIKELY(entry.random && decision.kind == Decision::Kind::Replicated)) set_equal_generator(call);
  for (int arg : entry.writes) call.written.push_back(call.args[arg]);
  if (entry.view) call.view_base = call.args[0].toTensor();

  std::vector<RedistributedInput> redistributed;
  if (C10_UNLIKELY(decision.redistributes)) redistributed = redistribute_where_needed(call, decision);
  auto next = redistributed.begin();
  int index = 0;
  replace_tensors(entry, call.args, [&](const at::Tensor& t, int arg) {
    const bool is_next = next != redistributed.end() && next->index == index;
    const auto* to = is_next ? next->to : nullptr;
    index++;
    at::Tensor local = is_next ? std::move((next++)->local) : local_or_self(t);
    call.local_keys = call.local_keys | local.key_set();
    const bool hidden = entry.hidden != nullptr && entry.is_written_hidden(arg, call.arguments());
    if (C10_UNLIKELY(hidden || (to != nullptr && decision.kind == Decision::Kind::Replicated && entry.is_written(arg))))
      call.hidden_writes.push_back({t, local, to});
    return local;
  });
  if (!entry.view) return;
  call.view_base_local = call.args[0].toTensor();
  if (C10_UNLIKELY(decision.redistributes) && decision.want[0] && !entry.may_copy)
    call.gathered = make_gathered_base(call.view_base, call.view_base_local, decision.want[0]);
}

// ---- run_local ----

void run_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (!below_autograd()) below.emplace();
  keys = keys & kKeysBelowAutograd;
  // redispatch is faster than call. It skips the thread's mode keys and all keys of the local tensors except the
  // backend key, so it is used only where these do not matter.
  if (keys.highestFunctionalityKey() == c10::DispatchKey::Dense && !tracing())
    op.redispatchBoxed(keys, stack);
  else
    op.callBoxed(stack);
}

// Runs the op, or the op that the decision names instead of it.
void run_chosen_op(const OpEntry& entry, const Decision& decision, c10::DispatchKeySet keys, Stack* stack) {
  if (!decision.special) return run_below_autograd(entry.op, keys, stack);
  for (const auto& v : decision.special_args) stack->push_back(v);
  run_below_autograd(*decision.special, keys, stack);
}

void after_writes(const OpEntry& entry, c10::ArrayRef<IValue> written) {
  for (const auto& v : written) {
    if (v.isTensor() && v.toTensor().defined()) {
      after_write(v.toTensor());
    } else if (v.isList()) {
      for (const auto& x : v.toListRef()) {
        if (!x.isTensor() || !x.toTensor().defined()) continue;
        after_write(x.toTensor());
        if (entry.writes_list && !x.toTensor().is_inference()) x.toTensor().unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

// Runs the op on the local tensors. The results replace the arguments on the stack.
void run_local(BoxedCall& call, const Decision& decision) {
  run_chosen_op(call.entry, decision, call.local_keys, call.stack);
  if (!call.written.empty()) after_writes(call.entry, call.written);
  for (const auto& write : call.hidden_writes)
    if (write.spec)
      copy_from_placements(write.given, write.local, *write.spec);
    else
      after_write(write.given);
}

// ---- wrap_outputs ----

// Stores the geometry of a local view, so that a typed kernel can make the view again without running the op.
void cache_view(Decision& decision, const at::Tensor& in, const at::Tensor& out) {
  if (decision.view || decision.redistributes || !in.has_storage() || !out.has_storage() || !same_storage(out, in))
    return;
  Decision::ViewShape view;
  view.in_sizes.assign(in.sizes().begin(), in.sizes().end());
  view.in_strides.assign(in.strides().begin(), in.strides().end());
  view.sizes.assign(out.sizes().begin(), out.sizes().end());
  view.strides.assign(out.strides().begin(), out.strides().end());
  view.offset = out.storage_offset() - in.storage_offset();
  decision.view = std::move(view);
}

// The DTensor of a view. It has the dispatch keys of its base, as inference mode requires. Its local tensor shares the
// version counter of the base's local tensor.
at::Tensor wrap_view(const BoxedCall& call, at::Tensor local, const SpecRef& spec) {
  share_version_counter(call.view_base_local, local);
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);  // CopySlices must not take as_strided
  auto out = wrap(std::move(local), spec);
  static_cast<DTensorImpl*>(out.unsafeGetTensorImpl())->adopt_keys(call.view_base.key_set());
  meta_of(out).gathered = call.gathered ? call.gathered : meta_of(call.view_base).gathered;
  return out;
}

// Output number `index` of the decision. An op without a rule runs on replicated inputs, so its outputs are replicated.
Decision::Out& decided_output(const BoxedCall& call, Decision& decision, size_t index, const at::Tensor& local) {
  TESSERA_CHECK(local.layout() == at::kStrided, ShardingError, call.entry.name, " returns a tensor of layout ",
                local.layout(), "; a DTensor has strided local tensors. Call it on to_local() or full_tensor().");
  if (decision.kind == Decision::Kind::Replicated) {
    if (decision.outs.size() <= index) decision.outs.emplace_back();
    auto& out = decision.outs[index];
    out.sizes.assign(local.sizes().begin(), local.sizes().end());
    out.strides.assign(local.strides().begin(), local.strides().end());
    out.placements.assign(call.key.mesh()->shape.size(), Replicate());
    return out;
  }
  TESSERA_CHECK(index < decision.outs.size(), InternalError, call.entry.name, ": the rule declares ",
                decision.outs.size(), " results, the op returned more");
  return decision.outs[index];
}

// Replaces the results on the stack by DTensors. An argument that the op wrote and returns is returned as it was given.
void wrap_outputs(BoxedCall& call, Decision& decision) {
  const auto& entry = call.entry;
  size_t next = 0;
  auto next_spec = [&](const at::Tensor& local) {
    auto spec = output_spec(entry, decided_output(call, decision, next++, local), local, *call.key.mesh());
    call.observer.add_output(spec.get());
    return spec;
  };
  const size_t first = call.stack->size() - entry.num_returns();
  for (size_t i = 0; i < entry.num_returns(); i++) {
    auto& v = (*call.stack)[first + i];
    if (entry.return_of[i] >= 0) {
      v = call.written[entry.return_of[i]];
    } else if (v.isTensor()) {
      if (!v.toTensor().defined()) {
        next++;
        continue;
      }
      auto local = std::move(v).toTensor();
      auto spec = next_spec(local);
      if (entry.view && call.view_base.defined()) {
        if (entry.num_returns() == 1) cache_view(decision, call.view_base_local, local);
        v = wrap_view(call, std::move(local), spec);
      } else {
        v = wrap(std::move(local), std::move(spec));
      }
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& local : v.toTensorList()) {
        auto spec = next_spec(local);
        list.push_back(entry.view ? wrap_view(call, local, spec) : wrap(local, std::move(spec)));
      }
      v = std::move(list);
    }
  }
}

// ---- calls that do not take all five steps ----

// After all_gather_marked_inputs() every argument is plain, and so are the results.
void run_on_plain_tensors(BoxedCall& call) {
  c10::DispatchKeySet keys;
  for_each_tensor(call.entry, call.arguments(), [&](const at::Tensor& t, int, int) { keys = keys | t.key_set(); });
  run_below_autograd(call.entry.op, keys, call.stack);
}

// The op runs as a sequence of other ops on the DTensors.
void decompose(BoxedCall& call, const Decision& decision) {
  if (const auto op = decision.special) return op->callBoxed(call.stack);  // a copy: ops below may clear the cache
  call.entry.op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *call.stack);
}

void copy_result(const OpEntry& entry, const at::Tensor& to, const at::Tensor& result) {
  if (!to.defined() || !result.defined()) return;
  TESSERA_CHECK(to.sizes() == result.sizes(), UsageError, entry.name, ": the result has sizes ", result.sizes(),
                ", but the tensor that it writes has ", to.sizes(),
                "; pass a tensor of these sizes, or use the form that returns a new tensor");
  TORCH_CHECK(at::canCast(result.scalar_type(), to.scalar_type()), "result type ", result.scalar_type(),
              " can't be cast to the desired output type ", to.scalar_type());
  to.copy_(result);
}

// The functional form runs on the DTensors, and its last results are copied into the arguments that the op writes.
void run_functional_form(BoxedCall& call, const Decision& decision) {
  const auto& entry = call.entry;
  const auto functional = *decision.special;  // a copy: ops below may clear the cache
  for (int arg : entry.writes) call.written.push_back(call.args[arg]);
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (!below_autograd()) below.emplace();
  const ImplicitReplication factories_give_plain_results;
  Stack results;
  for (const auto& argument : functional.schema().arguments()) {
    const auto given = entry.op.schema().argumentIndexWithName(argument.name());
    const bool is_dtype_of_factory = !given && argument.name() == "dtype";
    if (given)
      results.push_back(call.args[*given]);
    else if (is_dtype_of_factory && call.written[0].isTensor())
      results.emplace_back(call.written[0].toTensor().scalar_type());
    else
      results.push_back(*argument.default_value());
  }
  functional.callBoxed(results);
  size_t next_written = results.size() - call.written.size();
  for (const bool out : {true, false})  // out= arguments come first
    for (size_t i = 0; i < call.written.size(); i++) {
      if (entry.op.schema().arguments()[entry.writes[i]].is_out() != out) continue;
      const auto& to = call.written[i];
      const auto& result = results[next_written++];
      if (to.isTensor()) {
        copy_result(entry, to.toTensor(), result.toTensor());
      } else if (to.isTensorList()) {
        const auto targets = to.toTensorVector(), values = result.toTensorVector();
        TESSERA_CHECK(targets.size() == values.size(), UsageError, entry.name, ": there are ", values.size(),
                      " results, but ", targets.size(), " tensors to write them to");
        for (size_t e = 0; e < targets.size(); e++) copy_result(entry, targets[e], values[e]);
      }
    }
  torch::jit::drop(*call.stack, entry.num_args());
  size_t next = 0;
  for (const auto written : entry.return_of)
    call.stack->push_back(written >= 0 ? call.written[written] : std::move(results[next++]));
}

// t_, squeeze_ and similar ops change the geometry of `self`. Other tensors may share its local tensor, so the op
// changes an alias, and the alias becomes the new local tensor of `self`.
void run_inplace_view(BoxedCall& call, Decision& decision) {
  replace_static_arguments(call, decision);
  const at::Tensor self = call.args[0].toTensor();
  TESSERA_CHECK(!decision.redistributes, ShardingError, call.entry.name, " on ", meta_of(self).spec->describe(),
                " would have to communicate; use the form that returns a new tensor.");
  at::Tensor local = local_of(self);
  auto alias = at::Tensor(
      local.unsafeGetTensorImpl()->shallow_copy_and_detach(local.unsafeGetTensorImpl()->version_counter(), true));
  call.args[0] = alias;
  run_chosen_op(call.entry, decision, alias.key_set(), call.stack);
  if (decision.special) alias = call.stack->back().toTensor();
  replace(self, alias, output_spec(call.entry, decision.outs.at(0), alias, *call.key.mesh()));
  call.stack->back() = self;
}

}  // namespace

// ---- shared with the typed kernels ----

const SpecRef& output_spec(const OpEntry& entry, Decision::Out& out, const at::Tensor& local, const MeshState& mesh) {
  if (!spec_matches(out.spec.get(), local)) {
    const DeviceMesh handle(c10::intrusive_ptr<MeshState>::reclaim_copy(const_cast<MeshState*>(&mesh)));
    out.spec = intern(handle, out.placements, out.sizes, out.strides, local.scalar_type(), local.device());
    TESSERA_CHECK(local.sizes() == c10::IntArrayRef(out.spec->local_sizes), InternalError, entry.name,
                  ": the rule predicts ", out.spec->describe(), " with local sizes ",
                  c10::IntArrayRef(out.spec->local_sizes), "; the op returned ", local.sizes());
  }
  return out.spec;
}

OpObserver*& op_observer() {
  static thread_local OpObserver* observer = nullptr;
  return observer;
}

namespace {
thread_local constinit const void* recomputing_node = nullptr;  // the autograd node that recomputes a forward
const void* current_node() { return torch::autograd::get_current_node().get(); }
}  // namespace

bool in_backward() {
  const void* node = current_node();
  return node != nullptr && node != recomputing_node;
}

RecomputeScope::RecomputeScope() : before_(recomputing_node) { recomputing_node = current_node(); }
RecomputeScope::~RecomputeScope() { recomputing_node = before_; }

}  // namespace tessera::detail

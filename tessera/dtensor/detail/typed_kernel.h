#pragma once
#include "tessera/base/detail/deferred_key.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/tracing/detail/tracer_key.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <c10/core/AutogradState.h>

#include <tuple>

// A kernel with the op's C++ signature: one template instance per signature, with the op bound at run time. On a cache
// hit without redistribution it allocates only the result. It passes all other calls to the boxed kernel. It is 0.1 to
// 0.3 us faster than the boxed kernel.
namespace tessera::detail {

// The argument for the local op: a tensor becomes its local tensor, any other value stays. Borrows, does not own.
template <class T>
struct LocalArg {
  const T& value;
  explicit LocalArg(const T& v) : value(v) {}
  const T& get() const { return value; }
  c10::DispatchKeySet keys() const { return {}; }
};
template <>
struct LocalArg<at::Tensor> {
  const at::Tensor& value;
  explicit LocalArg(const at::Tensor& t) : value(is_dtensor(t) ? local_of(t) : t) {}
  at::Tensor& get() const { return const_cast<at::Tensor&>(value); }
  c10::DispatchKeySet keys() const { return value.key_set(); }
};

template <>
struct LocalArg<std::optional<at::Tensor>> {
  std::optional<at::Tensor> value;
  explicit LocalArg(const std::optional<at::Tensor>& t) : value(t && is_dtensor(*t) ? local_of(*t) : t) {}
  const std::optional<at::Tensor>& get() const { return value; }
  c10::DispatchKeySet keys() const { return value ? value->key_set() : c10::DispatchKeySet(); }
};

// A list of local tensors, without changes of reference counts.
class BorrowedList {
 public:
  void add(const at::Tensor& t) {
    const auto& local = is_dtensor(t) ? local_of(t) : t;
    keys_ = keys_ | local.key_set();
    impls_.push_back(local.unsafeGetTensorImpl());
  }
  at::TensorList list() const {
    static_assert(sizeof(at::Tensor) == sizeof(c10::TensorImpl*));
    return {reinterpret_cast<const at::Tensor*>(impls_.data()), impls_.size()};
  }
  c10::DispatchKeySet keys() const { return keys_; }

 private:
  c10::SmallVector<c10::TensorImpl*, 16> impls_;
  c10::DispatchKeySet keys_;
};
template <>
struct LocalArg<at::TensorList> {
  BorrowedList locals;
  explicit LocalArg(const at::TensorList& list) {
    for (const auto& t : list) locals.add(t);
  }
  LocalArg(const LocalArg&) = delete;
  at::TensorList get() const { return locals.list(); }
  c10::DispatchKeySet keys() const { return locals.keys(); }
};
template <>
struct LocalArg<at::ITensorListRef> {
  BorrowedList locals;
  mutable std::optional<at::TensorList> list;
  mutable std::optional<at::ITensorListRef> ref;
  explicit LocalArg(const at::ITensorListRef& given) {
    for (const auto& t : given) locals.add(t);
  }
  LocalArg(const LocalArg&) = delete;
  const at::ITensorListRef& get() const {
    list.emplace(locals.list());
    ref.emplace(*list);
    return *ref;
  }
  c10::DispatchKeySet keys() const { return locals.keys(); }
};

C10_ALWAYS_INLINE bool equal_ints(c10::IntArrayRef a, c10::IntArrayRef b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); i++)
    if (a[i] != b[i]) return false;
  return true;
}

// Makes a local view from its cached geometry, without running the op.
inline at::Tensor make_view(const at::Tensor& base, const propagate::Decision::ViewShape& view) {
  auto* impl = base.unsafeGetTensorImpl();
  auto out = at::detail::make_tensor_base<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(impl->unsafe_storage()),
                                                           impl->key_set(), impl->dtype());
  auto* out_impl = out.unsafeGetTensorImpl();
  out_impl->set_sizes_and_strides(view.sizes, view.strides, impl->storage_offset() + view.offset);
  if (!impl->is_inference()) out_impl->set_version_counter(impl->version_counter());
  return at::Tensor(std::move(out));
}

template <class Signature>
class TypedKernel;

template <class Ret, class... Args>
class TypedKernel<Ret(Args...)> final : public c10::OperatorKernel {
 public:
  explicit TypedKernel(const propagate::OpEntry& entry)
      : entry_(entry),
        op_(entry.op.typed<Ret(Args...)>()),
        boxed_(c10::BoxedKernel::makeFromFunctor(std::make_unique<BoxedOpKernel>(entry))) {}

  Ret operator()(c10::DispatchKeySet keys, Args... args) const {
    if (auto* decision = find(args...)) {
      if constexpr (kMayView)
        if (decision->view) {
          const at::Tensor& base = std::get<0>(std::tie(args...));
          const auto& local = local_of(base);
          if (equal_ints(local.strides(), decision->view->in_strides) &&
              equal_ints(local.sizes(), decision->view->in_sizes)) {
            c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
            auto out = wrap(make_view(local, *decision->view), decision->outs[0].spec);
            static_cast<DTensorImpl*>(out.unsafeGetTensorImpl())->adopt_keys(base.key_set());
            if (C10_UNLIKELY(static_cast<bool>(meta_of(base).gathered))) meta_of(out).gathered = meta_of(base).gathered;
            return out;
          }
        }
      if (decision->simple && !entry_.view) return run(*decision, args...);
    }
    return c10::impl::BoxedKernelWrapper<Ret(Args...)>::call(boxed_, entry_.op, keys, std::forward<Args>(args)...);
  }

 private:
  // The first argument of a view op is the tensor that the result aliases.
  static constexpr bool kMayView =
      std::is_same_v<Ret, at::Tensor> &&
      std::is_same_v<std::decay_t<std::tuple_element_t<0, std::tuple<Args...>>>, at::Tensor>;

  // The cached decision. Null on a cache miss, under an OpObserver and while tracing: the boxed kernel takes over.
  propagate::Decision* find(const Args&... args) const {
    if (C10_UNLIKELY(op_observer() != nullptr || tracing())) return nullptr;
    propagate::Key key;
    Reader reader{key, {}};
    if (entry_.view) key.push(in_backward());
    (reader.read(args), ...);
    if (C10_UNLIKELY(!key.mesh())) return nullptr;
    return propagate::decision_cache(*key.mesh()).find(entry_, key, key.hash());
  }

  Ret run(propagate::Decision& decision, Args... args) const {
    std::tuple<LocalArg<std::decay_t<Args>>...> locals(args...);
    if constexpr (std::is_same_v<Ret, at::Tensor>) {
      return wrap_one(decision, 0, call(locals));
    } else if constexpr (std::is_same_v<Ret, std::tuple<at::Tensor, at::Tensor>>) {
      auto [a, b] = call(locals);
      return {wrap_one(decision, 0, std::move(a)), wrap_one(decision, 1, std::move(b))};
    } else if constexpr (std::is_same_v<Ret, std::vector<at::Tensor>>) {
      auto outs = call(locals);
      for (size_t i = 0; i < outs.size(); i++) outs[i] = wrap_one(decision, i, std::move(outs[i]));
      return outs;
    } else if constexpr (std::is_same_v<Ret, at::Tensor&>) {
      auto& self = std::get<0>(std::forward_as_tuple(args...));
      call(locals);
      after_write(self);
      return self;
    } else {
      static_assert(std::is_void_v<Ret>);
      call(locals);
      bump_lists(std::index_sequence_for<Args...>{}, args...);
    }
  }

  template <class Locals>
  Ret call(Locals& locals) const {
    if (below_autograd()) return call_below(locals);
    at::AutoDispatchBelowADInplaceOrView below;
    return call_below(locals);
  }
  template <class Locals>
  Ret call_below(Locals& locals) const {
    return std::apply(
        [&](auto&... local) -> Ret {
          c10::DispatchKeySet keys;
          ((keys = keys | local.keys()), ...);
          keys = keys & kKeysBelowAutograd;
          if (C10_LIKELY(keys.highestFunctionalityKey() == c10::DispatchKey::Dense))
            return op_.redispatch(keys, local.get()...);
          return op_.call(local.get()...);
        },
        locals);
  }

  at::Tensor wrap_one(propagate::Decision& decision, size_t i, at::Tensor local) const {
    auto& out = decision.outs[i];
    if (C10_LIKELY(spec_matches(out.spec.get(), local))) return wrap(std::move(local), out.spec);
    // The boxed kernel completed the spec on the cache miss. Only a changed default dtype gets here.
    auto spec = output_spec(entry_, out, local, *decision.pinned[0]->mesh.state());
    return wrap(std::move(local), std::move(spec));
  }

  template <size_t... I>
  void bump_lists(std::index_sequence<I...>, const Args&... args) const {
    (bump_list(static_cast<int>(I), args), ...);
  }
  template <class T>
  void bump_list(int arg, const T& value) const {
    if constexpr (std::is_same_v<T, at::TensorList>) {
      if (!entry_.is_written(arg)) return;
      for (const auto& t : value) {
        if (t.is_inference()) continue;
        t.unsafeGetTensorImpl()->bump_version();
        after_write(t);
      }
    }
  }

  const propagate::OpEntry& entry_;
  c10::TypedOperatorHandle<Ret(Args...)> op_;
  c10::BoxedKernel boxed_;
};

}  // namespace tessera::detail

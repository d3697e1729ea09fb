#include "tessera/dtensor/detail/gathered_view.h"
#include "tessera/dtensor/detail/typed_kernel.h"

#include <torch/library.h>

#include <unordered_set>

namespace tessera::detail {
namespace {

using at::Scalar;
using at::Tensor;
using std::optional;

struct HotOps {
  torch::Library& lib;
  std::unordered_set<std::string>& done;

  template <class Signature>
  void op(const char* name) {
    const auto full = std::string("aten::") + name;
    lib.impl(name, TypedKernel<Signature>(propagate::entry_of(full)));
    done.insert(full);
  }
};

// detach shares the local tensor and the spec. It needs no decision.
Tensor detach(const Tensor& t) {
  if (C10_UNLIKELY(op_observer() != nullptr)) {
    const auto* spec = meta_of(t).spec.get();
    op_observer()->begin_op(propagate::entry_of("aten::detach"), {spec});
    op_observer()->end_op({spec});
  }
  if (C10_UNLIKELY(static_cast<bool>(meta_of(t).gathered)) && becomes_grad(t)) {
    auto grad = wrap(local_of(t), meta_of(t).spec);
    meta_of(grad).has_plain_alias = meta_of(t).has_plain_alias;
    return grad;
  }
  return share(t);
}

}  // namespace

// The ops of forward, backward and optimizer in which small models spend most of their dispatch time.
void register_hot_kernels(torch::Library& aten, std::unordered_set<std::string>& done) {
  HotOps hot{aten, done};
  using T = const Tensor&;
  using S = const Scalar&;
  hot.op<Tensor(T, T, S)>("add.Tensor");
  hot.op<Tensor(T, T, S)>("sub.Tensor");
  hot.op<Tensor(T, T)>("mul.Tensor");
  hot.op<Tensor(T, T)>("div.Tensor");
  hot.op<Tensor(T)>("relu");
  hot.op<Tensor(T, c10::string_view)>("gelu");
  hot.op<Tensor(T)>("silu");
  hot.op<Tensor(T, T, S)>("threshold_backward");
  hot.op<Tensor&(Tensor&, T, S)>("add_.Tensor");
  hot.op<Tensor&(Tensor&, T)>("mul_.Tensor");
  // Used by LibTorch's optimizers, once per parameter.
  hot.op<Tensor&(Tensor&, S)>("mul_.Scalar");
  hot.op<Tensor&(Tensor&, S, S)>("add_.Scalar");
  hot.op<Tensor(T, S)>("div.Scalar");
  hot.op<Tensor(T)>("sqrt");
  hot.op<Tensor&(Tensor&, T, T, S)>("addcmul_");
  hot.op<Tensor&(Tensor&, T, T, S)>("addcdiv_");
  hot.op<Tensor(T, optional<at::ScalarType>, optional<at::Layout>, optional<at::Device>, optional<bool>, bool,
                optional<at::MemoryFormat>)>("_to_copy");  // autocast
  hot.op<Tensor(T, T)>("mm");
  hot.op<Tensor(T, T)>("bmm");
  hot.op<Tensor(T, T, T, S, S)>("addmm");
  hot.op<Tensor(T)>("t");
  hot.op<Tensor(T, int64_t, int64_t)>("transpose.int");
  hot.op<Tensor(T, c10::SymIntArrayRef)>("view");
  hot.op<Tensor(T, c10::SymIntArrayRef)>("_unsafe_view");
  hot.op<Tensor(T, c10::SymIntArrayRef, bool)>("expand");
  hot.op<Tensor(T, optional<at::ScalarType>)>("sum");
  hot.op<Tensor(T, at::OptionalIntArrayRef, bool, optional<at::ScalarType>)>("sum.dim_IntList");
  hot.op<Tensor(const at::ITensorListRef&, int64_t)>("cat");
  hot.op<void(at::TensorList, at::TensorList, S)>("_foreach_add_.List");
  hot.op<std::vector<Tensor>(at::TensorList, at::TensorList, S)>("_foreach_add.List");
  hot.op<void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, double,
              double, double, double, double, bool, bool, const optional<Tensor>&, const optional<Tensor>&)>(
      "_fused_adam_");
  hot.op<void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, double,
              double, double, double, double, bool, bool, const optional<Tensor>&, const optional<Tensor>&)>(
      "_fused_adamw_");
  aten.impl("detach", TORCH_FN(detach));
  done.insert("aten::detach");
}

}  // namespace tessera::detail

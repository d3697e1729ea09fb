// A custom op with its own kernel and autograd formula on DTensors: register_sharding() declares its strategies.
//   tessera run -n 4 -- ./example_own_op
#include <tessera/tessera.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <iostream>

namespace ts = tessera;

// my::scale_rows(x, by) multiplies row i of x by by[i].
torch::Tensor scale_rows_kernel(const torch::Tensor& x, const torch::Tensor& by) {
  auto out = torch::empty(x.sizes(), x.options());
  auto from = x.accessor<float, 2>();
  auto factor = by.accessor<float, 1>();
  auto to = out.accessor<float, 2>();
  for (int64_t i = 0; i < x.size(0); i++)
    for (int64_t j = 0; j < x.size(1); j++) to[i][j] = from[i][j] * factor[i];
  return out;
}

torch::Tensor scale_rows(const torch::Tensor& x, const torch::Tensor& by) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("my::scale_rows", "")
                       .typed<torch::Tensor(const torch::Tensor&, const torch::Tensor&)>();
  return op.call(x, by);
}

struct ScaleRows : torch::autograd::Function<ScaleRows> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& by) {
    context->save_for_backward({x, by});
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return scale_rows(x, by);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               const torch::autograd::tensor_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {scale_rows(gradients[0], saved[1]), (gradients[0] * saved[0]).sum(1)};
  }
};

TORCH_LIBRARY(my, m) { m.def("scale_rows(Tensor x, Tensor by) -> Tensor"); }
TORCH_LIBRARY_IMPL(my, CPU, m) { m.impl("scale_rows", scale_rows_kernel); }
TORCH_LIBRARY_IMPL(my, Autograd, m) {
  m.impl("scale_rows", [](const torch::Tensor& x, const torch::Tensor& by) { return ScaleRows::apply(x, by); });
}

int main() {
  // Strategies over one mesh axis: {placements of the inputs}, {placements of the outputs}.
  ts::register_sharding("my::scale_rows", {{{ts::Replicate(), ts::Replicate()}, {ts::Replicate()}},
                                           {{ts::Shard(0), ts::Shard(0)}, {ts::Shard(0)}},
                                           {{ts::Shard(1), ts::Replicate()}, {ts::Shard(1)}},
                                           {{ts::Partial(), ts::Replicate()}, {ts::Partial()}}});
  ts::init();
  auto mesh = ts::init_device_mesh("cpu", {ts::get_world_size()}, {"tp"});
  auto x = torch::arange(48, torch::kFloat).view({8, 6}), by = torch::arange(8, torch::kFloat);

  // Plain tensors, for comparison.
  auto by_plain = by.clone().requires_grad_();
  auto plain = scale_rows(x, by_plain);
  plain.pow(2).sum().backward();

  // DTensors, sharded by rows: the op needs no communication.
  torch::Tensor x_sharded = ts::distribute_tensor(x, mesh, {ts::Shard(0)});
  torch::Tensor by_sharded = ts::distribute_tensor(by, mesh, {ts::Shard(0)}).requires_grad_();
  ts::CommDebugMode mode;
  auto sharded = scale_rows(x_sharded, by_sharded);
  const auto sent = mode.get_total_counts();
  mode.exit();
  sharded.pow(2).sum().backward();

  const bool same = torch::equal(ts::DTensor(sharded).full_tensor(), plain.detach()) &&
                    torch::allclose(ts::DTensor(by_sharded.grad()).full_tensor(), by_plain.grad());
  if (mesh.get_rank() == 0)
    std::cout << (same ? "same" : "different") << " result and gradient, " << sent << " collectives\n"
              << ts::DTensor(sharded) << "\n";  // DTensor(f32[8, 6][S(0)] on mesh(tp=4))
  ts::destroy();
  return same && sent == 0 ? 0 : 1;
}

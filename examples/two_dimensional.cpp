// Tensor parallelism and data parallelism on a 2-d mesh: layers are sharded over tp and replicated over dp.
//
//            tp 0   tp 1
//     dp 0    0      1      ranks 0 and 1 compute the first half of the batch
//     dp 1    2      3      ranks 2 and 3 the second; ranks 0 and 2 average gradients, 1 and 3 too
//
//   tessera run -n 4 -- ./example_two_dimensional
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/torch.h>

#include <iostream>

namespace ts = tessera;

int main() {
  ts::init();
  const int64_t ranks = ts::get_world_size(), tp = ranks % 2 == 0 ? 2 : 1;
  auto mesh = ts::init_device_mesh("cpu", {ranks / tp, tp}, {"dp", "tp"});
  ts::manual_seed(7);

  const ts::models::GPT2Config config{.vocab_size = 64, .max_seq_len = 16, .n_layer = 2, .n_head = 2, .n_embd = 32};
  const auto plan = ts::models::tensor_parallel_plan(config);
  {
    torch::manual_seed(7);  // the same values on every rank
    ts::models::GPT2 plain(config);
    ts::check_parallel(plain, mesh["tp"], plan, torch::arange(16).view({2, 8}));  // throws if the plan is wrong
  }
  auto model = ts::deferred_init([&] { return ts::models::GPT2(config); });
  ts::parallelize_module(model, mesh["tp"], plan, {.src_data_rank = std::nullopt});
  ts::materialize(model);                                // values do not depend on the mesh
  ts::replicate(*model, {{.device_mesh = mesh["dp"]}});  // averages gradients over dp
  ts::optim::AdamW optimizer(model->parameters(), {.lr = 1e-2});

  const int64_t rows = 8 / mesh.size("dp");  // ranks of one tp group read the same rows
  auto tokens = (torch::arange(8).unsqueeze(1) * 5 + torch::arange(17).unsqueeze(0)).remainder(64);
  auto mine = tokens.narrow(0, mesh.get_local_rank("dp") * rows, rows);
  auto input = mine.narrow(1, 0, 16).contiguous(), target = mine.narrow(1, 1, 16).contiguous();

  ts::CommDebugMode mode;
  double first = 0, last = 0;
  for (int step = 0; step < 20; step++) {
    mode.reset();
    optimizer.zero_grad();
    auto loss = ts::models::loss(model(input), target);
    loss.backward();
    optimizer.step();
    auto mean = loss.detach().clone();
    mesh.get_group("dp")->all_reduce(mean, ts::ReduceOp::Avg).wait();
    last = mean.item<double>();
    if (step == 0) first = last;
  }
  mode.exit();
  if (mesh.get_rank() == 0)
    std::cout << "mesh " << mesh << ": loss " << first << " to " << last << "\n"
              << ts::DTensor(model->h[0]->mlp->c_fc->weight) << "\n"  // DTensor(f32[128, 32][S(0)] on mesh(tp=2))
              << mode.get_comm_counts() << "\n";                      // of the last step
  ts::destroy();
  return last < first / 2 ? 0 : 1;
}

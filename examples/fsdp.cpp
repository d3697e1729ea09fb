// fully_shard (FSDP2): each rank holds a shard of every parameter, and a block is all-gathered only while it runs.
// Trains a small GPT-2, and checks the number of local parameters and that the loss falls.
//   tessera run -n 4 -- ./example_fsdp
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/torch.h>

#include <iostream>

namespace ts = tessera;

int main() {
  ts::init();
  auto mesh = ts::init_device_mesh("cpu", {ts::get_world_size()}, {"fsdp"});
  ts::manual_seed(7);

  // Create without memory, shard block by block, then initialize the shards: no rank ever holds the full model.
  const ts::models::GPT2Config config{.vocab_size = 64, .max_seq_len = 16, .n_layer = 3, .n_head = 2, .n_embd = 32};
  auto model = ts::deferred_init([&] { return ts::models::GPT2(config); });
  for (auto& block : model->h) ts::fully_shard(block, {.mesh = mesh});
  ts::fully_shard(model, {.mesh = mesh});  // the rest: embeddings and the last norm
  ts::materialize(model);

  int64_t local = 0;
  for (const auto& p : model->parameters()) local += ts::DTensor(p).to_local().numel();

  // A batch of 8 counting sequences. Each rank has its own rows.
  const int64_t rows = 8 / mesh.size();
  auto tokens = (torch::arange(8).unsqueeze(1) * 5 + torch::arange(17).unsqueeze(0)).remainder(64);
  auto mine = tokens.narrow(0, mesh.get_rank() * rows, rows);
  auto input = mine.narrow(1, 0, 16).contiguous(), target = mine.narrow(1, 1, 16).contiguous();

  ts::optim::AdamW optimizer(model->parameters(), {.lr = 1e-2});  // its state is sharded like the parameters
  double first = 0, last = 0;
  for (int step = 0; step < 30; step++) {
    optimizer.zero_grad();
    auto loss = ts::models::loss(model(input), target);
    loss.backward();  // reduce-scatters the mean gradients
    ts::optim::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    auto mean = loss.detach().clone();
    ts::all_reduce(mean, ts::ReduceOp::Avg);
    last = mean.item<double>();
    if (step == 0) first = last;
  }
  const int64_t total = ts::models::parameter_count(config);
  const bool sharded = local <= total / mesh.size() + total / 20;
  const bool fell = last < first / 2;
  if (mesh.get_rank() == 0)
    std::cout << "rank 0 of " << mesh.size() << " holds " << (sharded ? "its shard" : "too much") << ": " << local
              << " of " << total << " parameters; loss " << (fell ? "fell" : "did not fall") << ": " << first << " to "
              << last << "\n"
              << ts::DTensor(model->wte->weight) << "\n";  // DTensor(f32[64, 32][S(0)] on mesh(fsdp=4))
  ts::destroy();
  return sharded && fell ? 0 : 1;
}

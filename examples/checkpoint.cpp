// Distributed checkpoint with resharding. Trains a small GPT-2 with fully_shard, saves model and optimizer state, loads
// them into a tensor-parallel model, and checks that both models continue with the same losses.
//   tessera run -n 4 -- ./example_checkpoint
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <iostream>

namespace ts = tessera;

int main() {
  ts::init();
  const int64_t ranks = ts::get_world_size();
  auto mesh = ts::init_device_mesh("cpu", {ranks}, {"all"});
  ts::manual_seed(7);

  const ts::models::GPT2Config config{.vocab_size = 64, .max_seq_len = 16, .n_layer = 2, .n_head = 4, .n_embd = 32};
  auto tokens = (torch::arange(8).unsqueeze(1) * 5 + torch::arange(17).unsqueeze(0)).remainder(64);
  auto input = tokens.narrow(1, 0, 16).contiguous(), target = tokens.narrow(1, 1, 16).contiguous();
  auto step = [&](ts::models::GPT2& model, ts::optim::AdamW& optimizer) {  // every rank has the full batch
    optimizer.zero_grad();
    auto loss = ts::models::loss(model(input), target);
    loss.backward();
    optimizer.step();
    return loss.item<double>();
  };

  auto sharded = ts::deferred_init([&] { return ts::models::GPT2(config); });
  for (auto& block : sharded->h) ts::fully_shard(block, {.mesh = mesh});
  ts::fully_shard(sharded, {.mesh = mesh});
  ts::materialize(sharded);
  ts::optim::AdamW optimizer(sharded->parameters(), {.lr = 1e-2});
  for (int i = 0; i < 5; i++) step(sharded, optimizer);

  // Each rank writes its local shards. The folder is renamed to its final name when all files are complete.
  const auto folder = (std::filesystem::temp_directory_path() / c10::str("tessera_example_", ranks)).string();
  const auto path = ts::dcp::step_folder(folder, 5);
  ts::StateDict saved;
  saved.insert_all("model.", ts::get_model_state_dict(*sharded));
  saved.insert_all("optimizer.", ts::get_optimizer_state_dict(optimizer, *sharded));
  ts::dcp::save(saved, path, {{"step", 5}}, {.overwrite = true});

  // Load in place into the parameters of a tensor-parallel model. Each rank reads only the bytes that it needs.
  const auto plan = ts::models::tensor_parallel_plan(config);
  {
    torch::manual_seed(7);  // the same values on every rank
    ts::models::GPT2 plain(config);
    ts::check_parallel(plain, mesh, plan, input.narrow(0, 0, 1));  // throws if the plan is wrong
  }
  auto tensor_parallel = ts::deferred_init([&] { return ts::models::GPT2(config); });
  ts::parallelize_module(tensor_parallel, mesh, plan, {.src_data_rank = std::nullopt});
  ts::materialize(tensor_parallel);
  auto parameters = ts::get_model_state_dict(*tensor_parallel);
  ts::dcp::load(parameters, *ts::dcp::latest(folder), {.prefix = "model."});
  // A new optimizer has no state, so load into empty tensors with the saved sizes and the parameters' placements.
  ts::optim::AdamW other(tensor_parallel->parameters(), {.lr = 1e-2});
  auto state = ts::dcp::optimizer_state_like(path, "optimizer.", parameters);
  ts::dcp::load(state, path, {.prefix = "optimizer."});
  ts::set_optimizer_state_dict(other, *tensor_parallel, state);

  bool same = true;
  for (int i = 0; i < 5; i++) same &= std::abs(step(sharded, optimizer) - step(tensor_parallel, other)) < 1e-4;
  mesh.get_group()->barrier().wait();
  if (mesh.get_rank() == 0) {
    std::filesystem::remove_all(folder);
    const auto weight = [](ts::models::GPT2& model) { return ts::DTensor(model->h[0]->mlp->c_fc->weight); };
    std::cout << "saved as " << weight(sharded) << ", loaded as " << weight(tensor_parallel) << ": "
              << (same ? "same losses" : "different losses") << "\n";
  }
  ts::destroy();
  return same ? 0 : 1;
}

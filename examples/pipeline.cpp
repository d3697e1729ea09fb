// Pipeline parallelism and data parallelism: the layers of a model are divided among the ranks of pp.
//
//            pp 0   pp 1
//     dp 0    0      1      rank 0 has the embedding and the first block, rank 1 the second block and the head;
//     dp 1    2      3      both use the weight of the embedding, and add its gradients
//
//   tessera run -n 4 -- ./example_pipeline
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/torch.h>

#include <iostream>

namespace ts = tessera;

int main() {
  ts::init();
  const int64_t ranks = ts::get_world_size(), pp = ranks % 2 == 0 ? 2 : 1;
  auto mesh = ts::init_device_mesh("cpu", {ranks / pp, pp}, {"dp", "pp"});
  ts::manual_seed(7);

  // No rank has memory for the full model: only the stages of a rank are materialized.
  const ts::models::GPT2Config config{.vocab_size = 64, .max_seq_len = 16, .n_layer = 2, .n_head = 2, .n_embd = 32};
  auto model = ts::deferred_init([&] { return ts::models::GPT2(config); });
  auto split = ts::pipelining::split_evenly(ts::models::pipeline_layers(model), pp);
  auto stages = ts::pipelining::build_stages(*model, split, "1F1B", mesh["pp"]);
  for (auto& stage : stages) {
    ts::materialize(stage.module());
    ts::pipelining::average_gradients(stage, mesh["dp"]);
  }
  ts::pipelining::Schedule1F1B schedule(stages, /*n_microbatches=*/2, ts::models::loss, mesh["pp"]);
  ts::optim::AdamW optimizer(stages[0].parameters(), {.lr = 1e-2});

  const int64_t rows = 8 / mesh.size("dp");  // ranks of one pipeline read the same rows
  auto tokens = (torch::arange(8).unsqueeze(1) * 5 + torch::arange(17).unsqueeze(0)).remainder(64);
  auto mine = tokens.narrow(0, mesh.get_local_rank("dp") * rows, rows);
  auto input = mine.narrow(1, 0, 16).contiguous(), target = mine.narrow(1, 1, 16).contiguous();

  double first = 0, last = 0;
  for (int step = 0; step < 20; step++) {
    optimizer.zero_grad();
    auto losses = schedule.step(input, target);  // of the microbatches, on the rank of the last stage
    optimizer.step();
    auto sum = losses.empty() ? torch::zeros({}) : torch::stack(losses).mean() / static_cast<double>(mesh.size("dp"));
    ts::all_reduce(sum);
    last = sum.item<double>();
    if (step == 0) first = last;
  }
  if (mesh.get_rank() == 0) {
    std::cout << "mesh " << mesh << ": loss " << first << " to " << last << "\n";
    std::cout << schedule.to_csv();  // what each rank of the pipeline does
  }
  ts::destroy();
  return last < first / 2 ? 0 : 1;
}

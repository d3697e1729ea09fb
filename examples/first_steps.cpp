// Tensor parallelism by placements alone: a two-layer product over all ranks. The program of the README.
//   tessera run -n 4 -- ./example_first_steps
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <iostream>

namespace ts = tessera;

int main() {
  ts::init();  // reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; without them the world has one rank
  auto mesh = ts::init_device_mesh("cpu", {ts::get_world_size()}, {"tp"});
  ts::manual_seed(7);  // random values do not depend on the number of ranks

  torch::Tensor x = ts::randn({8, 64}, mesh);  // replicated
  torch::Tensor up = ts::randn({64, 256}, mesh, {ts::Shard(1)}, torch::requires_grad());
  torch::Tensor down = ts::randn({256, 64}, mesh, {ts::Shard(0)}, torch::requires_grad());

  ts::CommDebugMode mode;
  torch::Tensor hidden = torch::relu(torch::mm(x, up));                  // S(1): sharded columns, no communication
  ts::DTensor y = torch::mm(hidden, down);                               // P(sum): partial, no communication
  torch::Tensor loss = y.redistribute({ts::Replicate()}).pow(2).mean();  // the only all-reduce
  loss.backward();
  mode.exit();

  const double value = loss.item<double>();
  if (mesh.get_rank() == 0)
    std::cout << value << "\n"
              << ts::DTensor(up.grad()) << "\n"  // DTensor(f32[64, 256][S(1)] on mesh(tp=4))
              << mode.get_comm_counts() << "\n"  // {c10d_functional.all_reduce: 1}
              << mode.debug_string();            // each op and its collectives
  ts::destroy();
  return 0;
}

// A custom DDP communication hook: top-k gradient compression with error feedback. Each rank sends only the largest
// gradients of a bucket, and adds the rest to the next step.
//   tessera run -n 4 -- ./example_own_comm_hook
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <iostream>
#include <map>

namespace ts = tessera;

struct TopKState {
  double fraction;                             // of the elements of a bucket that are sent
  std::map<size_t, torch::Tensor> residual{};  // gradients not sent yet, by bucket
  int64_t sent = 0, total = 0;
};

// Called during backward when all gradients of a bucket are ready. Starts the communication, and returns a function
// that DDP calls at the end of backward to get the averaged gradients.
ts::BucketResult top_k_hook(const std::shared_ptr<TopKState>& state, ts::GradBucket& bucket) {
  auto& flat = bucket.buffer();
  auto& residual = state->residual[bucket.index()];
  // DDP rebuilds its buckets after the first step, so the sizes may differ.
  if (residual.defined() && residual.sizes() == flat.sizes()) flat.add_(residual);
  const int64_t n = flat.numel();
  const int64_t k = std::max<int64_t>(1, static_cast<int64_t>(state->fraction * static_cast<double>(n)));
  const auto indices = std::get<1>(flat.abs().topk(k));
  const auto values = flat.index_select(0, indices);
  residual = flat.clone().index_fill_(0, indices, 0);
  state->sent += k, state->total += n;

  const auto group = bucket.group();
  const int64_t ranks = group->size();
  const std::vector<int64_t> sizes(static_cast<size_t>(ranks), k);            // k elements per rank
  const auto all_indices = ts::funcol::all_gather(indices, 0, sizes, group);  // asynchronous
  const auto all_values = ts::funcol::all_gather(values, 0, sizes, group);
  return [=] {
    ts::funcol::wait(all_indices, group);
    ts::funcol::wait(all_values, group);
    return torch::zeros({n}, values.options()).index_add_(0, all_indices, all_values).div_(ranks);  // the mean
  };
}

int main() {
  ts::init();
  torch::manual_seed(7);
  torch::nn::Linear net(32, 4);
  ts::DistributedDataParallel ddp(net);
  auto state = std::make_shared<TopKState>(TopKState{.fraction = 0.1});
  ddp->register_comm_hook(state, top_k_hook);
  torch::optim::SGD optimizer(ddp->parameters(), 0.1);

  const auto target = torch::sin(torch::arange(32 * 4, torch::kFloat)).view({32, 4});
  torch::manual_seed(ts::get_rank());
  double first = 0, last = 0;
  for (int step = 0; step < 300; step++) {
    auto x = torch::randn({16, 32});
    optimizer.zero_grad();
    auto loss = torch::mse_loss(ddp(x), x.mm(target));
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  auto sum = net->weight.detach().sum(), max = sum.clone();
  ts::all_reduce(max, ts::ReduceOp::Max);
  const bool equal = sum.item<double>() == max.item<double>(), fell = last < first / 10;
  if (ts::get_rank() == 0)
    std::cout << "sent " << state->sent << " of " << state->total << " gradients, " << (equal ? "equal" : "different")
              << " weights, loss " << (fell ? "fell" : "did not fall") << ": " << first << " to " << last << "\n";
  ts::destroy();
  return equal && fell ? 0 : 1;
}

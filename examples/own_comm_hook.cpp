// How gradients travel, decided by you: here only the largest of each bucket are sent, what was left out is kept and
// added to the next step's (error feedback).
//   tessera run -n 4 -- ./example_own_comm_hook
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <iostream>
#include <map>

namespace ts = tessera;

struct LargestOnly {
  double share;                            // of a bucket's elements that are sent
  std::map<size_t, torch::Tensor> kept{};  // what this rank has not sent yet, by bucket
  int64_t sent = 0, of = 0;
};

// Called when all gradients of a bucket are there, while backward goes on. It starts its communication and returns what
// to do when backward is through.
ts::BucketResult send_largest(const std::shared_ptr<LargestOnly>& state, ts::GradBucket& bucket) {
  auto& flat = bucket.buffer();
  auto& kept = state->kept[bucket.index()];
  if (kept.defined() && kept.sizes() == flat.sizes()) flat.add_(kept);  // buckets are arranged anew after step 1
  const int64_t n = flat.numel(), k = std::max<int64_t>(1, static_cast<int64_t>(state->share * static_cast<double>(n)));
  const auto where = std::get<1>(flat.abs().topk(k));
  const auto values = flat.index_select(0, where);
  kept = flat.clone().index_fill_(0, where, 0);
  state->sent += k, state->of += n;

  const auto group = bucket.group();
  const int64_t ranks = group->size();
  const std::vector<int64_t> as_many(static_cast<size_t>(ranks), k);      // from each rank
  const auto all_where = ts::funcol::all_gather(where, 0, as_many, group);  // posted, not waited for
  const auto all_values = ts::funcol::all_gather(values, 0, as_many, group);
  return [=] {
    ts::funcol::wait(all_where, group);
    ts::funcol::wait(all_values, group);
    return torch::zeros({n}, values.options()).index_add_(0, all_where, all_values).div_(ranks);  // nobody else divides
  };
}

int main() {
  ts::init();
  torch::manual_seed(7);
  torch::nn::Linear net(32, 4);
  ts::DistributedDataParallel ddp(net);
  auto state = std::make_shared<LargestOnly>(LargestOnly{.share = 0.1});
  ddp->register_comm_hook(state, send_largest);
  torch::optim::SGD optimizer(ddp->parameters(), 0.1);

  const auto goal = torch::sin(torch::arange(32 * 4, torch::kFloat)).view({32, 4});
  torch::manual_seed(ts::get_rank());
  double first = 0, last = 0;
  for (int step = 0; step < 300; step++) {
    auto x = torch::randn({16, 32});
    optimizer.zero_grad();
    auto loss = torch::mse_loss(ddp(x), x.mm(goal));
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  auto sum = net->weight.detach().sum(), greatest = sum.clone();
  ts::all_reduce(greatest, ts::ReduceOp::Max);
  const bool equal = sum.item<double>() == greatest.item<double>(), fell = last < first / 10;
  if (ts::get_rank() == 0)
    std::cout << "sent " << state->sent << " of " << state->of << " gradients, " << (equal ? "equal" : "different")
              << " weights, loss " << (fell ? "fell" : "did not fall") << ": " << first << " to " << last << "\n";
  ts::destroy();
  return equal && fell ? 0 : 1;
}

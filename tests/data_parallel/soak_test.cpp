// Nothing grows during data parallel training: memory, keys in the store, pending results, cached sharding decisions.
// The long form (make soak) runs 10,000 steps, the short one 500.
#include "tessera/testing/detail/soak.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/models/mlp.h"
#include "tessera/optim/sgd.h"
#include "tessera/propagate/detail/decision.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ostream>

namespace tessera::data_parallel {
namespace {

using testing::Rank;

// Trains one DDP model. Every third pass is not reduced.
class Trainee {
 public:
  Trainee(models::MLP model, const DDPOptions& options) : ddp_(model, options), optimizer_(model->parameters()) {}
  void register_bf16_hook() { ddp_->register_comm_hook(nullptr, bf16_compress_hook); }

  void step(int i, const at::Tensor& x) {
    ddp_->set_requires_gradient_sync(i % 3 != 0);
    ddp_(x).pow(2).mean().backward();
    if (i % 3 == 0) return;
    optimizer_.step();
    optimizer_.zero_grad();
  }
  const Reducer& reducer() const { return *ddp_->replica().reducer(); }

 private:
  DistributedDataParallel<models::MLP> ddp_;
  optim::SGD optimizer_;
};

struct Sizes {
  int64_t store;
  size_t pending, decisions;
  bool operator==(const Sizes&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Sizes& s) {
  return out << s.store << " keys in the store, " << s.pending << " pending results, " << s.decisions << " decisions";
}

TEST(Soak, DistributedDataParallel) {
  const int steps = testing::long_soak() ? 10'000 : 500;
  testing::run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=1");
    const auto group = mesh.get_group("dp");
    const double cap = 400.0 / (1 << 20);  // two buckets
    Trainee plain(models::MLP(models::mlp_module()), {.process_group = group, .bucket_cap_mb = cap});
    Trainee views(models::MLP(models::mlp_module()),
                  {.process_group = group, .bucket_cap_mb = cap, .gradient_as_bucket_view = true});
    Trainee unused(models::MLP(models::mlp_module()), {.process_group = group, .find_unused_parameters = true});
    unused.register_bf16_hook();
    models::MLP distributed(models::mlp_module());
    parallelize_module(distributed, mesh["tp"], {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    Trainee two_d(distributed, {.device_mesh = mesh["dp"], .gradient_as_bucket_view = true});

    const auto x = torch::full({4, 10}, 0.1 * static_cast<double>(me.rank + 1));
    int done = 0;
    const auto train = [&](double share) {
      for (const int end = done + static_cast<int>(steps * share); done < end; done++)
        for (auto* trainee : {&plain, &views, &unused, &two_d}) trainee->step(done, x);
    };
    const auto sizes = [&] {
      return Sizes{group->store()->getNumKeys(), group->pending(),
                   propagate::decision_cache(*mesh["tp"].state()).size()};
    };
    train(0.2);  // fills caches
    train(0.4);
    // Both ranks share a store and a heap: each waits until the other has measured.
    me.group()->barrier().wait();
    const auto before = sizes();
    const auto bytes = testing::resident_bytes();
    me.group()->barrier().wait();
    train(0.4);
    me.group()->barrier().wait();
    const auto after = sizes();
    const auto grown = testing::resident_bytes() - bytes;
    me.group()->barrier().wait();
    EXPECT_EQ(after, before);
    EXPECT_LT(grown, testing::kSoakSlack);
    EXPECT_EQ(plain.reducer().buckets().size(), 2u);
    EXPECT_EQ(views.reducer().passes(), steps);
  });
}

}  // namespace
}  // namespace tessera::data_parallel

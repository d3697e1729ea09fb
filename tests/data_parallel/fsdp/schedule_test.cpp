// The order of collectives and computation, from the collectives' records.
#include "tessera/data_parallel/fsdp/fsdp_module.h"

#include "tessera/comm/detail/records.h"
#include "tessera/nn/hooks.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/fsdp.h"

namespace tessera {
namespace {

using namespace fixtures;

constexpr int64_t kLayers = 4;

// The events on a rank, in order: "gather layers.1", "reduce layers.1", "forward 1", "backward 1".
struct Log : comm::Observer {
  std::vector<std::string> events;
  void on_post(const comm::Record& record) override {
    if (!record.counted()) return;
    const char* what = record.kind == comm::CommKind::AllGatherIntoTensor   ? "gather "
                       : record.kind == comm::CommKind::ReduceScatterTensor ? "reduce "
                                                                            : "all_reduce ";
    events.push_back(what + record.tensor_name);
  }
  size_t at(const std::string& event, size_t from = 0) const {
    const auto found = std::find(events.begin() + static_cast<ptrdiff_t>(from), events.end(), event);
    EXPECT_NE(found, events.end()) << event << " is not in " << c10::Join(", ", events);
    return static_cast<size_t>(found - events.begin());
  }
};

// Records when the last op of a layer's forward, and of its backward, has run.
void watch(models::MLPStacked& model, const std::shared_ptr<Log>& log) {
  for (int64_t k = 0; k < kLayers; k++) {
    auto& layer = model->layers[static_cast<size_t>(k)];
    layer->layers.back().register_forward_hook(
        [=](Module&, const Tensors&, const Tensors&) { log->events.push_back(c10::str("forward ", k)); });
    layer->layers.front().register_forward_pre_hook([=](Module&, const Tensors& in) {
      if (in[0].requires_grad())
        in[0].register_hook([=](const at::Tensor&) { log->events.push_back(c10::str("backward ", k)); });
    });
  }
}

std::string unit(int64_t k) { return c10::str("layers.", k); }

TEST(FullyShardOrder, AllGathersArePrefetchedAndReductionsOverlapBackward) {
  const models::MLPStacked start(kLayers);
  for (const char* shape : {"dp=2", "dp=4", "replicate=2,shard=2"}) {
    const int64_t ranks = std::string(shape) == "dp=2" ? 2 : 4;
    const bool hybrid = ranks == 4 && std::string(shape) != "dp=4";
    const auto data = batches(ranks);
    run_ranks(ranks, [&](Rank& me) {
      auto model = clone(start);
      auto log = std::make_shared<Log>();
      watch(model, log);
      shard_blocks(model, {.mesh = me.mesh(shape)});
      const comm::ObserverScope observe(log.get());
      for (int step = 0; step < 2; step++) {  // the order is not known in the first step
        log->events.clear();
        const auto loss = stack_loss(model, data[static_cast<size_t>(me.rank)]);
        for (int64_t k = 0; k + 1 < kLayers; k++)
          EXPECT_LT(log->at("gather " + unit(k + 1)), log->at(c10::str("forward ", k))) << step;
        const size_t forward = log->events.size();
        loss.backward();
        for (int64_t k = kLayers - 1; k > 1; k--) {
          EXPECT_LT(log->at("gather " + unit(k - 1), forward), log->at(c10::str("backward ", k))) << step;
          EXPECT_LT(log->at("reduce " + unit(k)), log->at(c10::str("backward ", k - 1))) << step;
        }
        // The all-reduce of k overlaps with the reduce-scatter of k-1.
        for (int64_t k = kLayers - 1; hybrid && k > 1; k--) {
          EXPECT_LT(log->at("reduce " + unit(k - 1)), log->at("all_reduce " + unit(k))) << step;
        }
        EXPECT_EQ(log->events.size(), static_cast<size_t>((hybrid ? 4 : 3) * kLayers + 2 * kLayers - 1));
      }
    });
  }
}

// Layers run in another order than they are registered in. The first step is correct; the second prefetches in the
// right order.
struct BackwardsImpl : torch::nn::Cloneable<BackwardsImpl> {
  BackwardsImpl() { reset(); }
  void reset() override {
    for (int i = 0; i < 3; i++) layers.push_back(register_module(std::to_string(i), models::MLP(models::mlp_module())));
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = layers.size(); i-- > 0;) x = layers[i](x);
    return x;
  }
  std::vector<models::MLP> layers;
};
TESSERA_MODULE(Backwards);

TEST(FullyShardOrder, FollowsTheOrderOfTheLastForward) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    Backwards model;
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = me.mesh("dp=2")});
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    Log log;
    const comm::ObserverScope observe(&log);
    const auto step = [&] {
      log.events.clear();
      model(data[static_cast<size_t>(me.rank)]).sum().backward();
      return log.events;
    };
    EXPECT_EQ(step(), (std::vector<std::string>{"gather 0", "gather 2", "gather 1", "gather 0", "gather 1", "reduce 0",
                                                "gather 2", "reduce 1", "reduce 2"}))
        << "prefetches 0 after the root";
    EXPECT_EQ(step()[0], "gather 2");
  });
}

TEST(FullyShardOrder, SetModulesToPrefetch) {
  const models::MLPStacked start(kLayers);
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    shard_blocks(model, {.mesh = me.mesh("dp=2")});
    auto& layers = *model->layers;
    fsdp_module(*model).set_modules_to_forward_prefetch({*layers[0], *layers[1]});
    fsdp_module(*layers[0]).set_modules_to_forward_prefetch({*layers[2], *layers[3]});
    fsdp_module(*layers[3]).set_modules_to_backward_prefetch({*layers[2], *layers[1]});
    Log log;
    const comm::ObserverScope observe(&log);
    stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    EXPECT_EQ(log.events,
              (std::vector<std::string>{"gather layers.0", "gather layers.1", "gather layers.2", "gather layers.3",
                                        "gather layers.3", "gather layers.2", "gather layers.1", "reduce layers.3",
                                        "reduce layers.2", "gather layers.0", "reduce layers.1", "reduce layers.0"}));
    models::MLP other(models::mlp_module());
    EXPECT_THROW(fsdp_module(*model).set_modules_to_forward_prefetch({*other}), UsageError);
  });
}

}  // namespace
}  // namespace tessera

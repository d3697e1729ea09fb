// A train step consists only of ops that the dispatcher sees: a recorded and replayed step gives the same bits.
#include "small_models.h"

#include "tessera/testing/detail/recorder.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tessera::test {
namespace {

std::vector<at::Tensor> local_parameters(Model& m) {
  std::vector<at::Tensor> all;
  for (auto& [name, t] : m.parameters) all.push_back(DTensor(t.detach()).to_local());
  return all;
}
std::vector<at::Tensor> copies(const std::vector<at::Tensor>& all) {
  std::vector<at::Tensor> out;
  for (const auto& t : all) out.push_back(t.clone());
  return out;
}

TEST(Replay, ATrainStepIsBitEqual) {
  for (const auto& start : {mlp(), transformer()})
    testing::run_ranks(4, [&](testing::Rank& me) {
      auto model = distribute(start, me.mesh("dp=2,tp=2"));
      train(model, Optimizer::Sgd, 1);  // fills the decision cache; parameters now require grad
      const auto live = local_parameters(model);
      const auto before = copies(live);
      testing::Recorder recorder;
      train(model, Optimizer::Sgd, 1);
      recorder.stop();
      const auto after_one = copies(live);
      train(model, Optimizer::Sgd, 1);
      const auto after_two = copies(live);

      for (size_t i = 0; i < live.size(); i++) live[i].copy_(before[i]);
      recorder.replay();
      for (size_t i = 0; i < live.size(); i++)
        EXPECT_TRUE(at::equal(live[i], after_one[i])) << "first replay, parameter " << i;
      recorder.replay();
      for (size_t i = 0; i < live.size(); i++)
        EXPECT_TRUE(at::equal(live[i], after_two[i])) << "second replay, parameter " << i;

      const auto ops = recorder.ops();
      for (const char* op : {"tessera::all_reduce", "tessera::wait", "aten::mm"})
        EXPECT_NE(std::find(ops.begin(), ops.end(), op), ops.end()) << op << " was not recorded";
    });
}

}  // namespace
}  // namespace tessera::test

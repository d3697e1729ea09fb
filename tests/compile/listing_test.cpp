// The listing of a compiled program names exactly the collectives that are posted, in order, and the kernels that run.
#include "tessera/compile/api/compile.h"
#include "tessera/compile/api/compile_backward.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/compile/detail/ir/collective.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/data_parallel/detail/reducer_mode.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/detail/file_check.h"
#include "tessera/testing/ranks.h"

#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <dlfcn.h>

#include <regex>
#include <set>

namespace tessera {
namespace {

using comm::CommKind;
using models::MLP;
using testing::FileCheck;
using testing::Rank;
using testing::run_ranks;

// A collective that was posted.
struct Posted {
  CommKind kind;
  int64_t bytes;
  bool operator==(const Posted&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Posted& posted) {
    return out << posted.kind << " of " << posted.bytes << " bytes";
  }
};

// Records the collectives that this thread posts.
class Records final : comm::Observer {
 public:
  Records() : scope_(this) {}
  void on_post(const comm::Record& record) override {
    if (record.counted()) posted.push_back({record.kind, record.bytes});
  }
  std::vector<Posted> posted;

 private:
  comm::ObserverScope scope_;
};

// The collectives in the text of a listing.
std::vector<Posted> named_in(const std::string& listing) {
  const std::map<std::string, CommKind> kinds = {
      {"all_reduce", CommKind::AllReduce},
      {"all_reduce_", CommKind::AllReduce},
      {"all_reduce_coalesced", CommKind::AllReduceCoalesced},
      {"all_reduce_coalesced_", CommKind::AllReduceCoalesced},
      {"all_gather_into_tensor", CommKind::AllGatherIntoTensor},
      {"all_gather_into_tensor_out", CommKind::AllGatherIntoTensor},
      {"all_gather_into_tensor_coalesced", CommKind::AllGatherCoalesced},
      {"reduce_scatter_tensor", CommKind::ReduceScatterTensor},
      {"reduce_scatter_tensor_out", CommKind::ReduceScatterTensor},
      {"reduce_scatter_tensor_coalesced", CommKind::ReduceScatterCoalesced},
      {"all_to_all_single", CommKind::AllToAllSingle},
      {"broadcast", CommKind::Broadcast},
      {"broadcast_", CommKind::Broadcast},
  };
  std::vector<Posted> named;
  std::istringstream in(listing);
  const std::regex op(R"(torch\.ops\._c10d_functional\.(\w+)\.default\()"), bytes(R"(# (\d+) bytes, ran \d+$)");
  for (std::string line; std::getline(in, line);) {
    std::smatch found, size;
    if (!std::regex_search(line, found, op) || found[1] == "wait_tensor") continue;
    EXPECT_TRUE(std::regex_search(line, size, bytes)) << line;
    named.push_back({kinds.at(found[1]), size.empty() ? -1 : std::stoll(size[1])});
  }
  return named;
}

// A listing is the text of its program, without the sources of kernels. So `tessera opt` reads it.
void expect_listing_is_the_program(const compiler::Executable& executable) {
  auto listed = compiler::parse(executable.listing());
  verify(listed);
  auto program = executable.program();
  for (auto& [name, source] : program.kernels) source.clear();
  renumber(program);
  renumber(listed);
  EXPECT_EQ(compiler::text_of(listed), compiler::text_of(program));
}

// The collectives of a call after the first, which compiles. Every call must post what the listing says.
template <class Model>
std::vector<Posted> posted_by(Model& model, const at::Tensor& x, const CompileOptions& options = {}) {
  optim::SGD opt(model->parameters(), {.lr = 0.1});
  auto step = compile(train_step, options);
  step(model, opt, x);
  std::vector<Posted> posted;
  for (int call = 0; call < 2; call++) {
    Records records;
    step(model, opt, x);
    EXPECT_EQ(records.posted, named_in(step.listing())) << step.listing();
    posted = records.posted;
  }
  EXPECT_EQ(step.cache().size(), 1u);
  expect_listing_is_the_program(step.executable());
  return posted;
}

TEST(Listing, CollectivesOfADdpStep) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank&) {
    for (const bool fused : {true, false}) {
      const ReducerModeScope mode(ReducerMode::PerParameterAlways);
      DistributedDataParallel ddp(clone(start));
      CompileOptions options;
      if (!fused) options.passes = PassList{"dead_code"};
      const auto posted = posted_by(ddp, torch::ones({8, 10}), options);
      if (fused) {
        EXPECT_EQ(posted, (std::vector<Posted>{{CommKind::AllReduce, 346 * 4}}));
      } else {
        EXPECT_EQ(posted.size(), 4u);
      }
    }
    DistributedDataParallel buckets(clone(start));  // with the buckets of the reducer
    EXPECT_EQ(posted_by(buckets, torch::ones({8, 10})).size(), 1u);
  });
}

// On three ranks the local shards differ and are padded: 16 rows are 6, 6, 4; 10 rows are 4, 4, 2.
TEST(Listing, CollectivesOfAFullyShardedStep) {
  const MLP start(models::mlp_module());
  run_ranks(3, [&](Rank& me) {
    auto model = clone(start);
    const DataParallel mode("fully_shard", {.mesh = me.mesh("dp=3")});
    auto posted = posted_by(model, torch::ones({8, 10}), {.parallel_mode = mode});
    EXPECT_EQ(posted.size(), 8u);
    for (const auto kind : {CommKind::AllGatherIntoTensor, CommKind::ReduceScatterTensor})
      for (const int64_t bytes : {18 * 10 * 4, 18 * 4, 12 * 16 * 4, 12 * 4})
        EXPECT_EQ(std::count(posted.begin(), posted.end(), Posted{kind, bytes}), 1) << Posted{kind, bytes};
  });
}

// fully_shard communicates all parameters of a module at once.
TEST(Listing, CollectivesOfAFullyShardedModule) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    const auto posted = posted_by(model, torch::ones({8, 10}));
    EXPECT_GE(std::count(posted.begin(), posted.end(), Posted{CommKind::AllGatherIntoTensor, 346 * 4}), 1);
    EXPECT_EQ(std::count(posted.begin(), posted.end(), Posted{CommKind::ReduceScatterTensor, 346 * 4}), 1);
  });
}

TEST(Listing, CollectivesOfATensorParallelStep) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    parallelize_module(model, me.mesh("tp=2"), {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    EXPECT_EQ(posted_by(model, torch::ones({8, 10})), (std::vector<Posted>{{CommKind::AllReduce, 8 * 10 * 4}}));
    auto other = clone(start);
    parallelize_module(other, me.mesh("tp=2"),
                       {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel{.output_layouts = Shard(0)}}});
    const auto posted = posted_by(other, torch::ones({8, 10}));
    EXPECT_GE(std::count(posted.begin(), posted.end(), Posted{CommKind::ReduceScatterTensor, 8 * 10 * 4}), 1);
  });
}

// ir/collective.cpp has the record kind of every collective op.
TEST(Listing, EveryCollectiveHasAKind) {
  int count = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("tessera::") || !name.overload_name.empty()) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || compiler::kind_of(*op) != compiler::OpKind::Collective) continue;
    count++;
    EXPECT_NE(compiler::record_kind(*op), CommKind::Count) << name.name << " is missing in ir/collective.cpp";
  }
  EXPECT_GE(count, 13);
}

const std::string kTwoCollectives = R"(group @dp [0, 1]
input %0: f32[4] argument "0"
input %1: f32[6] argument "1"
%2: f32[4] = tessera.all_reduce(%0, "sum", @dp)
%3: f32[12] = tessera.all_gather(%1, 0, [6, 6], @dp)
%4: f32[4] in %2 = tessera.wait(%2!, @dp)
%5: f32[12] in %3 = tessera.wait(%3!, @dp)
return %4
return %5
)";

// A program that is edited by hand lists and posts its collectives in the new order.
TEST(Listing, EditedProgram) {
  run_ranks(2, [](Rank& me) {
    auto program = compiler::parse(kTwoCollectives);
    program.groups[0].group = me.group();
    const auto run = [&] {
      const auto a = torch::ones({4}), b = torch::full({6}, me.rank + 1.0);
      compiler::Executable executable(program, {a.storage(), b.storage()});
      Records records;
      executable.run();
      EXPECT_EQ(records.posted, named_in(executable.listing())) << executable.listing();
      EXPECT_TRUE(at::equal(executable.output(program.outputs[0]), torch::full({4}, 2)));
      EXPECT_EQ(executable.output(program.outputs[1]).sum().item<double>(), 18);
      return records.posted;
    };
    const Posted reduced{CommKind::AllReduce, 16}, gathered{CommKind::AllGatherIntoTensor, 48};
    EXPECT_EQ(run(), (std::vector<Posted>{reduced, gathered}));
    std::swap(program.nodes[0], program.nodes[1]);
    EXPECT_EQ(run(), (std::vector<Posted>{gathered, reduced}));
  });
}

// A user's pass: swaps the first two collectives, if the wait of the first comes after the second.
compiler::Matched swap_first_two(compiler::Program& program) {
  auto& nodes = program.nodes;
  const auto is_collective = [](const compiler::Node& node) { return kind_of(node) == compiler::OpKind::Collective; };
  const auto first = std::find_if(nodes.begin(), nodes.end(), is_collective);
  if (first == nodes.end()) return {0};
  const auto second = std::find_if(first + 1, nodes.end(), is_collective);
  if (second == nodes.end() ||
      nodes.begin() + static_cast<int64_t>(wait_of(program, static_cast<size_t>(first - nodes.begin()))) < second)
    return {0};
  std::rotate(first, first + 1, second + 1);
  return {1};
}

TEST(Listing, UserPassThatSwapsCollectives) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank&) {
    std::vector<std::vector<Posted>> posted;
    for (const bool swapped : {false, true}) {
      const ReducerModeScope mode(ReducerMode::PerParameterAlways);
      DistributedDataParallel ddp(clone(start));
      PassList passes{"schedule_comm_wait"};
      if (swapped) passes.emplace_back(compiler::Pass{"swap", swap_first_two});
      posted.push_back(posted_by(ddp, torch::ones({8, 10}), {.passes = passes, .verified = true}));
    }
    ASSERT_EQ(posted[0].size(), 4u);
    std::swap(posted[0][0], posted[0][1]);
    EXPECT_EQ(posted[0], posted[1]);
    EXPECT_FALSE(posted[0][0] == posted[0][1]);
  });
}

// The tokens that PyTorch's test of DDP fusion checks appear with the pass and only with it.
TEST(Listing, FusionTokensNeedTheFusionPass) {
  const MLP start(models::four_linears());
  run_ranks(2, [&](Rank&) {
    for (const bool fused : {true, false}) {
      reset_compile_caches();
      auto net = clone(start);
      const ReducerModeScope mode(ReducerMode::PerParameter);
      replicate(net);
      auto compiled = compile(net);
      const auto loss = compiled(torch::ones({1, 2000})).sum();
      PassList passes{"schedule_comm_wait"};
      if (fused) passes.insert(passes.begin(), "fuse_ddp_with_concat_op");
      Records records;
      auto scope = compile_backward({.passes = passes});
      loss.backward();
      const auto listing = scope.programs().at(0)->listing();
      EXPECT_EQ(records.posted, named_in(listing)) << listing;
      EXPECT_EQ(records.posted.size(), fused ? 3u : 8u);
      FileCheck check;
      for (int i = 0; i < 3; i++)
        check.check("aten.flatten.using_ints(")
            .check("cpp_fused_")
            .check("torch.ops._c10d_functional.all_reduce_.default(");
      for (int i = 0; i < 3; i++) check.check("torch.ops._c10d_functional.wait_tensor.default");
      EXPECT_EQ(check.find_error(listing).empty(), fused) << check.find_error(listing);
    }
  });
}

// The generated kernels in a listing, and how often each is called. Equal groups of ops share a kernel.
std::map<std::string, int64_t> kernels_in(const std::string& listing) {
  std::map<std::string, int64_t> calls;
  const std::regex name(R"((^|\n)(cpp_fused_\w+)\()");
  for (std::sregex_iterator i(listing.begin(), listing.end(), name), end; i != end; i++) calls[(*i)[2]]++;
  return calls;
}

TEST(Listing, GeneratedKernelsRunAsOftenAsListed) {
  MLP model(models::mlp_module());
  optim::AdamW opt(model->parameters(), {.foreach = false});
  const auto x = torch::ones({8, 10});
  train_step(model, opt, x);
  auto step = compile(train_step);
  step(model, opt, x);
  const auto* library = step.executable().library();
  ASSERT_NE(library, nullptr);
  const auto kernels = kernels_in(step.listing());
  ASSERT_GE(kernels.size(), 2u) << step.listing();
  void* loaded = dlopen(library->path().c_str(), RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(loaded, nullptr) << library->path() << " is not loaded";
  std::map<std::string, const int64_t*> counts;
  for (const auto& [name, calls] : kernels) {
    EXPECT_EQ(dlsym(loaded, name.c_str()), reinterpret_cast<void*>(library->function(name))) << name;
    counts[name] = static_cast<const int64_t*>(dlsym(loaded, (name + "_calls").c_str()));
    ASSERT_NE(counts[name], nullptr) << name;
  }
  for (int call = 0; call < 3; call++) {
    std::map<std::string, int64_t> before;
    for (const auto& [name, count] : counts) before[name] = *count;
    step(model, opt, x);
    for (const auto& [name, count] : counts)
      EXPECT_EQ(*count, before[name] + kernels.at(name)) << name << ", call " << call;
  }
  EXPECT_EQ(step.cache().size(), 1u);
  dlclose(loaded);
}

}  // namespace
}  // namespace tessera

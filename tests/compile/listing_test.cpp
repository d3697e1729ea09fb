// The listing is the truth: what it says is sent is what is sent, in that order, and what it names is what runs.
#include "tessera/compile/api/compile.h"
#include "tessera/compile/api/compile_backward.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/compile/detail/ir/collective.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/reducer_mode.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/detail/file_check.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <dlfcn.h>

#include <regex>
#include <set>

namespace tessera {
namespace {

using comm::Kind;
using models::MLP;
using testing::FileCheck;
using testing::Rank;
using testing::run_ranks;

struct Sent {
  Kind kind;
  int64_t bytes;
  bool operator==(const Sent&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Sent& sent) {
    return out << sent.kind << " of " << sent.bytes << " bytes";
  }
};

// The collectives that this thread posts.
class Records final : comm::Observer {
 public:
  Records() : scope_(this) {}
  void on_post(const comm::Record& record) override {
    if (record.counted()) sent.push_back({record.kind, record.bytes});
  }
  std::vector<Sent> sent;

 private:
  comm::ObserverScope scope_;
};

// The collectives that a listing names, read from its text alone.
std::vector<Sent> named_in(const std::string& listing) {
  const std::map<std::string, Kind> kinds = {
      {"all_reduce", Kind::AllReduce},
      {"all_reduce_", Kind::AllReduce},
      {"all_reduce_coalesced", Kind::AllReduceCoalesced},
      {"all_reduce_coalesced_", Kind::AllReduceCoalesced},
      {"all_gather_into_tensor", Kind::AllGatherIntoTensor},
      {"all_gather_into_tensor_out", Kind::AllGatherIntoTensor},
      {"all_gather_into_tensor_coalesced", Kind::AllGatherCoalesced},
      {"reduce_scatter_tensor", Kind::ReduceScatterTensor},
      {"reduce_scatter_tensor_out", Kind::ReduceScatterTensor},
      {"reduce_scatter_tensor_coalesced", Kind::ReduceScatterCoalesced},
      {"all_to_all_single", Kind::AllToAllSingle},
      {"broadcast", Kind::Broadcast},
      {"broadcast_", Kind::Broadcast},
  };
  std::vector<Sent> named;
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

const auto train_step = [](auto& model, auto& opt, const at::Tensor& x) {
  opt.zero_grad();
  auto loss = model(x).pow(2).mean();
  loss.backward();
  opt.step();
  return loss;
};

// What the calls sent after the first, which compiles; each call the same, and what the listing says.
template <class Model>
std::vector<Sent> sent_by(Model& model, const at::Tensor& x, const CompileOptions& options = {}) {
  optim::SGD opt(model->parameters(), {.lr = 0.1});
  auto step = compile(train_step, options);
  step(model, opt, x);
  std::vector<Sent> sent;
  for (int call = 0; call < 2; call++) {
    Records records;
    step(model, opt, x);
    EXPECT_EQ(records.sent, named_in(step.listing())) << step.listing();
    sent = records.sent;
  }
  EXPECT_EQ(step.cache().size(), 1u);
  return sent;
}

TEST(Listing, SaysWhatADdpStepSends) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank&) {
    for (const bool grouped : {true, false}) {
      const ReducerModeScope mode(ReducerMode::PerParameterAlways);
      DistributedDataParallel ddp(clone(start));
      CompileOptions options;
      if (!grouped) options.passes = PassList{"dead_code"};
      const auto sent = sent_by(ddp, torch::ones({8, 10}), options);
      if (grouped) {
        EXPECT_EQ(sent, (std::vector<Sent>{{Kind::AllReduce, 346 * 4}}));
      } else {
        EXPECT_EQ(sent.size(), 4u);
      }
    }
    DistributedDataParallel buckets(clone(start));  // the reducer's own
    EXPECT_EQ(sent_by(buckets, torch::ones({8, 10})).size(), 1u);
  });
}

// On three ranks cat_inputs differ, and travel padded: 16 rows as 6, 6, 4; 10 as 4, 4, 2.
TEST(Listing, SaysWhatAFullyShardedStepSends) {
  const MLP start(models::mlp_module());
  run_ranks(3, [&](Rank& me) {
    auto model = clone(start);
    const DataParallel mode("fully_shard", {.mesh = me.mesh("dp=3")});
    auto sent = sent_by(model, torch::ones({8, 10}), {.parallel_mode = mode});
    EXPECT_EQ(sent.size(), 8u);
    for (const auto kind : {Kind::AllGatherIntoTensor, Kind::ReduceScatterTensor})
      for (const int64_t bytes : {18 * 10 * 4, 18 * 4, 12 * 16 * 4, 12 * 4})
        EXPECT_EQ(std::count(sent.begin(), sent.end(), Sent{kind, bytes}), 1) << Sent{kind, bytes};
  });
}

// The same as a sharded module: all parameters of it together, in runs.
TEST(Listing, SaysWhatAShardedModuleSends) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    const auto sent = sent_by(model, torch::ones({8, 10}));
    EXPECT_GE(std::count(sent.begin(), sent.end(), Sent{Kind::AllGatherIntoTensor, 346 * 4}), 1);
    EXPECT_EQ(std::count(sent.begin(), sent.end(), Sent{Kind::ReduceScatterTensor, 346 * 4}), 1);
  });
}

TEST(Listing, SaysWhatATensorParallelStepSends) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    parallelize_module(model, me.mesh("tp=2"), {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    EXPECT_EQ(sent_by(model, torch::ones({8, 10})), (std::vector<Sent>{{Kind::AllReduce, 8 * 10 * 4}}));
    auto other = clone(start);
    parallelize_module(other, me.mesh("tp=2"),
                       {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel{.output_layouts = Shard(0)}}});
    const auto sent = sent_by(other, torch::ones({8, 10}));
    EXPECT_GE(std::count(sent.begin(), sent.end(), Sent{Kind::ReduceScatterTensor, 8 * 10 * 4}), 1);
  });
}

// All collectives that programs can have are known by what records call them.
TEST(Listing, EveryCollectiveHasAKind) {
  int count = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("tessera::") || !name.overload_name.empty()) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || compiler::kind_of(*op) != compiler::OpKind::Collective) continue;
    count++;
    EXPECT_NE(compiler::record_kind(*op), Kind::Count) << name.name << " has no row in ir/collective.cpp";
  }
  EXPECT_GE(count, 13);
}

const std::string kTwo = R"(group @dp [0, 1]
input %0: f32[4] argument "0"
input %1: f32[6] argument "1"
%2: f32[4] = tessera.all_reduce(%0, "sum", @dp)
%3: f32[12] = tessera.all_gather(%1, 0, [6, 6], @dp)
%4: f32[4] in %2 = tessera.wait(%2!, @dp)
%5: f32[12] in %3 = tessera.wait(%3!, @dp)
return %4
return %5
)";

// The program object is what runs: edited, it lists and does something else.
TEST(Listing, AnEditedProgramListsAndSendsAsItWasEdited) {
  run_ranks(2, [](Rank& me) {
    auto program = compiler::parse(kTwo);
    program.groups[0].group = me.group();
    const auto run = [&] {
      const auto a = torch::ones({4}), b = torch::full({6}, me.rank + 1.0);
      compiler::Executable executable(program, {a.storage(), b.storage()});
      Records records;
      executable.run();
      EXPECT_EQ(records.sent, named_in(executable.listing())) << executable.listing();
      EXPECT_TRUE(at::equal(executable.output(program.outputs[0]), torch::full({4}, 2)));
      EXPECT_EQ(executable.output(program.outputs[1]).sum().item<double>(), 18);
      return records.sent;
    };
    const Sent reduced{Kind::AllReduce, 16}, gathered{Kind::AllGatherIntoTensor, 48};
    EXPECT_EQ(run(), (std::vector<Sent>{reduced, gathered}));
    std::swap(program.nodes[0], program.nodes[1]);
    EXPECT_EQ(run(), (std::vector<Sent>{gathered, reduced}));
  });
}

// The first collective of a program goes behind the second, if nobody waits for it before.
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

// The same in a real step, by a pass of the user's.
TEST(Listing, ASwapByAPassShowsInListingAndRecords) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank&) {
    std::vector<std::vector<Sent>> sent;
    for (const bool swapped : {false, true}) {
      const ReducerModeScope mode(ReducerMode::PerParameterAlways);
      DistributedDataParallel ddp(clone(start));
      PassList passes{"schedule_comm_wait"};
      if (swapped) passes.emplace_back(compiler::Pass{"swap", swap_first_two});
      sent.push_back(sent_by(ddp, torch::ones({8, 10}), {.passes = passes, .verified = true}));
    }
    ASSERT_EQ(sent[0].size(), 4u);
    std::swap(sent[0][0], sent[0][1]);
    EXPECT_EQ(sent[0], sent[1]);
    EXPECT_FALSE(sent[0][0] == sent[0][1]);
  });
}

// What PyTorch's test of bucketing looks for is there because of the pass, and not without it.
TEST(Listing, WithoutTheFusionPassTheTokensAreNotThere) {
  const MLP start(models::four_linears());
  run_ranks(2, [&](Rank&) {
    for (const bool fused : {true, false}) {
      reset_compile_caches();
      auto net = clone(start);
      const ReducerModeScope mode(ReducerMode::PerParameter);
      const auto replica = replicate(net);
      auto compiled = compile(net);
      const auto loss = compiled(torch::ones({1, 2000})).sum();
      PassList passes{"schedule_comm_wait"};
      if (fused) passes.insert(passes.begin(), "fuse_ddp_with_concat_op");
      Records records;
      auto scope = compile_backward({.passes = passes});
      loss.backward();
      const auto listing = scope.programs().at(0)->listing();
      EXPECT_EQ(records.sent, named_in(listing)) << listing;
      EXPECT_EQ(records.sent.size(), fused ? 3u : 8u);
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

std::set<std::string> functions_in(const std::string& listing) {
  std::set<std::string> names;
  const std::regex name(R"((^|\n)(cpp_fused_\w+)\()");
  for (std::sregex_iterator i(listing.begin(), listing.end(), name), end; i != end; i++) names.insert((*i)[2]);
  return names;
}

TEST(Listing, NamesFunctionsThatRunOncePerCall) {
  MLP model(models::mlp_module());
  optim::AdamW opt(model->parameters(), {.foreach = false});
  const auto x = torch::ones({8, 10});
  train_step(model, opt, x);
  auto step = compile(train_step);
  step(model, opt, x);
  const auto* library = step.executable().library();
  ASSERT_NE(library, nullptr);
  const auto names = functions_in(step.listing());
  ASSERT_GE(names.size(), 2u) << step.listing();
  void* loaded = dlopen(library->path().c_str(), RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(loaded, nullptr) << library->path() << " is not loaded";
  std::map<std::string, const int64_t*> counts;
  for (const auto& name : names) {
    EXPECT_EQ(dlsym(loaded, name.c_str()), reinterpret_cast<void*>(library->function(name))) << name;
    counts[name] = static_cast<const int64_t*>(dlsym(loaded, (name + "_calls").c_str()));
    ASSERT_NE(counts[name], nullptr) << name;
  }
  for (int call = 0; call < 3; call++) {
    std::map<std::string, int64_t> before;
    for (const auto& [name, count] : counts) before[name] = *count;
    step(model, opt, x);
    for (const auto& [name, count] : counts) EXPECT_EQ(*count, before[name] + 1) << name << ", call " << call;
  }
  EXPECT_EQ(step.cache().size(), 1u);
  dlclose(loaded);
}

}  // namespace
}  // namespace tessera

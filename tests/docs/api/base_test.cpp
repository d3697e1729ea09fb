// The examples of the API reference: base, tracing, testing. tools/check_examples.py says how they get there.
#include "docs/temporary_folder.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tessera/testing/rule_oracle.h"
#include "tessera/testing/spawn.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <iostream>

namespace tessera::docs_base {
namespace {

namespace ts = tessera;
using namespace tessera::testing;

TEST(ApiBase, Error) {
  const int64_t axis = 2, ndim = 2;
  std::string message;
  const auto work = [&] {
    // example: tessera/base/error.h
    TESSERA_CHECK(axis < ndim, UsageError, "axis ", axis, " of a mesh with ", ndim, " axes");
    TESSERA_FAIL(InternalError, "not reached");
    // end
  };
  // example: tessera/base/error.h
  try {
    work();
  } catch (const ts::UsageError& error) {  // the call is wrong
    message = error.what_without_backtrace();
  } catch (const ts::ShardingError& error) {  // the placements do not combine
    message = error.what_without_backtrace();
  } catch (const ts::CommError& error) {  // a peer or the network failed
    message = error.what_without_backtrace();
  } catch (const ts::SystemError& error) {  // the disk is full, ...
    message = error.what_without_backtrace();
  } catch (const ts::InternalError& error) {  // please report it
    message = error.what_without_backtrace();
  }
  // end
  EXPECT_EQ(message, "axis 2 of a mesh with 2 axes");
}

void train() { throw std::runtime_error("a planted error"); }

int guarded_main() {
  // example: tessera/base/error_file.h
  ts::record_uncaught_errors();  // ts::init() does this, too
  ts::set_error_callback([](const std::string& message) { std::cerr << "this rank fails: " << message << "\n"; });
  try {
    train();
  } catch (const std::exception& error) {
    tessera::record_error(error);
    return 1;
  }
  // end
  return 0;
}

TEST(ApiBase, ErrorFile) {
  const auto in_child = [] {
    unsetenv("TORCHELASTIC_ERROR_FILE");
    std::exit(guarded_main());
  };
  EXPECT_EXIT(in_child(), ::testing::ExitedWithCode(1), "a planted error");
}

TEST(ApiBase, ReduceOp) {
  // example: tessera/base/reduce_op.h
  const ts::ReduceOp op = ts::parse_reduce_op("max");
  const std::string name = ts::to_string(op);
  std::cout << "reduce with " << op << "\n";
  // end
  EXPECT_EQ(name, "max");
}

// example: tessera/base/visit.h
struct Batch {
  at::Tensor tokens;
  std::optional<at::Tensor> mask;
  friend void tessera_visit(Batch& b, auto&& field) { field(b.tokens), field(b.mask); }
};
// end

TEST(ApiBase, Visit) {
  // example: tessera/base/visit.h
  static_assert(ts::can_visit<Batch>);
  Batch batch{torch::ones({2, 3}), std::nullopt};
  ts::visit_tensors(batch.tokens, [](at::Tensor& t) { t = t.to(torch::kDouble); });
  ts::Tensors tensors = ts::tensors_of(batch);  // tokens, and an undefined tensor for the empty mask
  tensors[1] = torch::zeros({2, 3});
  ts::assign_tensors(batch, tensors);
  // end
  EXPECT_TRUE(batch.mask.has_value());
}

TEST(ApiBase, Version) {
  // example: tessera/version.h
  static_assert(TESSERA_VERSION_MAJOR == 0 && TESSERA_VERSION_MINOR >= 1 && TESSERA_VERSION_PATCH >= 0);
  std::cout << "Tessera " << TESSERA_VERSION << ", minor version " << TESSERA_STRINGIFY(TESSERA_VERSION_MINOR) << "\n";
  // end
}

// example: tessera/tracing/op_mode.h
struct Count : OpMode {
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override {
    ops++;
    next(op, keys, stack);
  }
  int ops = 0;
};
// end

TEST(ApiBase, OpMode) {
  torch::nn::Linear model(2, 2);
  const auto x = torch::ones({1, 2});
  // example: tessera/tracing/op_mode.h
  Count count;
  {
    OpModeScope scope(count);
    model->forward(x);
  }
  // end
  const int before = count.ops;
  EXPECT_GT(before, 0);
  // example: tessera/tracing/op_mode.h
  OpModeScope scope(count);
  {
    const OpModesOff off;
    model->forward(x);  // is not counted
  }
  // end
  EXPECT_EQ(count.ops, before);
}

TEST(ApiTesting, AssertClose) {
  const auto reference = torch::ones({2}), y = reference + 1e-8;
  // example: tessera/testing/assert_close.h
  EXPECT_EQ(close(y, reference), "");
  ts::testing::Tolerance tolerance = ts::testing::tolerance_of(torch::kFloat);
  tolerance.absolute = 1e-3;
  ts::testing::assert_close(y + 1e-4, reference, tolerance);  // throws if they differ
  // end
}

TEST(ApiTesting, ExpectError) {
  run_ranks(1, [](Rank& me) {
    const ts::DTensor t = ts::ones({4}, me.mesh("tp=1"));
    const auto f = [](int64_t n) -> int64_t { TESSERA_FAIL(UsageError, "f(", n, ") is too much; try 2"); };
    // example: tessera/testing/expect_error.h
    EXPECT_ERROR(UsageError, f(3), "f(3)", "try 2");
    EXPECT_CONTAINS(error_message<UsageError>([&] { t.redistribute({Partial()}); }), "must not be Partial");
    EXPECT_ERROR(UsageError, t.redistribute({Partial()}), "Partial");
    // end
  });
}

TEST(ApiTesting, Ranks) {
  // example: tessera/testing/ranks.h
  const ts::testing::Body body = [](ts::testing::Rank& me) {
    auto x = torch::full({1}, me.rank);
    ts::all_reduce(x);
    EXPECT_EQ(x.item<int64_t>(), 1);
  };
  ts::testing::run_ranks(2, body);
  const ts::testing::RankOptions options{.timeout = std::chrono::seconds(5)};
  run_ranks(
      4,
      [](Rank& me) {
        auto mesh = me.mesh("dp=2,tp=2");
        EXPECT_EQ(mesh["tp"].size(), 2);
      },
      options);
  // end
}

// example: tessera/testing/spawn.h
TEST(Gloo, Sums) {
  spawn_ranks(2, [](Rank& me) {
    auto x = torch::ones({1});
    all_reduce(x);
    EXPECT_EQ(x.item<int>(), me.size());
  });
}
// end

TEST(ApiTesting, Spawn) {
  // example: tessera/testing/spawn.h
  ts::testing::spawn_ranks_over_each(2, [](ts::testing::Rank& me) {  // of kProcessBackends
    EXPECT_EQ(me.size(), 2);
    EXPECT_TRUE(me.world.backend() == kProcessBackends[0] || me.world.backend() == kProcessBackends[1]);
  });
  // end
}

TEST(ApiTesting, SpawnProcesses) {
  // example: tessera/testing/ranks.h
  const ts::testing::SpawnOptions spawn{.backend = "shm", .arguments = {"--gtest_filter=ApiTesting.SpawnProcesses"}};
  ts::testing::spawn_processes(
      2, [](ts::testing::Rank& me) { ts::barrier(); }, spawn);
  // end
}

TEST(ApiTesting, RuleOracle) {
  // example: tessera/testing/rule_oracle.h
  const ts::testing::Sample sample{
      .op = "aten::mm", .args = {torch::randn({5, 3}), torch::randn({3, 4})}, .plain_args = {}};
  const ts::testing::RuleReport report = ts::testing::verify_rule(sample);
  std::cout << report << "\n";  // the number of strategies, and each that is wrong
  EXPECT_TRUE(report.wrong.empty());
  const std::vector<std::string> ops = ts::testing::ops_of_family("matmul");
  const ts::testing::FamilyReport family = ts::testing::verify_family("matmul", {sample}, /*exempt=*/ops);
  // end
  EXPECT_FALSE(ops.empty());
  EXPECT_GT(family.strategies, 0);
}

}  // namespace
}  // namespace tessera::docs_base

// The functional collectives: registered ops, any dim, uneven sizes, results pending until wait().
#include "tessera/comm/functional_collectives.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/records.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <numeric>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;
using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

struct Names : comm::Observer {
  std::vector<std::string> posted, done;
  void on_post(const comm::Record& r) override { posted.push_back(r.name()); }
  void on_done(const comm::Record& r) override { done.push_back(r.name()); }
};

Sizes even(int64_t n) { return Sizes(static_cast<size_t>(n), 2); }
Sizes uneven(int64_t n) {  // 0, 3, 1, 2: one is empty, no two are equal
  const Sizes all{0, 3, 1, 2};
  return n == 1 ? Sizes{3} : Sizes(all.begin(), all.begin() + n);
}
int64_t sum(const Sizes& s) { return std::accumulate(s.begin(), s.end(), int64_t{0}); }
int64_t begin(const Sizes& s, int64_t rank) { return std::accumulate(s.begin(), s.begin() + rank, int64_t{0}); }
int64_t own(const Sizes& s, int64_t rank) { return s[static_cast<size_t>(rank)]; }

// Shape (2, 3, 4), with `extent` as the size of `dim`.
at::Tensor numbers(int64_t dim, int64_t extent, double from = 0) {
  Sizes shape{2, 3, 4};
  shape[static_cast<size_t>(dim)] = extent;
  return at::arange(2 * 3 * 4 / (dim == 0 ? 2 : dim == 1 ? 3 : 4) * extent).view(shape).to(at::kFloat) + from;
}

void for_all_sizes_and_dims(const std::function<void(Rank&, const Sizes&, int64_t dim)>& body) {
  for (int64_t n = 1; n <= 4; n++)
    for (const auto& sizes : {even(n), uneven(n)})
      for (int64_t dim = 0; dim < 3; dim++) {
        SCOPED_TRACE(c10::str(n, " ranks, sizes ", c10::Join(",", sizes), ", dim ", dim));
        run_ranks(n, [&](Rank& me) { body(me, sizes, dim); });
      }
}

TEST(Funcol, AllGather) {
  for_all_sizes_and_dims([](Rank& me, const Sizes& sizes, int64_t dim) {
    at::Tensor full = numbers(dim, sum(sizes));
    at::Tensor out =
        funcol::all_gather(full.narrow(dim, begin(sizes, me.rank), own(sizes, me.rank)), dim, sizes, me.group());
    funcol::wait(out, me.group());
    EXPECT_TRUE(out.equal(full));
    EXPECT_TRUE(out.is_contiguous());
  });
}

TEST(Funcol, ReduceScatter) {
  for_all_sizes_and_dims([](Rank& me, const Sizes& sizes, int64_t dim) {
    const int64_t n = me.size();
    at::Tensor full = numbers(dim, sum(sizes), static_cast<double>(me.rank));
    for (auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max}) {
      at::Tensor out = funcol::reduce_scatter(full, dim, sizes, op, me.group());
      funcol::wait(out, me.group());
      at::Tensor want = op == ReduceOp::Max ? numbers(dim, sum(sizes), static_cast<double>(n - 1))
                                            : numbers(dim, sum(sizes)) * n + n * (n - 1) / 2.0;
      if (op == ReduceOp::Avg) want = want / n;
      EXPECT_EQ(testing::close(out, want.narrow(dim, begin(sizes, me.rank), own(sizes, me.rank))), "") << op;
    }
  });
}

TEST(Funcol, AllToAllFromEveryDimToEveryDim) {
  for_all_sizes_and_dims([](Rank& me, const Sizes& sizes, int64_t split) {
    const auto n = static_cast<size_t>(me.size());
    for (int64_t cat = 0; cat < 3; cat++) {
      if (cat == split) continue;
      Sizes other(n);  // sizes along cat: 1, 2, 3, ...
      std::iota(other.begin(), other.end(), 1);
      Sizes shape{2, 3, 4};
      shape[static_cast<size_t>(split)] = sum(sizes);
      shape[static_cast<size_t>(cat)] = sum(other);
      at::Tensor full = at::arange(shape[0] * shape[1] * shape[2]).view(shape).to(at::kFloat);
      at::Tensor x = full.narrow(cat, begin(other, me.rank), own(other, me.rank));
      at::Tensor out = funcol::all_to_all(x, split, sizes, cat, other, me.group());
      funcol::wait(out, me.group());
      EXPECT_TRUE(out.equal(full.narrow(split, begin(sizes, me.rank), own(sizes, me.rank))));
    }
  });
}

TEST(Funcol, CoalescedIsOneCollective) {
  for (int64_t n = 1; n <= 4; n++)
    run_ranks(n, [](Rank& me) {
      const int64_t n = me.size();
      Names names;
      comm::ObserverScope scope(&names);
      const Sizes a = uneven(n), b = even(n);
      Sizes sizes = a;
      sizes.insert(sizes.end(), b.begin(), b.end());
      at::Tensor first = numbers(1, sum(a)), second = numbers(0, sum(b)).to(at::kLong);
      auto gathered = funcol::all_gather_coalesced(
          {first.narrow(1, begin(a, me.rank), own(a, me.rank)), second.narrow(0, begin(b, me.rank), own(b, me.rank))},
          {1, 0}, sizes, me.group());
      for (auto& x : gathered) funcol::wait(x, me.group());
      EXPECT_TRUE(gathered[0].equal(first) && gathered[1].equal(second));
      auto scattered =
          funcol::reduce_scatter_coalesced({first, second.to(at::kFloat)}, {1, 0}, sizes, ReduceOp::Sum, me.group());
      for (auto& x : scattered) funcol::wait(x, me.group());
      EXPECT_TRUE(scattered[0].equal(first.narrow(1, begin(a, me.rank), own(a, me.rank)) * n));
      EXPECT_TRUE(scattered[1].equal(second.narrow(0, begin(b, me.rank), own(b, me.rank)).to(at::kFloat) * n));
      auto reduced =
          funcol::all_reduce_coalesced({first, first.transpose(0, 2).select(0, 0)}, ReduceOp::Avg, me.group());
      for (auto& x : reduced) funcol::wait(x, me.group());
      EXPECT_EQ(testing::close(reduced, {first, first.transpose(0, 2).select(0, 0).contiguous()}), "");
      std::erase(names.posted, "wait_tensor");
      EXPECT_EQ(names.posted, (std::vector<std::string>{"all_gather_into_tensor_coalesced",
                                                        "reduce_scatter_tensor_coalesced", "all_reduce_coalesced"}));
    });
}

TEST(Funcol, ResultsDoNotAliasInputs) {
  run_ranks(2, [](Rank& me) {
    at::Tensor x = at::full({3}, static_cast<double>(me.rank + 1)), copy = x.clone();
    at::Tensor sum = funcol::all_reduce(x, ReduceOp::Sum, me.group());
    at::Tensor sent = funcol::broadcast(x, 1, me.group());
    funcol::wait(sum, me.group());
    funcol::wait(sent, me.group());
    EXPECT_TRUE(x.equal(copy));
    EXPECT_FALSE(sum.is_alias_of(x) || sent.is_alias_of(x));
    EXPECT_TRUE(sum.equal(at::full({3}, 3.0)) && sent.equal(at::full({3}, 2.0)));
    at::Tensor expanded = at::ones({1}).expand({4});  // not contiguous: what sum().backward() gives
    at::Tensor y = funcol::all_reduce(expanded, ReduceOp::Sum, me.group());
    funcol::wait(y, me.group());
    EXPECT_TRUE(y.equal(at::full({4}, 2.0)));
  });
}

TEST(Funcol, WaitAcceptsAView) {
  run_ranks(2, [](Rank& me) {
    at::Tensor a = funcol::all_reduce(at::ones({4}), ReduceOp::Sum, me.group());
    at::Tensor b = funcol::all_reduce(at::ones({4}), ReduceOp::Sum, me.group());
    EXPECT_EQ(me.group()->pending(), 2u);
    at::Tensor independent = at::ones({4}) + 1;  // runs while both are in flight
    funcol::wait(b.view({2, 2}), me.group());
    EXPECT_EQ(me.group()->pending(), 1u);
    funcol::wait(b, me.group());  // a second wait does nothing
    funcol::wait(independent, me.group());
    funcol::wait(a, me.group());
    EXPECT_EQ(me.group()->pending(), 0u);
    EXPECT_TRUE(a.equal(b) && a.equal(independent));
  });
}

TEST(Funcol, NumberOfPendingResultsIsBounded) {
  run_ranks(2, [](Rank& me) {
    for (int i = 0; i < 1000; i++) funcol::all_reduce(at::ones({4}), ReduceOp::Sum, me.group());
    EXPECT_LE(me.group()->pending(), 256u);
  });
}

TEST(Funcol, SchemasDeclareAliasing) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const char* name : {"all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_coalesced", "reduce_scatter",
                           "reduce_scatter_coalesced", "all_to_all", "broadcast"}) {
    const auto& schema = dispatcher.findSchemaOrThrow(c10::str("tessera::", name).c_str(), "").schema();
    EXPECT_FALSE(schema.is_mutable()) << name;
    EXPECT_EQ(schema.returns()[0].alias_info(), nullptr) << name;
  }
  const auto& wait = dispatcher.findSchemaOrThrow("tessera::wait", "").schema();
  EXPECT_TRUE(wait.is_mutable());
  EXPECT_NE(wait.returns()[0].alias_info(), nullptr);
}

TEST(Funcol, CanBeCalledBoxedWithTheGroupAsAnArgument) {
  run_ranks(2, [](Rank& me) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::all_reduce", "");
    std::vector<c10::IValue> stack{at::ones({2}), "sum", me.group()};
    op.callBoxed(stack);
    funcol::wait(stack[0].toTensor(), me.group());
    EXPECT_TRUE(stack[0].toTensor().equal(at::full({2}, 2.0)));
  });
}

TEST(Funcol, BadSizesAreRefused) {
  run_ranks(2, [](Rank& me) {
    const auto expect_error = [](const char* part, auto&& call) {
      EXPECT_CONTAINS(testing::error_message<UsageError>(call), part);
    };
    expect_error("needs 2 sizes", [&] { funcol::all_gather(at::ones({2}), 0, {2}, me.group()); });
    expect_error("must be 3", [&] { funcol::all_gather(at::ones({2}), 0, {3, 3}, me.group()); });
    expect_error("must be 4", [&] { funcol::reduce_scatter(at::ones({3}), 0, {2, 2}, ReduceOp::Sum, me.group()); });
    expect_error("needs 2 sizes", [&] { funcol::all_to_all(at::ones({2, 2}), 0, {1, 1}, 1, {}, me.group()); });
    expect_error("dim 1", [&] { funcol::all_gather(at::ones({2}), 1, {2, 2}, me.group()); });
    expect_error("to itself", [&] { funcol::all_to_all(at::ones({2, 2}), 0, {1, 1}, 0, {2, 2}, me.group()); });
    expect_error("avg of a tensor of Long",
                 [&] { funcol::all_reduce(at::ones({2}, at::kLong), ReduceOp::Avg, me.group()); });
    me.group()->barrier().wait();  // no collective was posted, so the group is still usable
  });
}

}  // namespace
}  // namespace tessera

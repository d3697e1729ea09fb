#include "benchmarks/harness/bench.h"

#include "benchmarks/harness/bench_timer.h"
#include "tessera/base/error.h"

#include <gtest/gtest.h>

#include <sstream>

namespace tessera::bench {
namespace {

Bench two_rows() {
  return {"two", "two rows", [](const EmitRow& emit) {
            emit({.name = "add/1/-/hit", .unit = "us", .ours = 0.5, .plain = 0.25});
            emit({.name = "add/1/-/miss", .unit = "us", .ours = 8, .note = "cold"});
          }};
}

std::string printed(const PeerFigures& peer, bool json) {
  std::ostringstream out;
  run_bench(two_rows(), peer, {out, json});
  return out.str();
}

TEST(Bench, JsonHasOnlyTheKeysThatAreSet) {
  EXPECT_EQ(printed({}, true), R"({"bench":"two","case":"add/1/-/hit","unit":"us","ours":0.5,"plain":0.25})"
                               "\n"
                               R"({"bench":"two","case":"add/1/-/miss","unit":"us","ours":8.0,"note":"cold"})"
                               "\n");
}

TEST(Bench, PeerFiguresAreMatchedByCase) {
  EXPECT_EQ(
      printed({{"add/1/-/hit", {7.5, 0.75}}, {"mul/1/-/hit", {1, {}}}}, true),
      R"({"bench":"two","case":"add/1/-/hit","unit":"us","ours":0.5,"plain":0.25,"peer":7.5,"note":"peer's plain 0.75"})"
      "\n"
      R"({"bench":"two","case":"add/1/-/miss","unit":"us","ours":8.0,"note":"cold"})"
      "\n");
}

TEST(Bench, TableHasAHeaderAndOneLinePerRow) {
  std::istringstream lines(printed({}, false));
  std::string head, hit, miss, end;
  std::getline(lines, head);
  std::getline(lines, hit);
  std::getline(lines, miss);
  EXPECT_FALSE(std::getline(lines, end));
  EXPECT_NE(head.find("plain"), std::string::npos);
  EXPECT_EQ(head.find("ours") + 4, hit.find("0.5") + 3) << "figures are aligned with their header\n"
                                                        << head << '\n'
                                                        << hit;
  EXPECT_NE(miss.find("cold"), std::string::npos);
}

TEST(Bench, CaseNamesHaveFourParts) {
  for (auto good : {"add/1/-/hit", "a/b/c/d"}) EXPECT_NO_THROW(check_case({.name = good})) << good;
  for (auto bad : {"", "add", "add/1/hit", "add/1//hit", "add/1/-/", "/1/-/hit", "add/1/-/hit/more"})
    EXPECT_THROW(check_case({.name = bad}), UsageError) << bad;
}

TEST(Bench, UnknownNamesListTheKnownOnes) {
  BenchRegistry registry;
  registry.add(two_rows());
  EXPECT_EQ(registry.find("two").help, "two rows");
  EXPECT_THROW(registry.add(two_rows()), InternalError);
  try {
    registry.find("three");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "unknown benchmark 'three'; known: two");
  }
}

TEST(Bench, EveryBenchmarkHasAHelpLine) {
  BenchRegistry registry;
  register_all_benches(registry);
  ASSERT_FALSE(registry.all().empty());
  for (const auto& bench : registry.all()) EXPECT_FALSE(bench.help.empty()) << bench.name;
}

TEST(Timer, MakesTheRequestedCalls) {
  int64_t calls = 0;
  auto timing = time_us({.repetitions = 3, .iterations = 20}, [&] { calls++; });
  EXPECT_EQ(timing.iterations, 20);
  EXPECT_EQ(calls, 2 + 3 * 20);  // a tenth as warm-up, then three repetitions
  EXPECT_LE(timing.best_us, timing.median_us);
}

TEST(Timer, Alternates) {
  std::string order;
  time_alternating(
      {.repetitions = 3, .iterations = 1}, [&] { order += 'a'; }, [&] { order += 'b'; });
  EXPECT_EQ(order,
            "ababab"
            "ab");
}

}  // namespace
}  // namespace tessera::bench

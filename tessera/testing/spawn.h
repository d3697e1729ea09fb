#pragma once
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

namespace tessera::testing {

// Runs `body` on n processes from inside a gtest test, see spawn_processes().
// Example:  TEST(Gloo, Sums) { spawn_ranks(2, [](Rank& me) { ... EXPECT_EQ(...); }); }
inline void spawn_ranks(int64_t n, const Body& body, SpawnOptions options = {}) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  options.arguments.push_back(std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name());
  options.arguments.push_back("--gtest_also_run_disabled_tests");
  spawn_processes(n, body, options, [] { return ::testing::Test::HasFailure(); });
}

// The backends for processes of one machine.
constexpr const char* kProcessBackends[] = {"shm", "gloo"};

// Calls spawn_ranks for each of these backends.
inline void spawn_ranks_over_each(int64_t n, const Body& body, SpawnOptions options = {}) {
  for (const char* backend : kProcessBackends) {
    SCOPED_TRACE(backend);
    options.backend = backend;
    spawn_ranks(n, body, options);
  }
}

}  // namespace tessera::testing

#pragma once
#include "tessera/testing/detail/op_call.h"
#include "tessera/testing/detail/sample_maker.h"
#include "tessera/testing/detail/soak.h"
#include "tessera/testing/rule_oracle.h"
#include "tests/rules/strategy_gradients.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <iostream>
#include <string>
#include <vector>

// Verifies every strategy of a family by brute force. Every op of the family needs a sample.
namespace tessera::testing {

// The query of a call, as its rule gets it.
inline rules::OpQuery call_query(const Sample& sample) {
  static std::deque<OpCall> calls;  // a query refers to its call
  return calls.emplace_back(sample).query(sample.plain_args);
}

inline c10::IValue bools(const std::vector<bool>& values) {
  c10::List<bool> list;
  for (bool v : values) list.push_back(v);
  return list;
}

inline void expect_family_holds(const std::string& family, const std::vector<Sample>& samples,
                                const std::vector<std::string>& exempt = {}) {
  at::set_num_threads(1);  // many tiny calls: threads would slow them down
  auto report = verify_family(family, samples, exempt);
  EXPECT_GT(report.ops, 0);
  EXPECT_TRUE(report.problems.empty()) << report;
  std::cout << report.family << ": " << report.ops << " ops, " << report.strategies << " strategies, " << report.cases
            << " cases; " << report.exempt << " ops exempt\n";
  for (const int64_t ranks : long_soak() ? std::vector<int64_t>{2, 3, 4} : std::vector<int64_t>{2}) {
    const auto gradients = verify_gradients(samples, ranks);
    for (const auto& line : gradients.wrong) ADD_FAILURE() << line;
    std::cout << report.family << ": gradients of " << gradients.ops << " ops on " << ranks << " ranks, "
              << gradients.cases << " cases\n";
  }
}

inline std::vector<Sample> samples_of_all(const std::string& family, const std::vector<std::string>& but = {}) {
  std::vector<Sample> samples;
  for (const auto& op : ops_of_family(family))
    if (std::find(but.begin(), but.end(), op) == but.end())
      for (auto& sample : samples_by_schema(op)) samples.push_back(std::move(sample));
  return samples;
}

}  // namespace tessera::testing

#pragma once
#include "tessera/nn/hooks.h"
#include "tessera/tensor_parallel/detail/check_recorder.h"
#include "tessera/tensor_parallel/plan.h"

#include <optional>
#include <string>
#include <vector>

// What to write instead of a plan, or of code, that gives another result than the plain module.
namespace tessera {

// A plan with one change.
struct PlanRepair {
  Plan plan;
  std::string entry;   // the pattern of the changed entry, or the path of the new one
  std::string advice;  // "add .sections = 3 to ..."
};

// Plans to try, likely ones first. `path` is the first module that differs; `before` are the modules that ran before
// it, last first.
std::vector<PlanRepair> plan_repairs(Module& root, const Plan& plan, const std::string& path,
                                     const std::vector<std::string>& before);

// Finds the first view that divides another dim on the local tensor than in the plain module:
//
//   plain  [2, 3, 16]  view({2, 3, 4, -1})  ->  [2, 3, 4, 4]
//   local  [2, 3, 8]   view({2, 3, 4, -1})  ->  [2, 3, 4, 2]       the heads are sharded, but the head dim is halved
//
// Also a last view of `found` that is not possible. Returns its module and the advice.
struct ViewAdvice {
  std::string path, advice;
};
std::optional<ViewAdvice> view_advice(const std::vector<ViewCall>& plain, const std::vector<ViewCall>& found,
                                      bool last_one_failed);

}  // namespace tessera

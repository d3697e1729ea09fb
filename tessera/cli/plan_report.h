#pragma once
#include "tessera/models/plans.h"
#include "tessera/tensor_parallel/detail/module_plan.h"

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

// What a tensor-parallel plan does to one of our models, told before anything runs: parameters by working the plan out,
// collectives by running one layer as rank 0 of a fake world, with no other rank there.
namespace tessera::cli {

struct PlanRequest {
  std::string model = "gpt2-124m";
  int64_t ranks = 2;
  std::optional<Plan> plan = {};  // none: the model's own
  models::PlanOptions options = {};
  int64_t batch = 1, sequence = 128;
};

struct Traffic {
  std::string collectives;  // "all_reduce", "2 all_gather"; "" for none
  int64_t count = 0, bytes = 0;
  bool operator==(const Traffic&) const = default;
};

struct PlanRow {
  std::string module;  // layers as one: h.*.attn
  int64_t times = 1;   // how often the model has it
  ModuleWork work;     // of the first
  Traffic forward, backward;
};

struct PlanReport {
  PlanRequest request;
  Plan plan;
  std::vector<PlanRow> rows;
  Traffic elsewhere_forward, elsewhere_backward;  // in modules that are not planned
  int64_t parameters = 0, local_parameters = 0;   // of the whole model
  int64_t layers = 1;
};

// Needs a thread without a world; makes one and destroys it. Throws what parallelize_module would.
PlanReport make_plan_report(const PlanRequest& request);

std::ostream& operator<<(std::ostream& out, const PlanReport& report);

}  // namespace tessera::cli

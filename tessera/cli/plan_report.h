#pragma once
#include "tessera/models/sizes.h"
#include "tessera/tensor_parallel/detail/module_plan.h"

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

// Reports what a tensor-parallel plan does to a built-in model: the placements of the parameters, and the collectives
// of each module. One layer runs as rank 0 of a fake world.
namespace tessera::cli {

struct PlanRequest {
  std::string model = "gpt2-124m";
  int64_t ranks = 2;
  std::optional<Plan> plan = {};  // nullopt: the model's plan
  models::PlanOptions options = {};
  int64_t batch = 1, sequence = 128;
};

struct ModuleTraffic {
  std::string collectives;  // "all_reduce", "2 all_gather"; "" for none
  int64_t count = 0, bytes = 0;
  bool operator==(const ModuleTraffic&) const = default;
};

struct PlanReportRow {
  std::string module;  // all layers in one row: h.*.attn
  int64_t count = 1;   // number of such modules
  ModulePlan work;     // of the first one
  ModuleTraffic forward, backward;
};

struct PlanReport {
  PlanRequest request;
  Plan plan;
  std::vector<PlanReportRow> rows;
  ModuleTraffic other_forward, other_backward;   // of modules without an entry in the plan
  int64_t parameters = 0, local_parameters = 0;  // of the model, and on rank 0
  int64_t layers = 1;
};

// Requires: this thread has no world; creates a fake one and destroys it. Throws the errors of parallelize_module().
PlanReport make_plan_report(const PlanRequest& request);

std::ostream& operator<<(std::ostream& out, const PlanReport& report);

}  // namespace tessera::cli

#include "tessera/launch/detail/rank_plan.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <ostream>

namespace tessera::launch {
namespace {

constexpr const char* kSecret = "TESSERA_JOB_SECRET";

}  // namespace

std::vector<int> cores_of(int64_t i, int64_t n, const std::vector<int>& cores) {
  const auto count = static_cast<int64_t>(cores.size());
  if (count == 0) return {};
  if (n > count) return {cores[static_cast<size_t>(i % count)]};
  return {cores.begin() + i * count / n, cores.begin() + (i + 1) * count / n};
}

std::vector<RankPlan> plan_ranks(const HostAssignment& host, const RankSettings& settings) {
  const auto text = [](int64_t value) { return std::to_string(value); };
  const int64_t threads = settings.threads_per_rank > 0
                              ? settings.threads_per_rank
                              : std::max<int64_t>(1, static_cast<int64_t>(settings.cores.size()) / host.nproc_per_node);
  std::vector<RankPlan> plans;
  for (int64_t local = 0; local < host.nproc_per_node; local++) {
    RankPlan plan;
    plan.local_rank = local;
    plan.rank = host.first_rank + local;
    plan.error_file = c10::str(settings.error_dir, "/rank_", plan.rank, ".", settings.restarts, ".json");
    if (settings.pin) plan.cores = cores_of(local, host.nproc_per_node, settings.cores);
    plan.variables = {
        // the variables that torchrun sets; one role has all ranks
        {"RANK", text(plan.rank)},
        {"WORLD_SIZE", text(host.world_size)},
        {"LOCAL_RANK", text(local)},
        {"LOCAL_WORLD_SIZE", text(host.nproc_per_node)},
        {"GROUP_RANK", text(host.node_rank)},
        {"GROUP_WORLD_SIZE", text(host.nnodes)},
        {"ROLE_NAME", "default"},
        {"ROLE_RANK", text(plan.rank)},
        {"ROLE_WORLD_SIZE", text(host.world_size)},
        {"MASTER_ADDR", host.store_host},
        {"MASTER_PORT", text(host.store_port)},
        {"TORCHELASTIC_RUN_ID", host.run_id},
        {"TORCHELASTIC_RESTART_COUNT", text(settings.restarts)},
        {"TORCHELASTIC_MAX_RESTARTS", text(settings.max_restarts)},
        {"TORCHELASTIC_USE_AGENT_STORE", "True"},
        {"TORCHELASTIC_ERROR_FILE", plan.error_file},
        {"TESSERA_RUN", "1"},
        {kSecret, settings.job_secret},
    };
    if (settings.threads_per_rank > 0 || !settings.user_set.contains("OMP_NUM_THREADS"))
      plan.variables.emplace_back("OMP_NUM_THREADS", text(threads));
    if (host.nnodes == 1 && !settings.user_set.contains("TESSERA_GLOO_HOST"))  // listen on loopback only
      plan.variables.emplace_back("TESSERA_GLOO_HOST", "127.0.0.1");
    plans.push_back(std::move(plan));
  }
  return plans;
}

std::ostream& operator<<(std::ostream& out, const RankPlan& plan) {
  out << "rank " << plan.rank;
  if (!plan.cores.empty()) out << " on cores " << c10::Join(",", plan.cores);
  for (const auto& [name, value] : plan.variables) out << ' ' << name << '=' << (name == kSecret ? "(set)" : value);
  return out;
}

}  // namespace tessera::launch

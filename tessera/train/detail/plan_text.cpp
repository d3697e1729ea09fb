#include "tessera/train/detail/plan_traffic.h"
#include "tessera/train/detail/text_table.h"
#include "tessera/train/plan.h"

#include <algorithm>
#include <iomanip>
#include <ostream>
#include <sstream>

namespace tessera::train {
namespace {

std::string bytes_text(int64_t bytes) {
  if (bytes < 10'000) return std::to_string(bytes) + " B";
  const bool giga = bytes >= 1'000'000'000;
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / (giga ? 1e9 : 1e6)
       << (giga ? " GB" : " MB");
  return text.str();
}

std::string sizes_text(const std::vector<int64_t>& sizes) { return c10::str(c10::IntArrayRef(sizes)); }

// "h.0.ln_1.weight" -> "h.*.ln_1.weight", for the parameters of all blocks.
std::string block_pattern(const std::string& name) {
  const auto first = name.find('.'), second = name.find('.', first + 1);
  return name.substr(0, first) + ".*" + name.substr(second);
}

TextTable parameter_table(const TrainPlan& plan) {
  const auto blocks = std::to_string(planning::blocks_in(model_config(plan.config.model)));
  TextTable lines{{"name", "x", "global sizes", "local sizes", "placements"}};
  for (const auto& p : plan.parameters) {
    const int64_t block = planning::block_of(p.name);
    if (block > 0) continue;
    lines.push_back({block < 0 ? p.name : block_pattern(p.name), block < 0 ? "1" : blocks, sizes_text(p.sizes),
                     sizes_text(p.local_sizes), p.placements.empty() ? "replicated" : p.placements});
  }
  return lines;
}

TextTable traffic_table(const TrainPlan& plan) {
  TextTable lines{{"axis", "what", "collectives", "bytes"}};
  for (const auto& row : plan.traffic)
    lines.push_back({row.axis, row.what, (row.estimate ? "about " : "") + std::to_string(row.traffic.collectives),
                     (row.estimate ? "about " : "") + bytes_text(row.traffic.bytes)});
  for (const auto& [axis, traffic] : plan.traffic_by_axis())
    lines.push_back({axis, "total", std::to_string(traffic.collectives), bytes_text(traffic.bytes)});
  return lines;
}

TextTable memory_table(const TrainPlan& plan) {
  TextTable lines{{"kind", "bytes"}};
  for (const auto& row : plan.memory)
    lines.push_back({row.kind, (row.estimate ? "about " : "") + bytes_text(row.bytes)});
  lines.push_back({"total", "about " + bytes_text(plan.memory_bytes())});
  if (plan.device_memory > 0) lines.push_back({"memory of the device", bytes_text(plan.device_memory)});
  return lines;
}

std::string percent_text(double share) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << 100 * share << " %";
  return text.str();
}

TextTable pipeline_table(const PlannedPipeline& pipeline) {
  TextTable lines{{"pp", "stages", "blocks", "memory", "busy"}};
  for (size_t rank = 0; rank < pipeline.ranks.size(); rank++) {
    const auto& row = pipeline.ranks[rank];
    std::string stages;
    for (const int64_t stage : row.stages) stages += (stages.empty() ? "" : ", ") + std::to_string(stage);
    lines.push_back({std::to_string(rank), stages, std::to_string(row.blocks), "about " + bytes_text(row.memory_bytes),
                     percent_text(row.busy)});
  }
  return lines;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const TrainPlan& plan) {
  const auto& config = plan.config;
  const auto [min, max] = std::minmax_element(plan.parameter_bytes.begin(), plan.parameter_bytes.end());
  out << config.model.name << ", " << models::parameter_count(model_config(config.model)) << " parameters, on "
      << plan.ranks << " rank" << (plan.ranks == 1 ? "" : "s") << ", mesh " << plan.mesh << ": a step of "
      << config.training.batch << " x " << sequence_length(config) << " tokens, " << config.training.precision
      << ". This config "
      << (plan.device_memory > 0 && plan.memory_bytes() > plan.device_memory ? "does not fit" : "can run")
      << ".\n\nParameters\n";
  print_table(out, parameter_table(plan), "  ");
  out << "  bytes per rank: ";
  if (*min != *max) out << *min << " to ";
  out << *max << "\n\nCollectives per step" << (config.training.compile ? ", before --compile merges some" : "")
      << '\n';
  if (plan.traffic.empty())
    out << "  none\n";
  else
    print_table(out, traffic_table(plan), "  ");
  if (plan.pipeline) {
    out << "\nPipeline " << plan.pipeline->schedule << ": " << plan.pipeline->stages << " stages, "
        << plan.pipeline->microbatches << " microbatches, bubble " << percent_text(plan.pipeline->bubble)
        << " of the time (by floating-point operations)\n";
    print_table(out, pipeline_table(*plan.pipeline), "  ");
  }
  out << "\nMemory of rank " << plan.memory_rank << '\n';
  print_table(out, memory_table(plan), "  ");
  if (plan.device_memory > 0 && plan.memory_bytes() > plan.device_memory)
    out << "  It does not fit: a rank needs about " << bytes_text(plan.memory_bytes()) << ", and its device has "
        << bytes_text(plan.device_memory)
        << ".\n  Use more ranks on fsdp, tp or pp, a smaller --batch, --accumulate or --activation-checkpoint; for "
           "another "
           "device, --device-memory.\n";
  return out;
}

}  // namespace tessera::train

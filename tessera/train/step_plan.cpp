#include "tessera/base/error.h"
#include "tessera/comm/detail/fake_world.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/saved_tensor_hooks.h"
#include "tessera/optim/detail/local_tensors.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/text_table.h"
#include "tessera/train/plan.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <ostream>
#include <sstream>
#include <unordered_set>

namespace tessera {
namespace {

using train::PlannedTraffic;

std::string step_bytes_text(int64_t bytes) {
  if (bytes < 10'000) return std::to_string(bytes) + " B";
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / 1e6 << " MB";
  return text.str();
}

// The collectives of a step, by axis, kind and phase, in the order of their first use.
class StepTraffic final : private comm::Observer {
 public:
  StepTraffic() : scope_(this) {}
  void set_phase(const char* phase) { phase_ = phase; }
  std::vector<PlannedTraffic> seen = {};

 private:
  void on_post(const comm::Record& record) override {
    if (!record.counted()) return;
    const auto what = std::string(record.name()) + phase_;
    auto found = std::find_if(seen.begin(), seen.end(), [&](const PlannedTraffic& each) {
      return each.axis == record.group && each.what == what;
    });
    if (found == seen.end()) found = seen.insert(seen.end(), {record.group, what, {}});
    found->traffic.collectives++;
    found->traffic.bytes += record.bytes;
  }
  const char* phase_ = "";
  comm::ObserverScope scope_;
};

int64_t local_bytes(const at::Tensor& t) { return static_cast<int64_t>(detail::local_or_self(t).nbytes()); }

// Counts the bytes that autograd saves for backward, without parameters; each storage once.
class SavedBytes {
 public:
  explicit SavedBytes(const torch::nn::Module& module)
      : hooks_({Accepts::AllTensors, [this](const at::Tensor& t) { return pack(t); }}) {
    for (const auto& p : module.parameters()) note(p);
  }
  int64_t bytes() const { return bytes_; }

 private:
  const void* storage_of(const at::Tensor& t) const {
    const auto& local = detail::local_or_self(t);
    return local.has_storage() ? local.storage().unsafeGetStorageImpl() : nullptr;
  }
  bool note(const at::Tensor& t) { return seen_.insert(storage_of(t)).second; }
  Unpack pack(const at::Tensor& t) {
    if (note(t)) bytes_ += local_bytes(t);
    return [saved = VersionedTensor(t)] { return saved.get(); };
  }
  std::unordered_set<const void*> seen_;
  int64_t bytes_ = 0;
  SavedTensorHooks hooks_;
};

std::string placements_of(const at::Tensor& t) {
  if (!is_dtensor(t)) return "";
  const auto& spec = DTensor(t).spec();
  std::string text;
  for (size_t i = 0; i < spec.placements.size(); i++)
    text += c10::str(text.empty() ? "" : ", ", spec.mesh.names()[i], " ", spec.placements[i]);
  return text;
}

int64_t ranks_of_axes(const PlannedMesh& axes) {
  int64_t ranks = 1;
  for (const auto& [name, size] : axes) {
    TESSERA_CHECK(size >= 1, UsageError, "plan: axis '", name, "' has size ", size, "; use at least 1");
    TESSERA_CHECK(name == "dp" || name == "fsdp" || name == "tp", UsageError, "plan: axis '", name,
                  "' is unknown; use dp, fsdp and tp");
    ranks *= size;
  }
  TESSERA_CHECK(!axes.empty(), UsageError, "plan: the mesh has no axes; write for example {{\"fsdp\", 8}}");
  return ranks;
}

}  // namespace

namespace train::planning {

struct StepRecorder::State {
  explicit State(PlannedMesh given) : axes(std::move(given)), world(ranks_of_axes(axes)) {
    std::vector<int64_t> shape;
    std::vector<std::string> names;
    for (const auto& [name, size] : axes) shape.push_back(size), names.push_back(name);
    mesh = init_device_mesh("cpu", shape, names);
  }
  bool has(const std::string& axis) const {
    return std::any_of(axes.begin(), axes.end(), [&](const auto& each) { return each.first == axis; });
  }
  PlannedMesh axes;
  FakeWorld world;
  DeviceMesh mesh;
};

StepRecorder::StepRecorder(PlannedMesh axes) : state_(std::make_unique<State>(std::move(axes))) {}
StepRecorder::~StepRecorder() = default;

void StepRecorder::parallelize(torch::nn::Module& module, const Plan& tensor_parallel) {
  const auto& mesh = state_->mesh;
  if (state_->has("tp")) parallelize_module(module, mesh["tp"], tensor_parallel, {.src_data_rank = std::nullopt});
  if (!state_->has("fsdp")) return;
  fully_shard(module, {.mesh = state_->has("dp") ? mesh[std::vector<std::string>{"dp", "fsdp"}] : mesh["fsdp"]});
}

std::optional<DeviceMesh> StepRecorder::replicas() const {
  if (!state_->has("dp") || state_->has("fsdp")) return std::nullopt;
  return state_->mesh["dp"];
}

StepPlan StepRecorder::run(torch::nn::Module& module, const std::function<Tensors()>& forward) {
  StepPlan plan{.mesh = state_->axes, .parameters = {}, .traffic = {}, .memory = {}};
  int64_t parameters = 0, gradients = 0, activations = 0;
  for (const auto& item : module.named_parameters()) {
    const auto& local = tessera::detail::local_or_self(item.value());
    plan.parameters.push_back({item.key(), item.value().sizes().vec(), local.sizes().vec(), placements_of(item.value()),
                               local_bytes(item.value())});
    parameters += plan.parameters.back().local_bytes;
  }
  for (int step = 0; step < 2; step++) {  // the first one makes the reducer's buckets
    module.zero_grad();
    StepTraffic traffic;
    traffic.set_phase(" in forward");
    at::Tensor loss;
    {
      const SavedBytes saved(module);
      for (const auto& output : forward()) {
        if (!output.defined() || !output.requires_grad()) continue;
        auto mean = output.mean();
        if (is_dtensor(mean)) mean = DTensor(mean).full_tensor();
        loss = loss.defined() ? loss + mean : mean;
      }
      activations = saved.bytes();
    }
    TESSERA_CHECK(loss.defined(), UsageError, "plan: no output of forward requires a gradient");
    traffic.set_phase(" in backward");
    loss.backward();
    traffic.set_phase(" of gradients");
    optim::detail::reduce_partial_gradients(module.parameters());
    plan.traffic = traffic.seen;
  }
  for (const auto& p : module.parameters())
    if (p.grad().defined()) gradients += local_bytes(p.grad());
  plan.memory = {{"parameters", parameters},
                 {"gradients", gradients},
                 {"optimizer state (Adam: two moments)", 2 * parameters},
                 {"saved for backward", activations}};
  return plan;
}

}  // namespace train::planning

std::map<std::string, train::Traffic> StepPlan::traffic_by_axis() const {
  std::map<std::string, train::Traffic> by_axis;
  for (const auto& planned : traffic) {
    by_axis[planned.axis].collectives += planned.traffic.collectives;
    by_axis[planned.axis].bytes += planned.traffic.bytes;
  }
  return by_axis;
}

std::ostream& operator<<(std::ostream& out, const StepPlan& plan) {
  out << "Mesh";
  for (const auto& [name, size] : plan.mesh) out << ' ' << name << '=' << size;
  out << "\n\nParameters\n";
  train::TextTable lines{{"name", "global sizes", "local sizes", "placements"}};
  for (const auto& p : plan.parameters)
    lines.push_back({p.name, c10::str(c10::IntArrayRef(p.sizes)), c10::str(c10::IntArrayRef(p.local_sizes)),
                     p.placements.empty() ? "replicated" : p.placements});
  train::print_table(out, lines, "  ");
  out << "\nCollectives per step\n";
  lines = {{"axis", "what", "collectives", "bytes"}};
  for (const auto& each : plan.traffic)
    lines.push_back(
        {each.axis, each.what, std::to_string(each.traffic.collectives), step_bytes_text(each.traffic.bytes)});
  train::print_table(out, lines, "  ");
  out << "\nMemory of rank 0\n";
  lines = {{"kind", "bytes"}};
  int64_t total = 0;
  for (const auto& each : plan.memory) {
    lines.push_back({each.kind, step_bytes_text(each.bytes)});
    total += each.bytes;
  }
  lines.push_back({"total", step_bytes_text(total)});
  train::print_table(out, lines, "  ");
  return out;
}

StepReport report(const std::function<void()>& step, int64_t steps, at::Device device) {
  TESSERA_CHECK(steps >= 1, UsageError, "report: ", steps, " steps were asked for; use at least 1");
  step();
  StepReport report{.steps = steps};
  std::vector<double> seconds;
  for (int64_t i = 0; i < steps; i++) {
    const train::TrafficCount traffic;
    const auto start = std::chrono::steady_clock::now();
    step();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    report.traffic = traffic.by_axis();
  }
  std::sort(seconds.begin(), seconds.end());
  report.median_seconds = seconds[seconds.size() / 2];
  report.slowest_seconds = seconds.back();
  report.memory_gib = train::peak_memory_gib(device);
  return report;
}

std::ostream& operator<<(std::ostream& out, const StepReport& report) {
  train::TextTable lines{{"of " + std::to_string(report.steps) + " steps", ""}};
  const auto ms = [](double seconds) { return c10::str(seconds * 1e3, " ms"); };
  lines.push_back({"median", ms(report.median_seconds)});
  lines.push_back({"slowest", ms(report.slowest_seconds)});
  for (const auto& [axis, traffic] : report.traffic)
    lines.push_back({"collectives over " + axis, c10::str(traffic.collectives, ", ", step_bytes_text(traffic.bytes))});
  lines.push_back({"peak memory", c10::str(report.memory_gib, " GiB")});
  train::print_table(out, lines);
  return out;
}

}  // namespace tessera

// A checkpoint of a TrainingState has these entries:
//
//   model.<name>                              one module; model.<number>.<name> if there are several
//   optimizer_<number>.state.<parameter>.<entry>, optimizer_<number>.param_groups.<group>.<option>
//   part_<number>.<name>                      schedulers, and other parts with a state dict
//   generator_<name>.<rank>                   "cpu", "cuda", and the number of a generator of the user
//   values                                    step, epoch, ranks, position_<number>, random_seed, random_offset,
//   user.<name>
#include "tessera/checkpoint/training_state.h"

#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/detail/torch_schedulers.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/load.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/data_parallel/fsdp/state_dict.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/optim/optimizer.h>

#include <filesystem>
#include <mutex>

namespace tessera {
namespace {

const std::string kModelPrefix = "model.", kUserPrefix = "user.";

std::string optimizer_prefix(size_t i) { return c10::str("optimizer_", i, "."); }
std::string part_prefix(size_t i) { return c10::str("part_", i, "."); }
std::string position_name(size_t i) { return c10::str("position_", i); }

at::Tensor locked_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

// The values of a checkpoint. Throws UsageError if one is missing: the checkpoint has other parts.
class CheckpointValues {
 public:
  CheckpointValues(std::string path, const dcp::Values& values) : path_(std::move(path)), values_(values) {}

  int64_t number(const std::string& name) const {
    const auto found = values_.find(name);
    const auto* value = found == values_.end() ? nullptr : std::get_if<int64_t>(&found->second);
    TESSERA_CHECK(value, UsageError, "cannot continue from '", path_, "': it has no '", name,
                  "', so it was not saved by a TrainingState with the same parts");
    return *value;
  }

 private:
  std::string path_;
  const dcp::Values& values_;
};

// `dir` itself if it is a checkpoint, else the last one in it, else "". Rank 0 decides.
std::string find_checkpoint_in(const std::string& dir, const World& world) {
  std::string path;
  if (world.rank() == 0) {
    if (std::filesystem::exists(std::filesystem::path(dir) / dcp::kManifestName))
      path = dir;
    else
      path = dcp::latest(dir).value_or("");
  }
  return comm::broadcast_text(world.group(), "TrainingState::load", path);
}

}  // namespace

void TrainingState::add_module(torch::nn::Module& module) { modules_.emplace_back(module); }
void TrainingState::add_optimizer(torch::optim::Optimizer& optimizer) { optimizers_.emplace_back(optimizer); }
void TrainingState::add_generator(const at::Generator& generator) { generators_.push_back(generator); }
void TrainingState::add_scheduler(torch::optim::LRScheduler& scheduler) {
  others_.push_back({[&scheduler] { return dcp::scheduler_state(scheduler); },
                     [&scheduler](const StateDict& dict) { dcp::set_scheduler_state(scheduler, dict); }});
}
void TrainingState::add_scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler) {
  others_.push_back({[&scheduler] { return dcp::scheduler_state(scheduler); },
                     [&scheduler](const StateDict& dict) { dcp::set_scheduler_state(scheduler, dict); }});
}

// One module stands for itself. Several become the children "0", "1", ... of one, so that an optimizer may have
// parameters of several modules.
std::shared_ptr<torch::nn::Module> TrainingState::all_modules() const {
  if (modules_.size() == 1) return {std::shared_ptr<void>(), &modules_[0].get()};  // not an owner
  auto all = std::make_shared<torch::nn::Module>("TrainingState");
  for (size_t i = 0; i < modules_.size(); i++)
    all->register_module(std::to_string(i), modules_[i].get().shared_from_this());
  return all;
}

std::vector<std::pair<std::string, at::Generator>> TrainingState::all_generators() const {
  std::vector<std::pair<std::string, at::Generator>> all = {{"cpu", at::globalContext().defaultGenerator(at::kCPU)}};
  for (const auto& module : modules_)
    for (const auto& p : module.get().parameters()) {
      const auto device = detail::local_or_self(p).device();
      if (device.is_cpu() || device.is_meta() || all.size() > 1) continue;
      all.emplace_back(c10::DeviceTypeName(device.type(), /*lower_case=*/true),
                       at::globalContext().defaultGenerator(device));
    }
  for (size_t i = 0; i < generators_.size(); i++) all.emplace_back(std::to_string(i), generators_[i]);
  return all;
}

std::string TrainingState::save(const std::string& dir, const dcp::SaveOptions& options) {
  const at::NoGradGuard no_grad;
  const auto world = World::current();
  const auto module = all_modules();
  StateDict dict;
  dict.insert_all(kModelPrefix, get_model_state_dict(*module));
  for (size_t i = 0; i < optimizers_.size(); i++)
    dict.insert_all(optimizer_prefix(i), get_optimizer_state_dict(optimizers_[i].get(), *module));
  for (size_t i = 0; i < others_.size(); i++) dict.insert_all(part_prefix(i), others_[i].get());
  for (const auto& [name, generator] : all_generators())
    dict.insert(c10::str("generator_", name, ".", world.rank()), locked_state(generator));
  const auto& random = random::state();
  dcp::Values all{{"step", step},
                  {"epoch", epoch},
                  {"ranks", world.size()},
                  {"random_seed", static_cast<int64_t>(random.seed)},
                  {"random_offset", static_cast<int64_t>(random.offset)}};
  for (size_t i = 0; i < positions_.size(); i++) all.emplace(position_name(i), positions_[i].get());
  for (const auto& [name, value] : values) all.emplace(kUserPrefix + name, value);
  auto path = dcp::step_folder(dir, step);
  dcp::save(dict, path, all, options, world);
  return path;
}

void TrainingState::load_generators(const std::string& path, int64_t saved_ranks) {
  const auto world = World::current();
  const auto manifest = dcp::open_source(path).manifest;
  const auto all = all_generators();
  // States of the first, the last and this rank; a rank that did not exist takes those of another.
  const int64_t mine = world.rank() % saved_ranks;
  StateDict states;
  for (const auto& [name, generator] : all)
    for (const int64_t rank : {int64_t{0}, mine, saved_ranks - 1}) {
      const auto full_name = c10::str("generator_", name, ".", rank);
      const auto* saved = manifest.find(full_name);
      if (saved && !states.contains(full_name))
        states.insert(full_name, at::empty(saved->sizes, at::TensorOptions(saved->dtype)));
    }
  dcp::load(states, path, {.strict = false}, world);
  for (auto [name, generator] : all) {
    const auto* state = states.find(c10::str("generator_", name, ".", mine));
    if (!state) continue;  // the checkpoint was saved on another kind of device
    const std::lock_guard lock(generator.mutex());
    generator.set_state(*state);
    const bool equal = states.at(c10::str("generator_", name, ".0"))
                           .equal(states.at(c10::str("generator_", name, ".", saved_ranks - 1)));
    if (world.rank() >= saved_ranks && !equal)
      generator.set_current_seed(generator.current_seed() +
                                 static_cast<uint64_t>(step * world.size() + world.rank()) * 0x9E3779B97F4A7C15u);
  }
}

bool TrainingState::load(const std::string& dir) {
  const at::NoGradGuard no_grad;
  const auto world = World::current();
  const auto path = find_checkpoint_in(dir, world);
  if (path.empty()) return false;
  const auto manifest = dcp::open_source(path).manifest;
  const CheckpointValues saved(path, manifest.values);
  std::vector<int64_t> positions;
  for (size_t i = 0; i < positions_.size(); i++) positions.push_back(saved.number(position_name(i)));
  const auto new_step = saved.number("step"), new_epoch = saved.number("epoch"), ranks = saved.number("ranks");
  TESSERA_CHECK(ranks >= 1, UsageError, "cannot continue from '", path, "': it was saved by ", ranks, " ranks");
  const auto seed = saved.number("random_seed"), offset = saved.number("random_offset");

  // Everything but the parameters is read first, so that a checkpoint with other parts changes nothing.
  const auto module = all_modules();
  const auto parameters = get_model_state_dict(*module);
  std::vector<StateDict> optimizers, others;
  for (size_t i = 0; i < optimizers_.size(); i++) {
    optimizers.push_back(dcp::optimizer_state_like(manifest, optimizer_prefix(i), parameters));
    dcp::load(optimizers.back(), path, {.prefix = optimizer_prefix(i)}, world);
  }
  for (size_t i = 0; i < others_.size(); i++) {
    others.push_back(dcp::optimizer_state_like(manifest, part_prefix(i), {}));
    TESSERA_CHECK(!others.back().empty(), UsageError, "cannot continue from '", path, "': it has no '", part_prefix(i),
                  "', so it was saved with fewer parts that have a state dict: ", i, ", and this TrainingState has ",
                  others_.size());
    dcp::load(others.back(), path, {.prefix = part_prefix(i)}, world);
  }
  dcp::load(parameters, path, {.prefix = kModelPrefix}, world);

  set_model_state_dict(*module, parameters);  // flat parameters were gathered copies
  for (size_t i = 0; i < optimizers_.size(); i++)
    set_optimizer_state_dict(optimizers_[i].get(), *module, optimizers[i]);
  for (size_t i = 0; i < others_.size(); i++) others_[i].set(others[i]);
  step = new_step;
  epoch = new_epoch;
  load_generators(path, ranks);
  random::state() = {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)};
  for (size_t i = 0; i < positions_.size(); i++) positions_[i].set(positions[i]);
  values.clear();
  for (const auto& [name, value] : manifest.values)
    if (name.starts_with(kUserPrefix)) values.emplace(name.substr(kUserPrefix.size()), value);
  return true;
}

}  // namespace tessera

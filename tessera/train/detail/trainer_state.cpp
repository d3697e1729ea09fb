// Saves and loads the state of a trainer. A checkpoint has these entries:
//
//   model.<parameter>                     with its placements
//   optimizer.state.<parameter>.<name>
//   scaler.scale, ...                     with fp16
//   guard.losses                          window of the loss monitor
//   generator.<rank>                      state of LibTorch's default generator (dropout on plain tensors)
//   values                                step, samples_read, sampler position, state of tessera::random, model, and
//   the
//                                         options that a resumed run is compared with (resume_changes.h)
//
// The learning rate schedule is a function of the step, and the optimizer options are in the config. Both come from the
// config of the resumed run, not from the checkpoint.
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/data_parallel/fsdp/state_dict.h"
#include "tessera/dtensor/random.h"
#include "tessera/train/detail/check_replicas.h"
#include "tessera/train/detail/resume_changes.h"
#include "tessera/train/trainer.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <mutex>

namespace tessera::train {
namespace {

const std::string kOptions = "options";
const std::string kModel = "model.", kOptimizer = "optimizer.", kScaler = "scaler.", kLosses = "guard.losses";

// The model as one line of text. Dropout is not part of it.
std::string model_text(const TrainConfig& config) {
  auto model = model_config(config.model);
  if (auto* gpt = std::get_if<models::GPT2Config>(&model)) gpt->dropout = 0;
  return std::visit([](const auto& m) { return c10::str(m); }, model);
}

at::Tensor generator_state(at::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Device device, const at::Tensor& state) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

std::string generator_name(const World& world) { return c10::str("generator.", world.rank()); }

// Values of a checkpoint by name. Throws if a value is missing, because the checkpoint is then not one of a trainer.
struct SavedValues {
  const std::string& path;
  const dcp::Values& values;

  template <class T>
  const T& get(const std::string& name) const {
    const auto found = values.find(name);
    const auto* value = found == values.end() ? nullptr : std::get_if<T>(&found->second);
    TESSERA_CHECK(value, UsageError, "cannot resume from '", path, "': it has no '", name,
                  "', so it is not a checkpoint of a trainer");
    return *value;
  }
  int64_t number(const std::string& name) const { return get<int64_t>(name); }
};

// An empty plain tensor with the sizes of a saved one.
at::Tensor empty_like_saved(const dcp::Manifest& manifest, const std::string& name, const std::string& path) {
  const auto* saved = manifest.find(name);
  TESSERA_CHECK(saved, UsageError, "cannot resume from '", path, "': it has no '", name, "'");
  return at::empty(saved->sizes, saved->dtype);
}

SavedValues check_values(const std::string& path, const dcp::Values& values, const TrainConfig& config) {
  const SavedValues saved{path, values};
  const auto& model = saved.get<std::string>("model");
  TESSERA_CHECK(model == model_text(config), UsageError, "cannot resume from '", path, "': its model is ", model,
                ", but the config has ", model_text(config));
  // Counters of steps and samples. A larger one overflows in the first step.
  for (const auto& [name, max] : {std::pair("step", int64_t{1} << 40), std::pair("samples_read", int64_t{1} << 61),
                                  std::pair("position", int64_t{1} << 61), std::pair("ranks", int64_t{1} << 40)})
    TESSERA_CHECK(saved.number(name) >= 0 && saved.number(name) <= max, UsageError, "cannot resume from '", path,
                  "': its ", name, " is ", saved.number(name), "; it must be from 0 to ", max);
  return saved;
}

// The entries of the parameters and buffers of this rank. `parameter_of` returns the name of the parameter.
template <class F>
StateDict entries_of_rank(const StateDict& dict, const ParallelModel& model, F parameter_of) {
  if (!model.has_stages()) return dict;
  StateDict mine;
  for (const auto& [name, tensor] : dict)
    if (model.has_parameter(parameter_of(name))) mine.insert(name, tensor);
  return mine;
}
StateDict model_entries(const StateDict& dict, const ParallelModel& model) {
  return entries_of_rank(dict, model, [](const std::string& name) { return name; });
}
// "state.h.0.ln_1.weight.exp_avg" is of h.0.ln_1.weight.
StateDict optimizer_entries(const StateDict& dict, const ParallelModel& model) {
  return entries_of_rank(dict, model, [](const std::string& name) {
    const auto begin = std::string("state.").size(), end = name.rfind('.');
    return name.starts_with("state.") && end > begin ? name.substr(begin, end - begin) : name;
  });
}

// With pipeline stages, the checkpoint has the names of other stages too.
void load_entries(const StateDict& dict, const std::string& path, const std::string& prefix, bool has_stages,
                  const World& world) {
  const auto report = dcp::load(dict, path, {.strict = !has_stages, .prefix = prefix}, world);
  TESSERA_CHECK(!has_stages || (report.missing.empty() && report.mismatched.empty()), UsageError,
                "cannot resume from '", path, "': it does not fit the stages of this rank: ", report);
}

}  // namespace

std::string find_checkpoint(const TrainConfig& config) {
  auto path = config.checkpoint.resume;
  if (path == "auto") path = dcp::latest(checkpoint_folder(config)).value_or("");
  if (!path.empty()) check_values(path, dcp::open_source(path).manifest.values, config);
  return path;
}

StateDict Trainer::checkpoint_dict() {
  auto& module = model_.module();
  StateDict dict;
  dict.insert_all(kModel, model_entries(get_model_state_dict(module), model_));
  dict.insert_all(kOptimizer + "state.", get_optimizer_state_dict(*optimizer_, module).under("state."));
  if (train_step_.scaler().enabled()) dict.insert_all(kScaler, train_step_.scaler().state_dict());
  dict.insert(kLosses, at::tensor(loss_monitor_.losses(), at::kDouble));
  dict.insert(generator_name(world_), generator_state(device_));
  return dict;
}

dcp::Values Trainer::checkpoint_values() const {
  const auto& random = random::state();
  return {{"step", step_},
          {"samples_read", samples_read_},
          {"position", sampler_position_},
          {"random_seed", static_cast<int64_t>(random.seed)},
          {"random_offset", static_cast<int64_t>(random.offset)},
          {"ranks", world_.size()},
          {"mesh", c10::str(model_.mesh())},
          {"model", model_text(config_)},
          {kOptions, saved_options(config_)}};
}

void Trainer::save(const std::string& path) {
  dcp::save(checkpoint_dict(), path, checkpoint_values(), {.overwrite = true, .keep_latest = config_.checkpoint.keep},
            world_);
}

void Trainer::save_if_due() {
  report_background_save();
  const int64_t every = config_.checkpoint.every;
  if (every == 0 || (step_ % every != 0 && step_ != config_.training.steps)) return;
  const auto path = dcp::step_folder(checkpoint_folder(config_), step_);
  if (!config_.checkpoint.async) {
    save(path);
    for (const auto& sink : sinks_) sink->on_checkpoint(path);
    return;
  }
  saving_.wait();
  report_background_save();
  saving_ = dcp::async_save(checkpoint_dict(), path, checkpoint_values(),
                            {.overwrite = true, .keep_latest = config_.checkpoint.keep, .async_staging = true},
                            std::move(saving_), world_);  // step() waits for the copy before it changes anything
  saving_reported_ = false;
}

void Trainer::report_background_save() {
  if (saving_reported_ || !saving_.complete()) return;
  for (const auto& sink : sinks_) sink->on_checkpoint(saving_.path());
  saving_reported_ = true;
}

void Trainer::resume(const std::string& path) {
  const at::NoGradGuard no_grad;
  const auto manifest = dcp::open_source(path).manifest;
  const auto saved = check_values(path, manifest.values, config_);
  const int64_t step = saved.number("step");
  TESSERA_CHECK(step_ == 0, UsageError, "resume() must be called before the first step; ", step_, " steps were made");

  auto& module = model_.module();
  const auto parameters = model_entries(get_model_state_dict(module), model_);
  const auto state = optimizer_entries(dcp::optimizer_state_like(manifest, kOptimizer, parameters), model_);
  StateDict rest{{kLosses, empty_like_saved(manifest, kLosses, path)}};
  const bool same_ranks = saved.number("ranks") == world_.size();
  if (same_ranks) rest.insert(generator_name(world_), empty_like_saved(manifest, generator_name(world_), path));
  load_entries(parameters, path, kModel, model_.has_stages(), world_);
  load_entries(state, path, kOptimizer, model_.has_stages(), world_);
  dcp::load(rest, path, {.strict = false}, world_);  // the other entries are loaded above

  if (!model_.has_stages()) set_model_state_dict(module, parameters);  // stages are aliases, and loaded
  auto optimizer = get_optimizer_state_dict(*optimizer_, module);
  for (const auto& name : optimizer.names())
    if (name.starts_with("state.")) optimizer.erase(name);
  optimizer.insert_all("", state);
  set_optimizer_state_dict(*optimizer_, module, optimizer);
  auto& scaler = train_step_.scaler();
  if (scaler.enabled() && manifest.find(kScaler + "scale")) {
    const auto scales = dcp::optimizer_state_like(manifest, kScaler, {});
    dcp::load(scales, path, {.prefix = kScaler}, world_);
    scaler.load_state_dict(scales);
  }
  const auto& losses = rest.at(kLosses);
  loss_monitor_.set_losses({losses.data_ptr<double>(), losses.data_ptr<double>() + losses.numel()});
  if (same_ranks) set_generator_state(device_, rest.at(generator_name(world_)));
  random::state() = {static_cast<uint64_t>(saved.number("random_seed")),
                     static_cast<uint64_t>(saved.number("random_offset"))};
  sampler_position_ = saved.number("position");
  samples_read_ = saved.number("samples_read");
  loader_.set_position(sampler_position_);
  if (step > 0) {  // the schedule is a function of the step
    auto position = scheduler_.state_dict();
    position.at("last_epoch").fill_(step - 1);
    position.at("step_count").fill_(step);
    scheduler_.load_state_dict(position);
    scheduler_.step();
  }
  step_ = step;
  resumed_from_ = path;
  resume_changes_ = train::resume_changes(manifest.values, config_);
  if (config_.guard.checksum_every > 0) check_replicas(model_, c10::str("after loading '", path, "'"));
}

}  // namespace tessera::train

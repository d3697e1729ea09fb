#include "tessera/checkpoint/load.h"

#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/bulk_copy.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/detail/local_boxes.h"
#include "tessera/checkpoint/detail/reshard.h"
#include "tessera/checkpoint/detail/shard_reader.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/data_parallel/fsdp/state_dict.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <regex>
#include <sstream>
#include <unordered_map>

namespace tessera::dcp {
namespace {

// One load() call on one rank.
class Loader {
 public:
  Loader(const StateDict& dict, const std::string& path, const LoadOptions& options)
      : dict_(dict), path_(path), options_(options) {}

  void plan();           // does all checks
  void execute() const;  // copies; does not fail
  const LoadReport& report() const { return report_; }

 private:
  struct LoadItem {
    LocalBoxes into;
    std::vector<at::Tensor> values;  // by saved shard; undefined: not needed on this rank
    std::vector<Box> saved;
    std::vector<BoxCopy> copies;
  };

  void compare(const std::unordered_map<std::string, const SavedTensor*>& saved);
  std::string explain() const;
  void plan_tensor(const std::string& name, const at::Tensor& tensor, const SavedTensor& saved);

  const StateDict& dict_;
  const std::string& path_;
  const LoadOptions& options_;
  CheckpointSource source_;
  std::vector<std::string> names_;  // of the checkpoint, as in the dict, in the order of the manifest
  LoadReport report_;
  std::vector<LoadItem> items_;
  std::optional<ShardReader> reader_;
};

void Loader::plan() {
  source_ = open_source(path_);
  reader_.emplace(source_.folder);
  std::unordered_map<std::string, const SavedTensor*> saved;
  for (const auto& tensor : source_.manifest.tensors) {
    if (!tensor.name.starts_with(options_.prefix)) continue;
    auto name = tensor.name.substr(options_.prefix.size());
    if (options_.rename) name = options_.rename(name);
    if (name.empty()) continue;
    const auto [known, is_new] = saved.emplace(name, &tensor);
    TESSERA_CHECK(is_new, UsageError, "'", known->second->name, "' and '", tensor.name,
                  "' of the checkpoint are both '", name, "' after renaming");
    names_.push_back(name);
  }
  compare(saved);
  TESSERA_CHECK(!options_.strict || report_.empty(), UsageError, explain());
  for (const auto& [name, tensor] : dict_) {
    const auto found = saved.find(name);
    if (found == saved.end() || tensor.sizes() != c10::IntArrayRef(found->second->sizes)) continue;
    plan_tensor(name, tensor, *found->second);
  }
}

void Loader::compare(const std::unordered_map<std::string, const SavedTensor*>& saved) {
  for (const auto& [name, tensor] : dict_) {
    const auto found = saved.find(name);
    if (found == saved.end())
      report_.missing.push_back(name);
    else if (const auto& sizes = found->second->sizes; tensor.sizes() != c10::IntArrayRef(sizes))
      report_.mismatched.push_back({name, tensor.sizes().vec(), {sizes.begin(), sizes.end()}});
  }
  for (const auto& name : names_)
    if (!dict_.contains(name)) report_.unexpected.push_back(name);
}

std::string Loader::explain() const {
  constexpr size_t kShown = 10;
  std::ostringstream text;
  text << "the checkpoint does not fit; nothing was loaded.";
  const auto list = [&](const auto& all, const auto& show) {
    for (size_t i = 0; i < std::min(all.size(), kShown); i++) {
      text << "\n  ";
      show(all[i]);
    }
    if (all.size() > kShown) text << "\n  ... and " << all.size() - kShown << " more";
  };
  list(report_.missing, [&](const std::string& name) {
    const auto near = did_you_mean(name, report_.unexpected);
    text << "missing from the checkpoint: " << name << (near.empty() ? "" : "; ") << near;
  });
  list(report_.unexpected, [&](const std::string& name) { text << "only in the checkpoint: " << name; });
  list(report_.mismatched, [&](const LoadReport::Mismatch& wrong) {
    text << "wrong shape: " << wrong.name << " is " << c10::IntArrayRef(wrong.expected) << " here and "
         << c10::IntArrayRef(wrong.found) << " in the checkpoint";
  });
  text << "\nPass {.strict = false} to load what fits.";
  return text.str();
}

void Loader::plan_tensor(const std::string& name, const at::Tensor& tensor, const SavedTensor& saved) {
  LoadItem item{.into = local_boxes(name, tensor), .values = {}, .saved = {}, .copies = {}};
  for (const auto& shard : saved.shards) item.saved.push_back(shard.box);
  item.values.resize(item.saved.size());
  auto plan = reshard(item.saved, item.into.boxes());
  TESSERA_CHECK(plan.missing.empty(), UsageError, "'", saved.name, "' ", tensor.sizes(), ": ", plan.missing.front(),
                " was not saved");
  item.copies = std::move(plan.copies);
  for (const auto& copy : item.copies) {
    auto& values = item.values[copy.saved];
    if (!values.defined()) values = reader_->read(saved, saved.shards[copy.saved], options_.verify);
  }
  items_.push_back(std::move(item));
}

void Loader::execute() const {
  for (const auto& item : items_)
    for (const auto& copy : item.copies) {
      auto from = item.values[copy.saved];
      const auto& box = item.saved[copy.saved];
      for (size_t d = 0; d < copy.box.sizes.size(); d++)
        from = from.narrow(static_cast<int64_t>(d), copy.box.offsets[d] - box.offsets[d], copy.box.sizes[d]);
      bulk_copy(item.into.view(item.into.parts[copy.needed], copy.box), from);
    }
}

// load() of a process without a world.
LoadReport load_alone(const StateDict& dict, const std::string& path, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  Loader loader(dict, path, options);
  loader.plan();
  loader.execute();
  return loader.report();
}

}  // namespace

LoadReport load(const StateDict& dict, const std::string& path, const LoadOptions& options, const World& world) {
  const at::NoGradGuard no_grad;
  Loader loader(dict, path, options);
  const auto plan = [&] {
    loader.plan();
    return std::string();
  };
  comm::gather_decide_broadcast(world.group(), c10::str("loading '", path, "'"), plan,
                                [](const auto&) { return std::string(); });
  loader.execute();
  return loader.report();
}

StateDict optimizer_state_like(const std::string& path, const std::string& prefix, const StateDict& model) {
  return optimizer_state_like(open_source(path).manifest, prefix, model);
}

StateDict optimizer_state_like(const Manifest& manifest, const std::string& prefix, const StateDict& model) {
  const at::NoGradGuard no_grad;
  const std::string state = "state.";
  StateDict dict;
  for (const auto& saved : manifest.tensors) {
    if (!saved.name.starts_with(prefix)) continue;
    const auto name = saved.name.substr(prefix.size());
    const auto dot = name.rfind('.');
    const at::Tensor* parameter =
        nullptr;  // the name is "state." + parameter name (with dots) + "." + entry name (without dots)
    if (name.starts_with(state) && dot != std::string::npos && dot > state.size())
      parameter = model.find(name.substr(state.size(), dot - state.size()));
    if (parameter && parameter->sizes() == c10::IntArrayRef(saved.sizes))
      dict.insert(name, at::empty_like(*parameter, at::TensorOptions(saved.dtype)));
    else
      dict.insert(name, at::empty(saved.sizes, at::TensorOptions(saved.dtype)));
  }
  return dict;
}

}  // namespace tessera::dcp

namespace tessera {

LoadReport load_safetensors(torch::nn::Module& module, const std::string& path, const LoadSafetensorsOptions& options) {
  std::vector<std::pair<std::regex, std::string>> rules;
  for (const auto& rule : options.key_map) try {
      rules.emplace_back(rule.pattern, rule.name);
    } catch (const std::regex_error& error) {
      TESSERA_FAIL(UsageError, "'", rule.pattern, "' of the key map is not a regular expression: ", error.what());
    }
  dcp::LoadOptions load_options{.strict = options.strict};
  if (!rules.empty())
    load_options.rename = [&](const std::string& name) {
      constexpr size_t kLongest = 1000;  // std::regex recurses for each character
      TESSERA_CHECK(name.size() <= kLongest, UsageError, "'", path, "' has a tensor name of ", name.size(),
                    " characters; a key map takes names of at most ", kLongest);
      for (const auto& [pattern, replacement] : rules)
        if (std::smatch match; std::regex_match(name, match, pattern)) return match.format(replacement);
      return name;
    };
  const auto dict = get_model_state_dict(module);
  const auto report =
      World::has_current() ? dcp::load(dict, path, load_options) : dcp::load_alone(dict, path, load_options);
  set_model_state_dict(module, dict, {.strict = options.strict});  // flat parameters were gathered copies
  return report;
}

}  // namespace tessera

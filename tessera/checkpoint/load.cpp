#include "tessera/checkpoint/load.h"

#include "tessera/base/detail/crc32c.h"
#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/detail/local_boxes.h"
#include "tessera/checkpoint/detail/reshard.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/comm/detail/rank_agreement.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <filesystem>
#include <map>
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
    std::vector<const TensorEntry*> entries;  // by saved shard; null: not needed on this rank
    std::vector<const SafetensorsFile*> files;
    std::vector<Box> saved;
    std::vector<BoxCopy> copies;
  };

  void compare(const std::unordered_map<std::string, const SavedTensor*>& saved);
  std::string explain() const;
  void plan_tensor(const std::string& name, const at::Tensor& tensor, const SavedTensor& saved);
  const SafetensorsFile& open(const std::string& file);
  void verify(const SavedShard& shard, const SafetensorsFile& file, const TensorEntry& entry);

  const StateDict& dict_;
  const std::string& path_;
  const LoadOptions& options_;
  CheckpointSource source_;
  LoadReport report_;
  std::vector<LoadItem> items_;
  std::map<std::string, SafetensorsFile> files_;
};

void Loader::plan() {
  source_ = open_source(path_);
  std::unordered_map<std::string, const SavedTensor*> saved;
  for (const auto& tensor : source_.manifest.tensors)
    if (tensor.name.starts_with(options_.prefix)) saved.emplace(tensor.name.substr(options_.prefix.size()), &tensor);
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
  for (const auto& tensor : source_.manifest.tensors) {  // in the order of the manifest
    if (!tensor.name.starts_with(options_.prefix)) continue;
    const auto name = tensor.name.substr(options_.prefix.size());
    if (!dict_.contains(name)) report_.unexpected.push_back(name);
  }
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

const SafetensorsFile& Loader::open(const std::string& file) {
  const auto known = files_.find(file);
  if (known != files_.end()) return known->second;
  const auto path = (std::filesystem::path(source_.folder) / file).string();
  return files_.emplace(file, SafetensorsFile(path)).first->second;
}

void Loader::verify(const SavedShard& shard, const SafetensorsFile& file, const TensorEntry& entry) {
  if (!shard.checksum) return;
  const uint32_t found = crc32c(file.bytes(entry));
  TESSERA_CHECK(found == *shard.checksum, UsageError, file.path(), ": the bytes of '", entry.name, "' ", shard.box,
                " are damaged: their checksum is ", found, ", and it was ", *shard.checksum);
}

void Loader::plan_tensor(const std::string& name, const at::Tensor& tensor, const SavedTensor& saved) {
  LoadItem item{.into = local_boxes(name, tensor), .entries = {}, .files = {}, .saved = {}, .copies = {}};
  for (const auto& shard : saved.shards) item.saved.push_back(shard.box);
  item.entries.resize(item.saved.size());
  item.files.resize(item.saved.size());
  auto plan = reshard(item.saved, item.into.boxes());
  TESSERA_CHECK(plan.missing.empty(), UsageError, "'", saved.name, "' ", tensor.sizes(), ": ", plan.missing.front(),
                " was not saved");
  item.copies = std::move(plan.copies);
  for (const auto& copy : item.copies) {
    if (item.entries[copy.saved]) continue;
    const auto& shard = saved.shards[copy.saved];
    const auto& file = open(shard.file);
    const auto* entry = file.find(saved.name);
    TESSERA_CHECK(
        entry && entry->dtype == saved.dtype && c10::IntArrayRef(entry->shape) == shard.box.sizes, UsageError,
        file.path(), ": '", saved.name, "' ", shard.box, " of dtype ", saved.dtype, " was saved in this file, and ",
        entry ? c10::str(entry->dtype, c10::IntArrayRef(entry->shape)) : std::string("no tensor of that name"),
        " is there now");
    if (options_.verify) verify(shard, file, *entry);
    item.entries[copy.saved] = entry;
    item.files[copy.saved] = &file;
  }
  items_.push_back(std::move(item));
}

void Loader::execute() const {
  for (const auto& item : items_)
    for (const auto& copy : item.copies) {
      auto from = item.files[copy.saved]->tensor(*item.entries[copy.saved]);
      const auto& box = item.saved[copy.saved];
      for (size_t d = 0; d < copy.box.sizes.size(); d++)
        from = from.narrow(static_cast<int64_t>(d), copy.box.offsets[d] - box.offsets[d], copy.box.sizes[d]);
      item.into.view(item.into.parts[copy.needed], copy.box).copy_(from);
    }
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

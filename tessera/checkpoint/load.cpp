#include "tessera/checkpoint/load.h"

#include "tessera/base/detail/crc32c.h"
#include "tessera/base/error.h"
#include "tessera/base/detail/nearest_names.h"
#include "tessera/checkpoint/detail/local_boxes.h"
#include "tessera/checkpoint/detail/reshard.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
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

// One load, as one rank does it.
class Load {
 public:
  Load(const StateDict& dict, const std::string& path, const LoadOptions& options)
      : dict_(dict), path_(path), options_(options) {}

  void plan();           // throws, or all that is left is to copy
  void execute() const;  // nothing fails here
  const LoadReport& report() const { return report_; }

 private:
  struct Item {
    Held into;
    std::vector<const TensorEntry*> entries;  // of each saved piece; nullptr: not needed here
    std::vector<const SafetensorsFile*> files;
    std::vector<Box> saved;
    std::vector<Copy> copies;
  };

  void compare(const std::unordered_map<std::string, const SavedTensor*>& saved);
  std::string explain() const;
  void plan_tensor(const std::string& name, const at::Tensor& tensor, const SavedTensor& saved);
  const SafetensorsFile& open(const std::string& file);
  void verify(const SavedPiece& piece, const SafetensorsFile& file, const TensorEntry& entry);

  const StateDict& dict_;
  const std::string& path_;
  const LoadOptions& options_;
  Source source_;
  LoadReport report_;
  std::vector<Item> items_;
  std::map<std::string, SafetensorsFile> files_;
};

void Load::plan() {
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

void Load::compare(const std::unordered_map<std::string, const SavedTensor*>& saved) {
  for (const auto& [name, tensor] : dict_) {
    const auto found = saved.find(name);
    if (found == saved.end())
      report_.missing.push_back(name);
    else if (const auto& sizes = found->second->sizes; tensor.sizes() != c10::IntArrayRef(sizes))
      report_.mismatched.push_back({name, tensor.sizes().vec(), {sizes.begin(), sizes.end()}});
  }
  for (const auto& tensor : source_.manifest.tensors) {  // in their order, not the map's
    if (!tensor.name.starts_with(options_.prefix)) continue;
    const auto name = tensor.name.substr(options_.prefix.size());
    if (!dict_.contains(name)) report_.unexpected.push_back(name);
  }
}

std::string Load::explain() const {
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

const SafetensorsFile& Load::open(const std::string& file) {
  const auto known = files_.find(file);
  if (known != files_.end()) return known->second;
  const auto path = (std::filesystem::path(source_.folder) / file).string();
  return files_.emplace(file, SafetensorsFile(path)).first->second;
}

void Load::verify(const SavedPiece& piece, const SafetensorsFile& file, const TensorEntry& entry) {
  if (!piece.checksum) return;
  const uint32_t found = crc32c(file.bytes(entry));
  TESSERA_CHECK(found == *piece.checksum, UsageError, file.path(), ": the bytes of '", entry.name, "' ", piece.box,
                " are not those that were written: their checksum is ", found, ", and it was ", *piece.checksum);
}

void Load::plan_tensor(const std::string& name, const at::Tensor& tensor, const SavedTensor& saved) {
  Item item{.into = held(name, tensor), .entries = {}, .files = {}, .saved = {}, .copies = {}};
  for (const auto& piece : saved.pieces) item.saved.push_back(piece.box);
  item.entries.resize(item.saved.size());
  item.files.resize(item.saved.size());
  auto plan = reshard(item.saved, item.into.boxes());
  TESSERA_CHECK(plan.missing.empty(), UsageError, "'", saved.name, "' ", tensor.sizes(), ": ", plan.missing.front(),
                " was not saved");
  item.copies = std::move(plan.copies);
  for (const auto& copy : item.copies) {
    if (item.entries[copy.saved]) continue;
    const auto& piece = saved.pieces[copy.saved];
    const auto& file = open(piece.file);
    const auto* entry = file.find(saved.name);
    TESSERA_CHECK(entry && entry->dtype == saved.dtype && c10::IntArrayRef(entry->shape) == piece.box.sizes, UsageError,
                  file.path(), ": '", saved.name, "' ", piece.box, " of dtype ", saved.dtype, " was written here, and ",
                  entry ? c10::str(entry->dtype, c10::IntArrayRef(entry->shape)) : std::string("nothing of that name"),
                  " is here now");
    if (options_.verify) verify(piece, file, *entry);
    item.entries[copy.saved] = entry;
    item.files[copy.saved] = &file;
  }
  items_.push_back(std::move(item));
}

void Load::execute() const {
  for (const auto& item : items_)
    for (const auto& copy : item.copies) {
      auto from = item.files[copy.saved]->tensor(*item.entries[copy.saved]);
      const auto& box = item.saved[copy.saved];
      for (size_t d = 0; d < copy.what.sizes.size(); d++)
        from = from.narrow(static_cast<int64_t>(d), copy.what.offsets[d] - box.offsets[d], copy.what.sizes[d]);
      item.into.view(item.into.parts[copy.needed], copy.what).copy_(from);
    }
}

}  // namespace

LoadReport load(const StateDict& dict, const std::string& path, const LoadOptions& options, const World& world) {
  const at::NoGradGuard no_grad;
  Load load(dict, path, options);
  const auto plan = [&] {
    load.plan();
    return std::string();
  };
  comm::decide(world.group(), c10::str("loading '", path, "'"), plan, [](const auto&) { return std::string(); });
  load.execute();
  return load.report();
}

StateDict optimizer_state_like(const Manifest& manifest, const std::string& prefix, const StateDict& model) {
  const at::NoGradGuard no_grad;
  const std::string state = "state.";
  StateDict dict;
  for (const auto& saved : manifest.tensors) {
    if (!saved.name.starts_with(prefix)) continue;
    const auto name = saved.name.substr(prefix.size());
    const auto dot = name.rfind('.');
    const at::Tensor* parameter = nullptr;  // "state." + its name, which has dots + "." + a row's, which has none
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

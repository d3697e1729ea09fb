#include "tessera/checkpoint/detail/saver.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/detail/system_error.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/background_removal.h"
#include "tessera/checkpoint/detail/bulk_copy.h"
#include "tessera/checkpoint/detail/disk.h"
#include "tessera/checkpoint/detail/local_boxes.h"
#include "tessera/checkpoint/detail/save_plan.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/comm/detail/rank_agreement.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <set>

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;

// The folders of checkpoints that a save of this process is writing into. A second save would remove the .partial of
// the first one.
class FoldersInUse {
 public:
  static std::shared_ptr<void> add(const std::string& parent) {
    const auto name = fs::absolute(parent).lexically_normal().string();
    const std::lock_guard lock(mutex());
    TESSERA_CHECK(names().insert(name).second, UsageError, "an asynchronous save into '", parent,
                  "' is running; call wait() on it first, or pass it to async_save() as `previous`");
    return {nullptr, [name](void*) {
              const std::lock_guard again(mutex());
              names().erase(name);
            }};
  }

 private:
  static std::mutex& mutex() {
    static std::mutex made;
    return made;
  }
  static std::set<std::string>& names() {
    static std::set<std::string> made;
    return made;
  }
};

// The metadata of DCP: the offsets of each tensor's box.
std::map<std::string, std::string> file_metadata(const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                                 const std::vector<Sizes>& offsets) {
  Json::Object info;
  for (size_t i = 0; i < tensors.size(); i++)
    info.emplace_back(tensors[i].first,
                      Json::Object{{"saved_offsets", Json::Array(offsets[i].begin(), offsets[i].end())}});
  return {{"DCP_SHARDING_INFO", Json(std::move(info)).dump()}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
}

// The boxes of this rank, of all tensors of a dict.
std::map<std::string, LocalBoxes> all_local_boxes(const StateDict& dict) {
  std::map<std::string, LocalBoxes> all;
  for (const auto& [name, tensor] : dict) {
    TESSERA_CHECK(!dtype_name(tensor.scalar_type()).empty(), UsageError, "'", name, "' is of dtype ",
                  tensor.scalar_type(), ", which safetensors does not support");
    TESSERA_CHECK(name != "__metadata__", UsageError,
                  "a tensor cannot have the name '__metadata__' in a safetensors file");
    all.emplace(name, local_boxes(name, tensor));
  }
  return all;
}

Manifest local_manifest(const StateDict& dict, const Values& values, const std::map<std::string, LocalBoxes>& boxes) {
  Manifest mine{values, {}};
  for (const auto& [name, tensor] : dict) {
    const auto& local = boxes.at(name);
    mine.tensors.push_back({name, tensor.scalar_type(), local.sizes, {}});
    for (const auto& part : local.parts) mine.tensors.back().shards.push_back({"", part.box, {}});
  }
  return mine;
}

}  // namespace

Saver::Saver(std::string path, SaveOptions options) : options_(std::move(options)), path_(std::move(path)) {
  what_ = c10::str("saving '", path_, "'");
  while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
  partial_ = partial_folder(path_);
}

void Saver::report(std::string_view stage) const {
  if (options_.on_stage) options_.on_stage(stage);
}

void Saver::plan(const StateDict& dict, const Values& values, const World& world) {
  std::map<std::string, LocalBoxes> boxes;
  const auto text = comm::gather_decide_broadcast(
      world.group(), what_,
      [&] {
        boxes = all_local_boxes(dict);
        return local_manifest(dict, values, boxes).to_json();
      },
      [&](const Texts& plans) { return create_folder(plans); });
  plan_ = Manifest::parse(text, "the global save plan");
  for (const auto& tensor : plan_.tensors)
    for (const auto& shard : tensor.shards) {
      if (!writes(world.rank(), shard.file)) continue;
      const auto& local = boxes.at(tensor.name);
      for (const auto& part : local.parts) {
        if (!(part.box == shard.box)) continue;
        auto& file = files_[shard.file];
        file.tensors.emplace_back(tensor.name, local.view(part, part.box));
        file.offsets.push_back(shard.box.offsets);
      }
    }
  report("planned");
}

// Assigns each box to a rank and creates the folder to write into.
std::string Saver::create_folder(const Texts& local_plans) {
  std::vector<Manifest> ranks;
  for (const auto& text : local_plans) ranks.push_back(Manifest::parse(text, "the local plan of a rank"));
  const auto plan = plan_save(ranks);
  TESSERA_CHECK(options_.overwrite || !fs::exists(path_), UsageError, "'", path_,
                "' already exists; save under another name, or with {.overwrite = true}");
  folder_in_use_ = FoldersInUse::add(parent_folder(path_));
  wait_for_removals();
  make_partial_folder(plan);
  return plan.to_json();
}

void Saver::make_partial_folder(const Manifest& plan) const {
  auto left = partial_folders(parent_folder(path_));
  std::erase_if(left, [&](const auto& folder) { return fs::path(folder).filename() == fs::path(partial_).filename(); });
  left.insert(left.begin(), partial_);
  std::error_code error;
  const auto is_folder = [&](const auto& path) { return fs::is_directory(fs::symlink_status(path, error)); };
  const auto reused = options_.reuse_files ? std::find_if(left.begin(), left.end(), is_folder) : left.end();
  error.clear();
  for (auto folder = left.begin(); folder != left.end() && !error; ++folder)
    if (folder != reused) fs::remove_all(*folder, error);
  if (!error && reused != left.end()) fs::rename(*reused, partial_, error);
  if (!error) fs::create_directories(partial_, error);
  if (error) raise_errno(error.value(), c10::str("cannot create the folder '", partial_, "'"));
  std::set<std::string> files;
  for (const auto& tensor : plan.tensors)
    for (const auto& shard : tensor.shards) files.insert(shard.file);
  for (fs::directory_iterator entry(partial_, error), end; !error && entry != end; entry.increment(error))
    if (!files.contains(entry->path().filename().string())) fs::remove_all(entry->path(), error);
  if (error) raise_errno(error.value(), c10::str("cannot clear the folder '", partial_, "'"));
}

void Saver::stage(std::map<std::string, at::Tensor> memory) {
  const at::NoGradGuard no_grad;
  for (auto& [file_name, file] : files_)
    for (auto& [name, tensor] : file.tensors) {
      const auto key = file_name + "/" + name;
      auto found = memory.find(key);
      const bool fits = found != memory.end() && found->second.sizes() == tensor.sizes() &&
                        found->second.scalar_type() == tensor.scalar_type();
      // Pinned memory makes the copy from a GPU several times as fast.
      const auto options = at::TensorOptions(tensor.scalar_type()).pinned_memory(tensor.is_cuda());
      auto copy = fits ? std::move(found->second) : at::empty(tensor.sizes(), options);
      bulk_copy(copy, tensor);
      memory_.insert_or_assign(key, copy);
      tensor = std::move(copy);
    }
}

// Writes the files of this rank. Returns the checksums as JSON: file -> tensor name -> CRC-32C.
std::string Saver::write_files() {
  TESSERA_CHECK(fs::is_directory(partial_), UsageError, "this rank does not see the folder '", partial_,
                "' that rank 0 has created; ranks on several hosts need a shared file system");
  Json::Object written;
  for (const auto& [name, file] : files_) {
    const auto checksums = write_safetensors((fs::path(partial_) / name).string(), file.tensors,
                                             {.metadata = file_metadata(file.tensors, file.offsets),
                                              .sync = options_.sync,
                                              .replace = options_.reuse_files,
                                              .after_each = [this] { report("shard"); }});
    Json::Object sums;
    for (size_t i = 0; i < checksums.size(); i++)
      sums.emplace_back(file.tensors[i].first, static_cast<int64_t>(checksums[i]));
    written.emplace_back(name, std::move(sums));
  }
  report("written");
  return Json(std::move(written)).dump();
}

// Writes the manifest and renames the folder, which makes the checkpoint complete.
std::string Saver::finish(const Texts& written) {
  std::map<std::pair<std::string, std::string>, uint32_t> checksums;  // by file and name
  for (const auto& text : written) {
    const auto json = Json::parse(text, "the checksums of a rank");
    for (const auto& [file, sums] : json.members())
      for (const auto& [name, sum] : sums.members()) checksums[{file, name}] = static_cast<uint32_t>(sum.number());
  }
  for (auto& tensor : plan_.tensors)
    for (auto& shard : tensor.shards) shard.checksum = checksums.at({shard.file, tensor.name});
  write_file((fs::path(partial_) / kManifestName).string(), plan_.to_json() + "\n", options_.sync);
  if (options_.sync) sync_folder(partial_);
  report("complete");
  const bool replaced = rename_folder(partial_, path_, options_.overwrite);
  if (options_.sync) sync_folder(parent_folder(path_));
  report("renamed");
  std::vector<std::string> superfluous;
  const auto step = step_of(path_);
  if (options_.keep_latest > 0 && step)
    superfluous = retire_checkpoints(parent_folder(path_), options_.keep_latest, *step);
  if (options_.sync && !superfluous.empty()) sync_folder(parent_folder(path_));  // before a save overwrites its files
  if (replaced) superfluous.push_back(partial_);
  if (options_.reuse_files && !superfluous.empty()) {
    leave_to_next_save(superfluous.back());
    superfluous.pop_back();
  }
  remove_in_background(std::move(superfluous));
  return "";
}

void Saver::write(const comm::Group& group, const std::function<void()>& before) {
  const at::NoGradGuard no_grad;
  const auto in_use = std::move(folder_in_use_);
  try {
    comm::gather_decide_broadcast(
        group, what_,
        [&] {
          if (before) before();
          return write_files();
        },
        [&](const Texts& written) { return finish(written); });
  } catch (const CommError&) {  // a rank was lost, and others can still be writing
    throw;
  } catch (const c10::Error&) {  // all ranks have stopped writing
    std::error_code ignored;
    if (group->rank() == 0) fs::remove_all(partial_, ignored);
    throw;
  }
}

}  // namespace tessera::dcp

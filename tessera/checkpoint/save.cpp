#include "tessera/checkpoint/save.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/detail/system_error.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/disk.h"
#include "tessera/checkpoint/detail/local_boxes.h"
#include "tessera/checkpoint/detail/save_plan.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/comm/detail/rank_agreement.h"

#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <map>

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;
using Messages = std::vector<std::string>;

// One save() call on one rank. Plans and checksums travel between ranks as JSON text.
class Saver {
 public:
  Saver(const StateDict& dict, std::string path, const Values& values, const SaveOptions& options)
      : dict_(dict), values_(values), options_(options), path_(std::move(path)) {
    while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
    partial_ = partial_folder(path_);
  }

  std::string local_plan();                                      // the local boxes of this rank
  std::string global_plan(const Messages& local_plans);          // on rank 0
  std::string write(const Manifest& plan, int64_t rank);         // returns checksums
  std::string finish(Manifest plan, const Messages& checksums);  // on rank 0
  void remove_partial_data() {
    std::error_code ignored;
    fs::remove_all(partial_, ignored);
  }
  void report(std::string_view what) const {
    if (options_.on_stage) options_.on_stage(what);
  }

 private:
  const StateDict& dict_;
  const Values& values_;
  const SaveOptions& options_;
  std::string path_, partial_;
  std::map<std::string, LocalBoxes> boxes_;
};

std::string Saver::local_plan() {
  Manifest mine{values_, {}};
  for (const auto& [name, tensor] : dict_) {
    TESSERA_CHECK(!dtype_name(tensor.scalar_type()).empty(), UsageError, "'", name, "' is of dtype ",
                  tensor.scalar_type(), ", which safetensors does not support");
    TESSERA_CHECK(name != "__metadata__", UsageError,
                  "a tensor cannot have the name '__metadata__' in a safetensors file");
    const auto& boxes = boxes_.emplace(name, local_boxes(name, tensor)).first->second;
    mine.tensors.push_back({name, tensor.scalar_type(), boxes.sizes, {}});
    for (const auto& part : boxes.parts) mine.tensors.back().shards.push_back({"", part.box, {}});
  }
  return mine.to_json();
}

// Assigns each box to a rank and creates the folder to write into.
std::string Saver::global_plan(const Messages& local_plans) {
  std::vector<Manifest> ranks;
  for (const auto& text : local_plans) ranks.push_back(Manifest::parse(text, "the local plan of a rank"));
  const auto plan = plan_save(ranks);
  TESSERA_CHECK(options_.overwrite || !fs::exists(path_), UsageError, "'", path_,
                "' already exists; save under another name, or with {.overwrite = true}");
  remove_partial(parent_folder(path_));
  std::error_code error;
  fs::remove_all(partial_, error);
  if (!error) fs::create_directories(partial_, error);
  if (error) raise_errno(error.value(), c10::str("cannot create the folder '", partial_, "'"));
  return plan.to_json();
}

std::map<std::string, std::string> file_metadata(const std::vector<const SavedShard*>& shards, const Messages& names) {
  Json::Object offsets;
  for (size_t i = 0; i < shards.size(); i++) {
    const auto& from = shards[i]->box.offsets;
    offsets.emplace_back(names[i], Json::Object{{"saved_offsets", Json::Array(from.begin(), from.end())}});
  }
  return {{"DCP_SHARDING_INFO", Json(std::move(offsets)).dump()}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
}

// Writes the files of this rank. Returns the checksums as JSON: file -> tensor name -> CRC-32C.
std::string Saver::write(const Manifest& plan, int64_t rank) {
  TESSERA_CHECK(fs::is_directory(partial_), UsageError, "this rank does not see the folder '", partial_,
                "' that rank 0 has created; ranks on several hosts need a shared file system");
  struct ShardFile {
    std::vector<const SavedShard*> shards;
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    Messages names;
  };
  std::map<std::string, ShardFile> files;
  for (const auto& tensor : plan.tensors)
    for (const auto& shard : tensor.shards) {
      if (!writes(rank, shard.file)) continue;
      const auto& boxes = boxes_.at(tensor.name);
      for (const auto& part : boxes.parts) {
        if (!(part.box == shard.box)) continue;
        auto& file = files[shard.file];
        file.shards.push_back(&shard);
        file.names.push_back(tensor.name);
        file.tensors.emplace_back(tensor.name, boxes.view(part, part.box));
      }
    }
  Json::Object written;
  for (const auto& [name, file] : files) {
    const auto checksums = write_safetensors((fs::path(partial_) / name).string(), file.tensors,
                                             {.metadata = file_metadata(file.shards, file.names),
                                              .sync = options_.sync,
                                              .after_each = [this] { report("shard"); }});
    Json::Object sums;
    for (size_t i = 0; i < checksums.size(); i++) sums.emplace_back(file.names[i], static_cast<int64_t>(checksums[i]));
    written.emplace_back(name, std::move(sums));
  }
  return Json(std::move(written)).dump();
}

// Writes the manifest and renames the folder, which makes the checkpoint complete.
std::string Saver::finish(Manifest plan, const Messages& written) {
  std::map<std::pair<std::string, std::string>, uint32_t> checksums;  // by file and name
  for (const auto& text : written) {
    const auto json = Json::parse(text, "the checksums of a rank");
    for (const auto& [file, sums] : json.members())
      for (const auto& [name, sum] : sums.members()) checksums[{file, name}] = static_cast<uint32_t>(sum.number());
  }
  for (auto& tensor : plan.tensors)
    for (auto& shard : tensor.shards) shard.checksum = checksums.at({shard.file, tensor.name});
  write_file((fs::path(partial_) / kManifestName).string(), plan.to_json() + "\n", options_.sync);
  if (options_.sync) sync_folder(partial_);
  report("complete");
  const bool replaced = rename_folder(partial_, path_, options_.overwrite);
  if (options_.sync) sync_folder(parent_folder(path_));
  report("renamed");
  if (replaced) fs::remove_all(partial_);
  const auto step = step_of(path_);
  if (options_.keep_latest > 0 && step) keep_latest(parent_folder(path_), options_.keep_latest, *step);
  return "";
}

}  // namespace

void save(const StateDict& dict, const std::string& path, const Values& values, const SaveOptions& options,
          const World& world) {
  const at::NoGradGuard no_grad;
  const auto what = c10::str("saving '", path, "'");
  Saver saver(dict, path, values, options);
  const auto plan_text = comm::gather_decide_broadcast(
      world.group(), what, [&] { return saver.local_plan(); },
      [&](const Messages& plans) { return saver.global_plan(plans); });
  saver.report("planned");
  const auto plan = Manifest::parse(plan_text, "the global save plan");
  try {
    comm::gather_decide_broadcast(
        world.group(), what,
        [&] {
          auto written = saver.write(plan, world.rank());
          saver.report("written");
          return written;
        },
        [&](const Messages& written) { return saver.finish(plan, written); });
  } catch (const CommError&) {  // a rank was lost, and others can still be writing
    throw;
  } catch (const c10::Error&) {  // all ranks have stopped writing
    if (world.rank() == 0) saver.remove_partial_data();
    throw;
  }
}

}  // namespace tessera::dcp

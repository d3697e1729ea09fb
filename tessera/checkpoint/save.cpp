#include "tessera/checkpoint/save.h"

#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/disk.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/detail/local_boxes.h"
#include "tessera/base/detail/json.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/checkpoint/detail/save_plan.h"
#include "tessera/comm/detail/rank_agreement.h"

#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <map>

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;
using Texts = std::vector<std::string>;

// One save, as one rank does it.
class Save {
 public:
  Save(const StateDict& dict, std::string path, const Values& values, const SaveOptions& options)
      : dict_(dict), values_(values), options_(options), path_(std::move(path)) {
    while (path_.size() > 1 && path_.back() == '/') path_.pop_back();
    partial_ = partial_folder(path_);
  }

  std::string hold();
  std::string plan(const Texts& held);
  std::string write(const Manifest& plan, int64_t rank);
  std::string publish(Manifest plan, const Texts& written);
  void give_up() {
    std::error_code ignored;
    fs::remove_all(partial_, ignored);
  }
  void stage(std::string_view what) const {
    if (options_.on_stage) options_.on_stage(what);
  }

 private:
  const StateDict& dict_;
  const Values& values_;
  const SaveOptions& options_;
  std::string path_, partial_;
  std::map<std::string, Held> held_;
};

std::string Save::hold() {
  Manifest mine{values_, {}};
  for (const auto& [name, tensor] : dict_) {
    TESSERA_CHECK(!dtype_name(tensor.scalar_type()).empty(), UsageError, "'", name, "' is of dtype ",
                  tensor.scalar_type(), ", which safetensors files have not");
    TESSERA_CHECK(name != "__metadata__", UsageError, "no tensor can be called '__metadata__' in a safetensors file");
    const auto& held = held_.emplace(name, dcp::held(name, tensor)).first->second;
    mine.tensors.push_back({name, tensor.scalar_type(), held.sizes, {}});
    for (const auto& part : held.parts) mine.tensors.back().pieces.push_back({"", part.box, {}});
  }
  return mine.to_json();
}

// On the first rank: who writes what, and a folder to write into.
std::string Save::plan(const Texts& held) {
  std::vector<Manifest> ranks;
  for (const auto& text : held) ranks.push_back(Manifest::parse(text, "what a rank holds"));
  const auto plan = plan_save(ranks);
  TESSERA_CHECK(options_.overwrite || !fs::exists(path_), UsageError, "'", path_,
                "' is there already; save under another name, or with {.overwrite = true}");
  remove_partial(parent_folder(path_));
  std::error_code error;
  fs::remove_all(partial_, error);
  if (!error) fs::create_directories(partial_, error);
  TESSERA_CHECK(!error, UsageError, "cannot make the folder '", partial_, "': ", error.message());
  return plan.to_json();
}

std::map<std::string, std::string> file_metadata(const std::vector<const SavedPiece*>& pieces, const Texts& names) {
  Json::Object offsets;
  for (size_t i = 0; i < pieces.size(); i++) {
    const auto& from = pieces[i]->box.offsets;
    offsets.emplace_back(names[i], Json::Object{{"saved_offsets", Json::Array(from.begin(), from.end())}});
  }
  return {{"DCP_SHARDING_INFO", Json(std::move(offsets)).dump()}, {"DCP_VERSION", "1.0"}, {"format", "pt"}};
}

// The files that are this rank's. Says the checksums: file, then name, then crc32c.
std::string Save::write(const Manifest& plan, int64_t rank) {
  TESSERA_CHECK(fs::is_directory(partial_), UsageError, "this rank does not see the folder '", partial_,
                "' that the first rank has made; ranks on several hosts need a file system that they share");
  struct File {
    std::vector<const SavedPiece*> pieces;
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    Texts names;
  };
  std::map<std::string, File> files;
  for (const auto& tensor : plan.tensors)
    for (const auto& piece : tensor.pieces) {
      if (!writes(rank, piece.file)) continue;
      const auto& held = held_.at(tensor.name);
      for (const auto& part : held.parts) {
        if (!(part.box == piece.box)) continue;
        auto& file = files[piece.file];
        file.pieces.push_back(&piece);
        file.names.push_back(tensor.name);
        file.tensors.emplace_back(tensor.name, held.view(part, part.box));
      }
    }
  Json::Object written;
  for (const auto& [name, file] : files) {
    const auto checksums = write_safetensors((fs::path(partial_) / name).string(), file.tensors,
                                             {.metadata = file_metadata(file.pieces, file.names),
                                              .sync = options_.sync,
                                              .after_each = [this] { stage("piece"); }});
    Json::Object sums;
    for (size_t i = 0; i < checksums.size(); i++) sums.emplace_back(file.names[i], static_cast<int64_t>(checksums[i]));
    written.emplace_back(name, std::move(sums));
  }
  return Json(std::move(written)).dump();
}

// On the first rank: the manifest, and the name that makes it count.
std::string Save::publish(Manifest plan, const Texts& written) {
  std::map<std::pair<std::string, std::string>, uint32_t> checksums;  // by file and name
  for (const auto& text : written) {
    const auto json = Json::parse(text, "what a rank has written");
    for (const auto& [file, sums] : json.members())
      for (const auto& [name, sum] : sums.members()) checksums[{file, name}] = static_cast<uint32_t>(sum.number());
  }
  for (auto& tensor : plan.tensors)
    for (auto& piece : tensor.pieces) piece.checksum = checksums.at({piece.file, tensor.name});
  write_file((fs::path(partial_) / kManifestName).string(), plan.to_json() + "\n", options_.sync);
  if (options_.sync) sync_folder(partial_);
  stage("complete");
  const bool replaced = rename_folder(partial_, path_, options_.overwrite);
  if (options_.sync) sync_folder(parent_folder(path_));
  stage("renamed");
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
  Save save(dict, path, values, options);
  const auto plan_text = comm::decide(
      world.group(), what, [&] { return save.hold(); }, [&](const Texts& held) { return save.plan(held); });
  save.stage("planned");
  const auto plan = Manifest::parse(plan_text, "the plan of the save");
  try {
    comm::decide(
        world.group(), what,
        [&] {
          auto written = save.write(plan, world.rank());
          save.stage("written");
          return written;
        },
        [&](const Texts& written) { return save.publish(plan, written); });
  } catch (const UsageError&) {  // all ranks have ended, so nobody writes there any more
    if (world.rank() == 0) save.give_up();
    throw;
  }
}

}  // namespace tessera::dcp

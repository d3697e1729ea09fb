#include "tessera/train/detail/output_folder.h"

#include "tessera/base/detail/system_error.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/folders.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <iomanip>
#include <sstream>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOutputs[] = {"config.toml", "metrics.jsonl", "profile", "report.html",
                                    "run.json",    "sample.txt",    "tb",      "trace.json"};

void create_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) raise_errno(error.value(), c10::str("cannot create the output folder '", folder, "'"));
}

// mkdir() decides which of two runs that start in the same second gets a name.
std::string create_new_folder(const std::string& model) {
  const auto now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::ostringstream name;
  name << "outputs/" << std::put_time(&local, "%Y%m%d-%H%M%S") << "-" << model;
  create_folder("outputs");
  for (int64_t i = 1;; i++) {
    const auto folder = i == 1 ? name.str() : c10::str(name.str(), "-", i);
    if (mkdir(folder.c_str(), 0777) == 0) return folder;
    TESSERA_CHECK_ERRNO(errno == EEXIST, "cannot create the output folder '", folder, "'");
  }
}

// What an earlier run has left in the folders of the config; "": nothing.
std::string outputs_of_earlier_run(const TrainConfig& config) {
  const auto& folder = config.metrics.output;
  for (const char* name : kOutputs)
    if (fs::exists(fs::path(folder) / name)) return c10::str("the output folder '", folder, "' has ", name);
  if (config.checkpoint.every == 0) return "";
  const auto checkpoint = dcp::latest(checkpoint_folder(config));
  return checkpoint ? c10::str("the checkpoint folder has '", *checkpoint, "'") : "";
}

void check_not_used(const TrainConfig& config, bool overwrite) {
  const bool resume = !config.checkpoint.resume.empty();
  TESSERA_CHECK(!(resume && overwrite), UsageError,
                "--resume continues an earlier run and --overwrite deletes it; give one of them");
  if (resume || overwrite) return;
  const auto found = outputs_of_earlier_run(config);
  TESSERA_CHECK(found.empty(), UsageError, found,
                " of an earlier run; choose another --output, continue that run with --resume auto, or delete it with "
                "--overwrite");
}

void delete_outputs(const TrainConfig& config) {
  std::error_code error;
  for (const char* name : kOutputs)
    if (!error) fs::remove_all(fs::path(config.metrics.output) / name, error);
  for (const auto& [step, path] : dcp::steps_in(checkpoint_folder(config)))
    if (!error) fs::remove_all(path, error);
  if (error) raise_errno(error.value(), c10::str("cannot delete the outputs in '", config.metrics.output, "'"));
}

}  // namespace

// The delegation makes the destructor run if this throws.
OutputFolder::OutputFolder(const TrainConfig& given, bool overwrite) : OutputFolder() {
  path_ = given.metrics.output;
  if (path_.empty())
    path_ = create_new_folder(given.model.name);
  else
    create_folder(path_);
  auto config = given;
  config.metrics.output = path_;
  lock(path_);
  if (config.checkpoint.every > 0 && !config.checkpoint.folder.empty()) {
    create_folder(config.checkpoint.folder);
    if (!fs::equivalent(config.checkpoint.folder, path_)) lock(config.checkpoint.folder);
  }
  check_not_used(config, overwrite);
  if (overwrite) delete_outputs(config);
  write_text_file(path_ + "/config.toml", c10::str(config));
}

OutputFolder::~OutputFolder() {
  for (const int fd : locks_) close(fd);
}

void OutputFolder::lock(const std::string& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TESSERA_CHECK_ERRNO(fd >= 0, "cannot open the folder '", folder, "'");
  locks_.push_back(fd);
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return;
  // Some network file systems have no locks.
  TESSERA_CHECK(errno != EWOULDBLOCK, UsageError, "another run is writing to '", folder,
                "'; wait until it has ended, or choose another folder");
}

void check_output(const TrainConfig& config, bool overwrite) {
  if (config.metrics.output.empty()) return;
  create_folder(config.metrics.output);
  check_not_used(config, overwrite);
}

}  // namespace tessera::train

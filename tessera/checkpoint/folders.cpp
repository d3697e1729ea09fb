#include "tessera/checkpoint/folders.h"

#include "tessera/base/detail/system_error.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/background_removal.h"
#include "tessera/checkpoint/detail/disk.h"
#include "tessera/checkpoint/detail/manifest.h"

#include <algorithm>
#include <charconv>
#include <filesystem>

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kStep = "step-", kPartial = ".partial";

// 1000 for "step-1000"; none for other names.
std::optional<int64_t> parse_step(std::string_view name) {
  int64_t step = 0;
  if (name.substr(0, kStep.size()) != kStep) return std::nullopt;
  name.remove_prefix(kStep.size());
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0) return std::nullopt;
  return step;
}

bool is_partial_name(std::string_view name) {
  return name.size() > kPartial.size() && name.substr(name.size() - kPartial.size()) == kPartial &&
         parse_step(name.substr(0, name.size() - kPartial.size()));
}

std::vector<fs::path> entries_of(const std::string& parent) {
  std::vector<fs::path> all;
  std::error_code error;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end; entry.increment(error))
    all.push_back(entry->path());
  return all;
}

void remove_folder(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) raise_errno(error.value(), c10::str("cannot remove '", path.string(), "'"));
}

}  // namespace

std::string step_folder(const std::string& parent, int64_t step) {
  return (fs::path(parent) / c10::str(kStep, step)).string();
}

std::string partial_folder(const std::string& checkpoint) { return checkpoint + std::string(kPartial); }

std::string parent_folder(const std::string& checkpoint) {
  const auto parent = fs::path(checkpoint).parent_path();
  return parent.empty() ? "." : parent.string();
}

std::vector<std::pair<int64_t, std::string>> steps_in(const std::string& parent) {
  std::vector<std::pair<int64_t, std::string>> steps;
  for (const auto& path : entries_of(parent)) {
    const auto step = parse_step(path.filename().string());
    std::error_code error;
    if (step && fs::exists(path / kManifestName, error)) steps.emplace_back(*step, path.string());
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<std::string> latest(const std::string& parent) {
  const auto steps = steps_in(parent);
  if (steps.empty()) return std::nullopt;
  return steps.back().second;
}

std::optional<int64_t> step_of(const std::string& checkpoint) {
  return parse_step(fs::path(checkpoint).filename().string());
}

std::vector<std::string> retire_checkpoints(const std::string& parent, int64_t count, int64_t newest) {
  TESSERA_CHECK(count > 0, UsageError, "keep_latest(", count, ") would keep nothing; pass at least 1");
  auto steps = steps_in(parent);
  std::erase_if(steps, [&](const auto& step) { return step.first > newest; });
  std::vector<std::string> retired;
  for (size_t i = 0; i + static_cast<size_t>(count) < steps.size(); i++) {
    const auto& path = steps[i].second;
    retired.push_back(partial_folder(path));
    remove_folder(retired.back());
    rename_folder(path, retired.back(), /*replace=*/false);
  }
  return retired;
}

void keep_latest(const std::string& parent, int64_t count, int64_t newest) {
  for (const auto& path : retire_checkpoints(parent, count, newest)) remove_folder(path);
}

std::vector<std::string> partial_folders(const std::string& parent) {
  std::vector<std::string> found;
  for (const auto& path : entries_of(parent))
    if (is_partial_name(path.filename().string())) found.push_back(path.string());
  return found;
}

void remove_partial(const std::string& parent) {
  for (const auto& path : partial_folders(parent)) remove_folder(path);
}

}  // namespace tessera::dcp

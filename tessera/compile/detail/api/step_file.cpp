#include "tessera/compile/detail/api/step_file.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/store/sha256.h"
#include "tessera/compile/detail/codegen/kernel_key.h"
#include "tessera/compile/detail/codegen/private_files.h"
#include "tessera/compile/detail/codegen/system_compiler.h"
#include "tessera/version.h"

#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

namespace tessera::compiler {
namespace {

constexpr std::string_view kFirstWords = "tessera step 1 ";
constexpr const char* kMadeFor = "made for";

// Three lines: what must be equal on the machine that loads the file.
std::string made_for_this_machine() {
  auto processor = codegen::processor_model();
  std::replace(processor.begin(), processor.end(), '\n', ' ');
  return c10::str("Tessera ", TESSERA_VERSION, "\nLibTorch ", TORCH_VERSION, "\nprocessor ", processor, "\n");
}

// The first line has the number of bytes of the file, with leading zeros.
std::string without_mac(const StepSections& sections) {
  std::string body;
  for (const auto& [name, bytes] : sections) body += c10::str(name, " ", bytes.size(), "\n", bytes, "\n");
  constexpr size_t kSizeDigits = 12;
  const auto size = kFirstWords.size() + kSizeDigits + 1 + body.size() + codegen::KernelKey::kMacDigits;
  const auto digits = std::to_string(size);
  return c10::str(kFirstWords, std::string(kSizeDigits - digits.size(), '0'), digits, "\n", body);
}

// Reads "NAME COUNT\n" at `at`, and moves it behind.
std::pair<std::string, size_t> read_head(std::string_view text, size_t& at) {
  const auto end = text.find('\n', at);
  TESSERA_CHECK(end != std::string_view::npos, InternalError, "a saved step has no line at byte ", at);
  const auto line = text.substr(at, end - at);
  const auto space = line.rfind(' ');
  size_t count = 0;
  if (space != std::string_view::npos) std::from_chars(line.data() + space + 1, line.data() + line.size(), count);
  at = end + 1;
  return {std::string(line.substr(0, std::min(space, line.size()))), count};
}

std::string bytes_of_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  TESSERA_CHECK(in, UsageError, "load: cannot read ", path, ": ", std::strerror(errno));
  return {std::istreambuf_iterator<char>(in), {}};
}

void check_made_for_this_machine(const std::string& path, const std::string& saved) {
  const auto now = made_for_this_machine();
  if (saved == now) return;
  size_t begin = 0;
  while (saved.substr(begin, saved.find('\n', begin) - begin) == now.substr(begin, now.find('\n', begin) - begin))
    begin = now.find('\n', begin) + 1;
  constexpr size_t kShown = 100;
  const auto line = [&](const std::string& text) {
    return text.substr(begin, std::min(kShown, text.find('\n', begin) - begin));
  };
  TESSERA_FAIL(UsageError, "load: ", path, " was made for ", line(saved), ", and this is ", line(now),
               line(saved) == line(now) ? " with other features" : "", "; save the step here");
}

}  // namespace

void write_step_file(const std::string& path, StepSections sections) {
  sections.emplace(kMadeFor, made_for_this_machine());
  auto bytes = without_mac(sections);
  bytes += codegen::KernelKey::of_user().mac(bytes);
  const auto part = c10::str(path, ".", getpid());
  std::remove(part.c_str());
  codegen::write_private_file(part, bytes);
  const bool renamed = std::rename(part.c_str(), path.c_str()) == 0;
  const auto error = errno;
  if (!renamed) std::remove(part.c_str());
  TESSERA_CHECK(renamed, UsageError, "save: cannot write ", path, ": ", std::strerror(error));
}

StepSections read_step_file(const std::string& path) {
  constexpr auto kDigits = codegen::KernelKey::kMacDigits;
  const auto bytes = bytes_of_file(path);
  TESSERA_CHECK(bytes.starts_with(kFirstWords) && bytes.find('\n') != std::string::npos, UsageError, "load: ", path,
                " is not a saved step of this version: it has no first line \"", kFirstWords, "(bytes)\"");
  size_t at = 0;
  const auto size = read_head(bytes, at).second;
  TESSERA_CHECK(bytes.size() == size && size > kDigits, UsageError, "load: ", path, " has ", bytes.size(),
                " bytes, and its first line says ", size, ": it is truncated or altered; save the step again");
  const auto text = std::string_view(bytes).substr(0, size - kDigits);
  TESSERA_CHECK(comm::store::equal_in_constant_time(codegen::KernelKey::of_user().mac(std::string(text)),
                                                    std::string_view(bytes).substr(size - kDigits)),
                UsageError, "load: ", path,
                " was altered, or was written by another user or on another machine: its HMAC is not that of this "
                "user's key. It contains code, so it is not loaded; save the step here");
  StepSections sections;
  while (at < text.size()) {
    auto [name, count] = read_head(text, at);
    TESSERA_CHECK(at + count < text.size(), InternalError, path, ": section ", name, " is truncated");
    sections.emplace(std::move(name), text.substr(at, count));
    at += count + 1;
  }
  check_made_for_this_machine(path, section(sections, kMadeFor));
  return sections;
}

const std::string& section(const StepSections& sections, const std::string& name) {
  const auto found = sections.find(name);
  TESSERA_CHECK(found != sections.end(), InternalError, "a saved step has no section ", name);
  return found->second;
}

}  // namespace tessera::compiler

#include "tessera/compile/detail/codegen/system_compiler.h"

#include "tessera/base/detail/child_process.h"
#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"

#include <unistd.h>

#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

namespace tessera::compiler::codegen {
namespace {

// Without contraction, + - * / round as in LibTorch's kernels. -fno-math-errno and -fno-trapping-math allow the
// compiler to vectorize selects.
constexpr const char* kCompilerFlags[] = {
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-s"};

// A compiler that hangs must not stop the training: the program is replayed op by op.
constexpr std::chrono::seconds kVersionLimit{10};

std::vector<std::string> split_at_spaces(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

bool is_executable(const std::string& name) {
  if (name.find('/') != std::string::npos) return access(name.c_str(), X_OK) == 0;
  std::istringstream path(setting("PATH"));
  for (std::string folder; std::getline(path, folder, ':');)
    if (!folder.empty() && access((folder + "/" + name).c_str(), X_OK) == 0) return true;
  return false;
}

std::optional<SystemCompiler> try_compiler(const std::string& text) {
  auto command = split_at_spaces(text);
  if (command.empty() || !is_executable(command[0])) return {};
  auto print_version = command;
  print_version.emplace_back("--version");
  const auto version = run_child(print_version, ChildErrors::InOutput, kVersionLimit);
  if (version.exit_code != 0) return {};
  std::string identity = text + "\n" + version.out + processor_model();
  for (const auto* flag : kCompilerFlags) {
    command.emplace_back(flag);
    identity += std::string(flag) + " ";
  }
  return SystemCompiler{std::move(command), std::move(identity)};
}

}  // namespace

std::string processor_model() {
  std::ifstream in("/proc/cpuinfo");
  std::string text;
  for (std::string line; std::getline(in, line) && !line.empty();)  // an empty line ends the first core
    if (line.starts_with("model name") || line.starts_with("flags") || line.starts_with("Features") ||
        line.starts_with("CPU part"))
      text += line + "\n";
  return text;
}

std::optional<SystemCompiler> find_compiler() {
  static std::mutex mutex;
  static auto* known = new std::map<std::pair<std::string, std::string>, std::optional<SystemCompiler>>;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = known->try_emplace({setting("CXX"), setting("PATH")});
  if (!is_new) return at->second;
  for (const auto& candidate : {setting("CXX"), std::string("c++"), std::string("g++"), std::string("clang++")})
    if (!at->second) at->second = try_compiler(candidate);
  return at->second;
}

void build_shared_library(const SystemCompiler& compiler, const std::string& source_file,
                          const std::string& library_file) {
  auto command = compiler.command;
  for (const auto& word : {source_file, std::string("-o"), library_file}) command.push_back(word);
  const std::chrono::seconds limit(setting_int("TESSERA_COMPILER_TIMEOUT_S"));
  const auto result = run_child(command, ChildErrors::InOutput, limit);
  TESSERA_CHECK(!result.timed_out, UsageError, "codegen: ", c10::Join(" ", command), " did not end within ",
                limit.count(), " s and was killed; TESSERA_COMPILER_TIMEOUT_S is the limit");
  TESSERA_CHECK(result.exit_code == 0, UsageError, "codegen: ", c10::Join(" ", command), " ended with exit code ",
                result.exit_code, ":\n", result.out);
}

}  // namespace tessera::compiler::codegen

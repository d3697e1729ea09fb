#include "tessera/compile/detail/codegen/compiler.h"

#include "tessera/base/detail/child_process.h"
#include "tessera/base/error.h"
#include "tessera/base/detail/settings.h"

#include <unistd.h>

#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

namespace tessera::compiler::codegen {
namespace {

// Without contraction, + - * / round as LibTorch's kernels do. Nobody reads errno or the floating-point flags, and
// without them selects are vectorised.
constexpr const char* kFlags[] = {
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-s"};

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

bool is_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return access(name.c_str(), X_OK) == 0;
  std::istringstream path(setting("PATH"));
  for (std::string folder; std::getline(path, folder, ':');)
    if (!folder.empty() && access((folder + "/" + name).c_str(), X_OK) == 0) return true;
  return false;
}

// What -march=native stands for.
std::string processor() {
  std::ifstream in("/proc/cpuinfo");
  std::string text;
  for (std::string line; std::getline(in, line) && !line.empty();)  // of the first core
    if (line.starts_with("model name") || line.starts_with("flags") || line.starts_with("Features") ||
        line.starts_with("CPU part"))
      text += line + "\n";
  return text;
}

std::optional<SystemCompiler> try_compiler(const std::string& text) {
  auto command = words_of(text);
  if (command.empty() || !is_program(command[0])) return {};
  auto question = command;
  question.emplace_back("--version");
  const auto answer = run_child(question, ChildErrors::InOutput);
  if (answer.exit_code != 0) return {};
  std::string identity = text + "\n" + answer.out + processor();
  for (const auto* flag : kFlags) {
    command.emplace_back(flag);
    identity += std::string(flag) + " ";
  }
  return SystemCompiler{std::move(command), std::move(identity)};
}

}  // namespace

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

void build(const SystemCompiler& compiler, const std::string& source_file, const std::string& library_file) {
  auto command = compiler.command;
  for (const auto& word : {source_file, std::string("-o"), library_file}) command.push_back(word);
  const auto result = run_child(command, ChildErrors::InOutput);
  TESSERA_CHECK(result.exit_code == 0, UsageError, "codegen: ", c10::Join(" ", command), " ended with ",
                result.exit_code, ":\n", result.out);
}

}  // namespace tessera::compiler::codegen

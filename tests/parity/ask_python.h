#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <unistd.h>

#include <fcntl.h>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// Real PyTorch beside us: a test hands tensors and settings to tests/parity/x.py, run by the Python whose torch we
// link, and compares what comes back with what we compute. The other end is tests/parity/harness.py.
//
//   question --- (tensors, texts), pickled ---> python x.py in out ---> answer, the same way
//
// Importing torch takes a child seconds: ask once in a test file, for all of its cases.
namespace tessera::parity {

struct Message {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, std::string> texts;  // settings on the way there; what is no tensor on the way back
};

struct Answer : Message {
  std::string skipped;  // why nobody was asked; else empty
};

// Example:  static const auto answer = ask_python("models.py", question);
//           SKIP_UNLESS_ANSWERED(answer);
#define SKIP_UNLESS_ANSWERED(answer) \
  if (!(answer).skipped.empty()) GTEST_SKIP() << (answer).skipped

namespace detail {

struct Folder {
  std::string path = "/tmp/tessera-parity-XXXXXX";
  Folder() {
    if (::access("/dev/shm", W_OK) == 0) path = "/dev/shm/tessera-parity-XXXXXX";
    if (!mkdtemp(path.data())) throw std::runtime_error("cannot make the folder " + path);
  }
  std::string file(const std::string& name) const { return path + "/" + name; }
  ~Folder() {
    for (const char* name : {"in", "out", "said"}) unlink(file(name).c_str());
    rmdir(path.c_str());
  }
};

inline std::vector<char> read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Runs a program and waits; its words go to `said`. It is given an environment of its own, not ours: no LD_PRELOAD, no
// LD_LIBRARY_PATH, no TESSERA_*, so that nothing of this process can be loaded into it. It ends when we do.
inline int run(std::vector<std::string> command, const std::string& said) {
  std::vector<std::string> variables{"PATH=/usr/bin:/bin", "HOME=/nonexistent", "OMP_NUM_THREADS=1", "LANG=C.UTF-8"};
  std::vector<char*> argv, env;
  for (auto& word : command) argv.push_back(word.data());
  for (auto& variable : variables) env.push_back(variable.data());
  argv.push_back(nullptr);
  env.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = open(said.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execve(argv[0], argv.data(), env.data());
    _exit(127);
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace detail

// Throws if the script fails, with what it printed.
inline Answer ask_python(const std::string& script, const Message& question) {
  Answer answer;
  const std::string python = TESSERA_PARITY_PYTHON;
  if (python.empty()) {
    answer.skipped = "no Python beside the LibTorch that was linked";
    return answer;
  }
  const detail::Folder folder;
  const char* has_torch = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))";
  if (detail::run({python, "-B", "-E", "-s", "-c", has_torch}, folder.file("said")) != 0) {
    answer.skipped = python + " has no torch";
    return answer;
  }
  c10::Dict<std::string, at::Tensor> tensors;
  for (const auto& [name, t] : question.tensors) tensors.insert(name, t.detach());
  c10::Dict<std::string, std::string> texts;
  for (const auto& [name, text] : question.texts) texts.insert(name, text);

  const auto bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create({tensors, texts}));
  std::ofstream(folder.file("in"), std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const int code = detail::run({python, "-B", "-E", "-s", std::string(TESSERA_PARITY_SCRIPTS) + "/" + script,
                                folder.file("in"), folder.file("out")},
                               folder.file("said"));
  const auto said = detail::read_bytes(folder.file("said"));
  if (code != 0)
    throw std::runtime_error(c10::str(script, " ended with ", code, ":\n", std::string(said.begin(), said.end())));
  const auto parts = torch::jit::pickle_load(detail::read_bytes(folder.file("out"))).toTuple();
  for (const auto& item : parts->elements()[0].toGenericDict())
    answer.tensors[item.key().toStringRef()] = item.value().toTensor();
  for (const auto& item : parts->elements()[1].toGenericDict())
    answer.texts[item.key().toStringRef()] = item.value().toStringRef();
  return answer;
}

}  // namespace tessera::parity

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

// Compares with real PyTorch: a test sends tensors and settings to tests/parity/x.py, which runs in the Python whose
// torch we link, and compares the response with our results. The Python side is tests/parity/harness.py.
//
//   request (tensors, texts), pickled  --->  python x.py in out  --->  response, in the same form
//
// A child needs seconds to import torch, so a test file calls run_python once for all of its cases.
namespace tessera::parity {

struct Message {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, std::string> texts;  // settings in a request; results that are not tensors in a response
};

struct Response : Message {
  std::string skipped;  // why Python was not run; empty if it was
};

// Example:  static const auto response = run_python("models.py", request);
//           SKIP_WITHOUT_PYTHON(response);
#define SKIP_WITHOUT_PYTHON(response) \
  if (!(response).skipped.empty()) GTEST_SKIP() << (response).skipped

namespace detail {

struct TemporaryFolder {
  std::string path = "/tmp/tessera-parity-XXXXXX";
  TemporaryFolder() {
    if (::access("/dev/shm", W_OK) == 0) path = "/dev/shm/tessera-parity-XXXXXX";
    if (!mkdtemp(path.data())) throw std::runtime_error("cannot create the folder " + path);
  }
  std::string file(const std::string& name) const { return path + "/" + name; }
  ~TemporaryFolder() {
    for (const char* name : {"in", "out", "printed"}) unlink(file(name).c_str());
    rmdir(path.c_str());
  }
};

inline std::vector<char> read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Runs a program, waits, and writes its output to the file `printed`. The program does not inherit our environment
// (LD_PRELOAD, LD_LIBRARY_PATH, TESSERA_*), so that it cannot load our library. It is killed when this process ends.
inline int run(std::vector<std::string> command, const std::string& printed) {
  std::vector<std::string> variables{"PATH=/usr/bin:/bin", "HOME=/nonexistent", "OMP_NUM_THREADS=1", "LANG=C.UTF-8",
                                     "CUDA_VISIBLE_DEVICES="};
  std::vector<char*> argv, env;
  for (auto& word : command) argv.push_back(word.data());
  for (auto& variable : variables) env.push_back(variable.data());
  argv.push_back(nullptr);
  env.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = open(printed.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
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

// Runs tests/parity/SCRIPT. Throws with the script's output if it fails.
inline Response run_python(const std::string& script, const Message& request) {
  Response response;
  const std::string python = TESSERA_PARITY_PYTHON;
  if (python.empty()) {
    response.skipped = "the linked LibTorch has no Python";
    return response;
  }
  const detail::TemporaryFolder folder;
  const char* has_torch = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))";
  if (detail::run({python, "-B", "-E", "-s", "-c", has_torch}, folder.file("printed")) != 0) {
    response.skipped = python + " has no torch";
    return response;
  }
  c10::Dict<std::string, at::Tensor> tensors;
  for (const auto& [name, t] : request.tensors) tensors.insert(name, t.detach());
  c10::Dict<std::string, std::string> texts;
  for (const auto& [name, text] : request.texts) texts.insert(name, text);

  const auto bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create({tensors, texts}));
  std::ofstream(folder.file("in"), std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  const int code = detail::run({python, "-B", "-E", "-s", std::string(TESSERA_PARITY_SCRIPTS) + "/" + script,
                                folder.file("in"), folder.file("out")},
                               folder.file("printed"));
  const auto printed = detail::read_bytes(folder.file("printed"));
  if (code != 0)
    throw std::runtime_error(
        c10::str(script, " exited with ", code, ":\n", std::string(printed.begin(), printed.end())));
  const auto parts = torch::jit::pickle_load(detail::read_bytes(folder.file("out"))).toTuple();
  for (const auto& item : parts->elements()[0].toGenericDict())
    response.tensors[item.key().toStringRef()] = item.value().toTensor();
  for (const auto& item : parts->elements()[1].toGenericDict())
    response.texts[item.key().toStringRef()] = item.value().toStringRef();
  return response;
}

}  // namespace tessera::parity

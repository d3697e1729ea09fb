#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/cli/check_arguments.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/paths.h"
#include "tessera/cli/selftest.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/environment.h"
#include "tessera/launch/launcher.h"
#include "tessera/testing/ranks.h"
#include "tessera/version.h"

#include <ATen/ops/scalar_tensor.h>
#include <sys/utsname.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <set>
#include <sstream>
#include <thread>

namespace tessera::cli {
namespace {

struct SelftestArguments {
  int64_t ranks = 4;
  std::vector<std::string> backends = {"threads", "shm", "gloo"};
  bool nccl = false;
  std::string device = "cpu";  // of ranks over other backends than nccl
  std::string plant, file = "tessera-selftest.txt";
};

std::string machine_text() {
  utsname names{};
  uname(&names);
  std::ostringstream text;
  text << "tessera " TESSERA_VERSION ", LibTorch " << TORCH_VERSION << "\n"
       << names.nodename << ": " << names.sysname << ' ' << names.release << ' ' << names.machine << ", "
       << std::thread::hardware_concurrency() << " cores, " << comm::detail::nccl_devices() << " CUDA devices\n";
  return text.str();
}

// Over other backends than nccl, several ranks may share a GPU.
at::Device device_of(const std::string& backend, int64_t local_rank, const SelftestArguments& arguments) {
  if (backend == "nccl") return {at::kCUDA, static_cast<at::DeviceIndex>(local_rank)};
  if (arguments.device == "cpu") return at::kCPU;
  const int64_t devices = comm::detail::nccl_devices();
  TESSERA_CHECK(devices > 0, UsageError, "selftest --device cuda: LibTorch finds no CUDA device on this host");
  return {at::kCUDA, static_cast<at::DeviceIndex>(local_rank % devices)};
}

// This process is a rank of a job: all checks in its world. Rank 0 writes the file.
bool selftest_as_rank(const comm::Environment& environment, const SelftestArguments& arguments) {
  const auto backend = arguments.backends.size() == 1 ? arguments.backends[0] : std::string();
  const auto world = init({.backend = backend});
  const auto results = run_selftest(world, device_of(world.backend(), environment.local_rank, arguments),
                                    parse_selftest_fault(arguments.plant));
  std::ostringstream text;
  const auto staged = arguments.device == "cuda" && world.backend() != "nccl" ? ", on CUDA tensors" : "";
  const bool passed =
      print_selftest(text, c10::str("\n", world.size(), " ranks over ", world.backend(), staged), results);
  if (world.rank() == 0) {
    write_text_file(arguments.file, machine_text() + text.str());
    std::cout << text.str();
  }
  destroy();
  return passed;
}

// Ranks that are threads of this process.
bool selftest_on_threads(const SelftestArguments& arguments, std::ostream& out) {
  std::vector<SelftestResult> results;
  testing::run_ranks(arguments.ranks, [&](testing::Rank& me) {
    auto mine = run_selftest(me.world, at::kCPU, parse_selftest_fault(arguments.plant));
    if (me.rank == 0) results = std::move(mine);
  });
  // A rank that fails must end the collectives of the others with an error that names it.
  SelftestResult fault{"a failing rank ends the others", "", 0};
  std::string said;
  const auto start = std::chrono::steady_clock::now();
  try {
    testing::run_ranks(arguments.ranks, [](testing::Rank& me) {
      TESSERA_CHECK(me.rank != me.size() - 1, UsageError, "the planted failure");
      auto x = at::scalar_tensor(1.0);
      all_reduce(x);
    });
    said = "no error";
  } catch (const std::exception& error) {
    said = error.what();
  }
  fault.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  if (arguments.ranks > 1 && said.find("the planted failure") == std::string::npos) fault.error = said;
  results.push_back(fault);
  return print_selftest(out, c10::str("\n", arguments.ranks, " ranks over threads"), results);
}

// Ranks that are processes, which the launcher starts.
bool selftest_on_processes(const SelftestArguments& arguments, const std::string& backend, const std::string& device,
                           std::ostream& out) {
  const auto part = arguments.file + "." + backend;
  std::filesystem::remove(part);
  launch::RunOptions options;
  options.command = {program_path().string(), "selftest", "--backends", backend, "--device", device, "-o", part};
  options.nproc_per_node = backend == "nccl" ? std::max<int64_t>(1, comm::detail::nccl_devices()) : arguments.ranks;
  options.ranks_shown = std::set<int64_t>{};
  options.brief_errors = true;
  options.program_name = "tessera selftest";
  if (!arguments.plant.empty()) options.command.insert(options.command.end(), {"--plant", arguments.plant});
  const int code = launch::run(options);
  if (std::filesystem::exists(part)) {
    const auto text = read_text_file(part, "selftest");
    out << text.substr(text.find("\n\n") + 1);  // without the versions
    std::filesystem::remove(part);
  } else {
    out << "\nranks over " << backend << "\n  FAILED: the ranks ended with code " << code << '\n';
  }
  return code == 0;
}

void selftest(const SelftestArguments& arguments) {
  bool passed = true;
  if (const auto environment = comm::read_environment(); !environment.launcher.empty()) {
    passed = selftest_as_rank(environment, arguments);
  } else {
    std::ostringstream text;
    text << machine_text();
    for (const auto& backend : arguments.backends)
      passed &= backend == "threads" ? selftest_on_threads(arguments, text)
                                     : selftest_on_processes(arguments, backend, arguments.device, text);
    if (arguments.nccl) {
      passed &= selftest_on_processes(arguments, "nccl", "cuda", text);
      passed &= selftest_on_processes(arguments, "shm", "cuda", text);
    }
    write_text_file(arguments.file, text.str());
    std::cout << text.str() << '\n'
              << (passed ? "All checks passed. " : "") << "The report is in " << arguments.file << '\n';
  }
  TESSERA_CHECK(passed, SystemError, "selftest: a check has failed; the report is in ", arguments.file);
}

}  // namespace

void add_selftest_command(CLI::App& app) {
  auto arguments = std::make_shared<SelftestArguments>();
  auto* command = app.add_subcommand(
      "selftest", "Check collectives, links between ranks and parallelisms on this machine or cluster");
  command->add_option("-n,--ranks", arguments->ranks, "Number of ranks on this host")
      ->check(in_range(1, 64))
      ->capture_default_str();
  command->add_option("--backends", arguments->backends, "Comma-separated backends")
      ->delimiter(',')
      ->capture_default_str();
  command->add_flag("--nccl", arguments->nccl,
                    "Also over nccl, with one rank per CUDA device, and over shm, with ranks that share CUDA devices");
  command->add_option("--device", arguments->device, "Device of ranks over other backends than nccl: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--plant", arguments->plant,
                      "Plant faults that the test must find: wrong:RANK and slow:RANK-RANK");
  command->add_option("-o,--output", arguments->file, "File for the report")->capture_default_str();
  command->footer(
      "Examples:\n  tessera selftest                     # this host: threads, shm and gloo\n"
      "  tessera run -n 8 --nnodes 2 --node-rank 0 --rdzv head:29400 -- tessera selftest    # on each host of a job\n"
      "  srun tessera selftest\n"
      "Send the report file with a bug report.");
  command->callback([arguments] { selftest(*arguments); });
}

}  // namespace tessera::cli

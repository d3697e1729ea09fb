// The program that launcher tests start as ranks.
//   probe sum | twice | throw RANK | catch RANK | exit RANK
//   probe fault KIND RANK MILLISECONDS FILE     kFaultKinds below
#include "tessera/base/error_file.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/environment.h"
#include "tessera/comm/world.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <thread>

using namespace tessera;

namespace {

void print_sum() {
  at::Tensor x = at::full({1}, static_cast<double>(get_rank() + 1));
  all_reduce(x);
  const auto launched = comm::read_environment();
  std::cout << c10::str("sum ", x.item<double>(), " on rank ", get_rank(), " of ", get_world_size(), ", ",
                        launched.local_rank, " of ", launched.local_size, " here; ", launched.launcher, "\n")
            << std::flush;  // the launcher may kill it before it exits
}

int run(const std::string& mode, int64_t at_rank) {
  init();
  print_sum();
  if (mode == "twice") {
    destroy();
    init();
    print_sum();
  }
  if (get_rank() == at_rank) throw std::runtime_error("it \"broke\"\non rank " + std::to_string(at_rank));
  if (at_rank >= 0) barrier();  // the other ranks wait for the failed one
  destroy();
  return 0;
}

// The rank that fails records its error and exits with its own code. The others have an uncaught exception.
int exit_with_code(int64_t at_rank) {
  init();
  try {
    print_sum();
    if (get_rank() == at_rank) throw std::runtime_error("it broke");
  } catch (const std::exception& error) {
    record_error(error);
    std::exit(3);
  }
  barrier();
  destroy();
  return 0;
}

// What the faulty rank does after the given time, at any instant from the start of main() on. The other ranks run
// collectives.
struct FaultKind {
  const char* name;
  bool on_main_thread;  // between two collectives; otherwise at once, on another thread
  void (*act)();
};
const FaultKind kFaultKinds[] = {
    {"kill", false, [] { raise(SIGKILL); }},
    {"segv", false, [] { raise(SIGSEGV); }},
    {"stop", false, [] { kill(getpid(), SIGSTOP); }},
    {"exit0", false, [] { _exit(0); }},
    {"exit3", false, [] { _exit(3); }},
    {"abort", false, [] { std::abort(); }},
    {"throw", true, [] { throw std::runtime_error("it broke"); }},
    {"record", true,
     [] {
       record_error(std::runtime_error("it broke"));
       std::exit(3);
     }},
    {"world abort", true,
     [] {
       World::current().abort("I give up");
       destroy();
       std::exit(0);
     }},
    {"wrong size", true,
     [] {
       at::Tensor x = at::full({5}, 1.0);
       all_reduce(x);
     }},
    {"wrong dtype", true,
     [] {
       at::Tensor x = at::full({4}, 1.0, at::kDouble);
       all_reduce(x);
     }},
    {"wrong call", true, [] { barrier(); }},
    {"compute", true, [] { pause(); }},
};

void note_fault(const char* file) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // the same clock as in the test
  std::ofstream(file) << now.tv_sec * 1000 + now.tv_nsec / 1'000'000 << std::flush;
}

int run_fault(const std::string& kind_name, int64_t at_rank, int64_t milliseconds, const char* file) {
  using Clock = std::chrono::steady_clock;
  const auto due = Clock::now() + std::chrono::milliseconds(milliseconds);
  const FaultKind* fault = nullptr;
  for (const auto& kind : kFaultKinds)
    if (kind_name == kind.name && comm::read_environment().rank == at_rank) fault = &kind;
  if (fault && !fault->on_main_thread)
    std::thread([=] {
      std::this_thread::sleep_until(due);
      note_fault(file);
      fault->act();
    }).detach();
  init();
  for (;;) {
    if (fault && fault->on_main_thread && Clock::now() >= due) {
      note_fault(file);
      fault->act();
    }
    at::Tensor x = at::full({4}, 1.0);
    all_reduce(x);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "sum";
  if (mode == "fault") return run_fault(argv[2], std::atoll(argv[3]), std::atoll(argv[4]), argv[5]);
  const int64_t at_rank = argc > 2 ? std::atoll(argv[2]) : -1;
  if (mode == "exit") return exit_with_code(at_rank);
  if (mode != "catch") return run(mode, at_rank);
  try {
    return run(mode, at_rank);
  } catch (const std::exception& error) {
    record_error(error);
    return 3;
  }
}

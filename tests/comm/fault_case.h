#pragma once
#include "tessera/base/error.h"
#include "tessera/comm/detail/records.h"
#include "tessera/comm/world.h"
#include "tessera/models/mlp.h"
#include "tessera/tensor_parallel/parallelize_module.h"

#include <torch/torch.h>

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

// One case of the fault matrix, as run by one of its processes: correct collectives, until one rank does something
// wrong. Each rank is another process of the test program. It prints
//
//   fault at <s>                the faulty rank, before the fault
//   error at <s>: <message>     any other rank, when it gets an error
//   left at <s>                 after destroy(); the process then ends with code 3
namespace tessera::testing {

struct FaultCase {
  std::string fault;       // a name in kFaults, or "kill any time"
  std::string backend;     // "shm", "gloo"
  std::string collective;  // a name in kCollectives
  int ranks = 3;
  int faulty_rank = 2;
  int rounds = 2;         // correct collectives before the fault
  int kill_after_ms = 0;  // only for "kill any time": when the test kills the faulty rank
};

inline std::ostream& operator<<(std::ostream& out, const FaultCase& c) {
  return out << c.fault << " x " << c.backend << " x " << c.collective << ", rank " << c.faulty_rank << " of "
             << c.ranks << " after " << c.rounds << " rounds, " << c.kill_after_ms << " ms";
}

constexpr double kShortTimeout = 2, kTimeout = 30, kTimeToJoin = 6;  // s
constexpr const char* kTensor = "weights";

inline double now_s() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);  // the same clock for all processes
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct CollectiveRow {
  const char* name;
  comm::CommKind kind;
  void (*run)(comm::Communicator&, int64_t elements, at::ScalarType);
};
inline const CollectiveRow kCollectives[] = {
    {"all_reduce", comm::CommKind::AllReduce,
     [](comm::Communicator& group, int64_t n, at::ScalarType dtype) {
       at::Tensor x = at::ones({n}, dtype);
       group.all_reduce(x, ReduceOp::Sum, {.tensor_name = kTensor}).wait();
     }},
    {"all_gather", comm::CommKind::AllGatherIntoTensor,
     [](comm::Communicator& group, int64_t n, at::ScalarType dtype) {
       at::Tensor in = at::ones({n}, dtype), out = at::empty({n * group.size()}, dtype);
       group.all_gather_into_tensor(out, in, {.tensor_name = kTensor}).wait();
     }},
    {"reduce_scatter", comm::CommKind::ReduceScatterTensor,
     [](comm::Communicator& group, int64_t n, at::ScalarType dtype) {
       at::Tensor in = at::ones({n * group.size()}, dtype), out = at::empty({n}, dtype);
       group.reduce_scatter_tensor(out, in, ReduceOp::Sum, {.tensor_name = kTensor}).wait();
     }},
};
inline const CollectiveRow& collective_row(const std::string& name) {
  for (const auto& row : kCollectives)
    if (name == row.name) return row;
  std::abort();
}

// What the faulty rank does instead of the collective that all others post. `within`: seconds until every other rank
// has its error. `names`: the error names group, number, kind and tensor. (A different plan fails before any
// collective.)
struct FaultRow {
  const char* name;
  double within;
  bool names;
  std::vector<std::string> says;
  void (*act)(comm::Communicator&, const CollectiveRow&);
};
inline const FaultRow kFaults[] = {
    {"kill -9", 1, true, {"has died"}, [](comm::Communicator&, const CollectiveRow&) { raise(SIGKILL); }},
    {"SIGSTOP", 5, true, {"is stopped"}, [](comm::Communicator&, const CollectiveRow&) { raise(SIGSTOP); }},
    {"exception",
     1,
     true,
     {"failed", "no luck today"},
     [](comm::Communicator&, const CollectiveRow&) { throw std::runtime_error("no luck today"); }},
    {"wrong size",
     1,
     true,
     {"disagree", "bytes"},
     [](comm::Communicator& group, const CollectiveRow& row) { row.run(group, 5, at::kFloat); }},
    {"wrong dtype",
     1,
     true,
     {"disagree", "Int", "Float"},
     [](comm::Communicator& group, const CollectiveRow& row) { row.run(group, 4, at::kInt); }},
    {"wrong order",
     1,
     true,
     {"disagree", "broadcast"},
     [](comm::Communicator& group, const CollectiveRow& row) {
       at::Tensor x = at::ones({4});
       group.broadcast(x, 0).wait();
       row.run(group, 4, at::kFloat);
     }},
    {"missing rank",
     kShortTimeout + 1,
     true,
     {"waited 2 s for rank"},
     [](comm::Communicator&, const CollectiveRow&) { pause(); }},
    {"different plan", 1, false, {"parallelize_module", "net1 Linear colwise", "net1 Linear rowwise"}, nullptr},
};
inline const FaultRow* fault_row(const std::string& name) {
  for (const auto& row : kFaults)
    if (name == row.name) return &row;
  return nullptr;
}

inline void make_plan_differ(bool faulty_rank) {
  models::MLP module(models::mlp_module());
  const auto mesh = init_device_mesh("cpu", {World::current().size()}, {"tp"});
  parallelize_module(*module, mesh,
                     faulty_rank ? Plan{{"net1", RowwiseParallel()}} : Plan{{"net1", ColwiseParallel()}});
}

inline void act_as_rank(const FaultCase& fault_case, int rank, const std::string& file) {
  const bool faulty_rank = rank == fault_case.faulty_rank;
  const CollectiveRow& row = collective_row(fault_case.collective);
  InitOptions options;
  options.backend = fault_case.backend;
  options.rank = rank;
  options.world_size = fault_case.ranks;
  options.init_method = "file://" + file;
  const double timeout = fault_case.fault == "missing rank" ? kShortTimeout
                         : fault_case.fault == "kill any time"
                             ? kTimeToJoin  // the kill may come before the rank has joined
                             : kTimeout;    // must not be reached
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000));
  auto& group = *init(options).group();
  for (int i = 0; i < fault_case.rounds; i++) row.run(group, 4, at::kFloat);
  const FaultRow* fault = fault_row(fault_case.fault);
  if (faulty_rank && fault) std::cout << "fault at " << now_s() << std::endl;
  if (!fault)
    for (;;) row.run(group, 4, at::kFloat);  // until it is killed
  else if (!fault->act)
    make_plan_differ(faulty_rank);
  else if (faulty_rank)
    fault->act(group, row);
  else
    row.run(group, 4, at::kFloat);
}

// Called by main(): if this process was started as a rank, runs it and exits.
//   --fault-case fault backend collective ranks culprit rounds rank file
inline void run_if_fault_case(int argc, char** argv) {
  if (argc < 10 || std::string(argv[1]) != "--fault-case") return;
  const FaultCase fault_case{argv[2], argv[3], argv[4], std::atoi(argv[5]), std::atoi(argv[6]), std::atoi(argv[7])};
  const int rank = std::atoi(argv[8]);
  std::cout << std::fixed;
  at::set_num_threads(1);
  int code = 0;
  const auto report = [&](const std::string& message) {
    std::cout << "error at " << now_s() << ": " << message << std::endl;
    code = 3;
  };
  if (rank == fault_case.faulty_rank) {
    try {
      act_as_rank(fault_case, rank, argv[9]);
    } catch (const c10::Error& error) {  // an error about its own fault; other exceptions leave main()
      report(error.what_without_backtrace());
    }
  } else {
    try {
      act_as_rank(fault_case, rank, argv[9]);
    } catch (const c10::Error& error) {
      report(error.what_without_backtrace());
    } catch (const std::exception& error) {
      report(error.what());
    }
  }
  destroy();
  std::cout << "left at " << now_s() << std::endl;
  std::exit(code);
}

}  // namespace tessera::testing

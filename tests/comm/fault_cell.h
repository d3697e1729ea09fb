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

// One cell of the fault matrix, as one of its processes sees it: sound collectives until one rank, the culprit, does
// something wrong. Each rank is the test's program again, and says on its output
//
//   fault at <ns>               the culprit, before it does it
//   freed at <ns>: <message>    any other, when it is given an error
//   left at <ns>                after destroy(); it then ends as programs do, with code 3
namespace tessera::testing {

struct Cell {
  std::string fault;       // a row of kFaults, or "kill any time"
  std::string backend;     // "shm", "gloo"
  std::string collective;  // a row of kCollectives
  int ranks = 3;
  int culprit = 2;
  int rounds = 2;         // sound ones before the fault
  int kill_after_ms = 0;  // only for "kill any time": by the one who started it
};

inline std::ostream& operator<<(std::ostream& out, const Cell& c) {
  return out << c.fault << " x " << c.backend << " x " << c.collective << ", rank " << c.culprit << " of " << c.ranks
             << " after " << c.rounds << " rounds, " << c.kill_after_ms << " ms";
}

constexpr double kShortTimeout = 2, kTimeout = 30, kTimeToJoin = 6;  // s
constexpr const char* kTensor = "weights";

inline double now_s() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);  // one clock for all processes
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct CollectiveRow {
  const char* name;
  comm::Kind kind;
  void (*run)(comm::Communicator&, int64_t elements, at::ScalarType);
};
inline const CollectiveRow kCollectives[] = {
    {"all_reduce", comm::Kind::AllReduce,
     [](comm::Communicator& group, int64_t n, at::ScalarType dtype) {
       at::Tensor x = at::ones({n}, dtype);
       group.all_reduce(x, ReduceOp::Sum, {.tensor_name = kTensor}).wait();
     }},
    {"all_gather", comm::Kind::AllGatherIntoTensor,
     [](comm::Communicator& group, int64_t n, at::ScalarType dtype) {
       at::Tensor in = at::ones({n}, dtype), out = at::empty({n * group.size()}, dtype);
       group.all_gather_into_tensor(out, in, {.tensor_name = kTensor}).wait();
     }},
    {"reduce_scatter", comm::Kind::ReduceScatterTensor,
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

// What the culprit does in place of the collective that all others post. `within`: s from then until every other rank
// has its error. `names`: the error names group, number, kind and tensor; a plan is not yet about a collective.
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

inline void make_plan_differ(bool culprit) {
  models::MLP module(models::mlp_module());
  const auto mesh = init_device_mesh("cpu", {World::current().size()}, {"tp"});
  parallelize_module(*module, mesh, culprit ? Plan{{"net1", RowwiseParallel()}} : Plan{{"net1", ColwiseParallel()}});
}

inline void act_as_rank(const Cell& cell, int rank, const std::string& file) {
  const bool culprit = rank == cell.culprit;
  const CollectiveRow& row = collective_row(cell.collective);
  InitOptions options;
  options.backend = cell.backend;
  options.rank = rank;
  options.world_size = cell.ranks;
  options.init_method = "file://" + file;
  const double timeout = cell.fault == "missing rank"    ? kShortTimeout
                         : cell.fault == "kill any time" ? kTimeToJoin  // before it has joined, nobody can tell
                                                         : kTimeout;    // must not be needed
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1000));
  auto& group = *init(options).group();
  for (int i = 0; i < cell.rounds; i++) row.run(group, 4, at::kFloat);
  const FaultRow* fault = fault_row(cell.fault);
  if (culprit && fault) std::cout << "fault at " << now_s() << std::endl;
  if (!fault)
    for (;;) row.run(group, 4, at::kFloat);  // until it is killed
  else if (!fault->act)
    make_plan_differ(culprit);
  else if (culprit)
    fault->act(group, row);
  else
    row.run(group, 4, at::kFloat);
}

// For main(): if this process was started as a rank, runs it and ends.
//   --cell fault backend collective ranks culprit rounds rank file
inline void run_if_cell(int argc, char** argv) {
  if (argc < 10 || std::string(argv[1]) != "--cell") return;
  const Cell cell{argv[2], argv[3], argv[4], std::atoi(argv[5]), std::atoi(argv[6]), std::atoi(argv[7])};
  const int rank = std::atoi(argv[8]);
  std::cout << std::fixed;
  at::set_num_threads(1);
  int code = 0;
  const auto freed = [&](const std::string& message) {
    std::cout << "freed at " << now_s() << ": " << message << std::endl;
    code = 3;
  };
  if (rank == cell.culprit) {
    try {
      act_as_rank(cell, rank, argv[9]);
    } catch (const c10::Error& error) {  // told of its own fault; what is no error of ours goes out of main
      freed(error.what_without_backtrace());
    }
  } else {
    try {
      act_as_rank(cell, rank, argv[9]);
    } catch (const c10::Error& error) {
      freed(error.what_without_backtrace());
    } catch (const std::exception& error) {
      freed(error.what());
    }
  }
  destroy();
  std::cout << "left at " << now_s() << std::endl;
  std::exit(code);
}

}  // namespace tessera::testing

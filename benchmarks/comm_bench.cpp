// Time of collectives over shared memory and over Gloo (peer), alternating in one run. Ranks are processes of this
// machine. A size is the input bytes of a rank. A time is from the first rank's call to the last rank's completion.
// Plain is a memcpy of the larger of input and output on all ranks at once, a lower bound.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/bench_timer.h"
#include "benchmarks/harness/process_ranks.h"
#include "tessera/base/error.h"
#include "tessera/comm/backends.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cmath>
#include <cstring>
#include <iomanip>
#include <sstream>

namespace tessera::bench {
namespace comm_bench {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

struct Buffers {
  at::Tensor in, out;
};

// One collective.
struct CollectiveCase {
  const char* name;
  int64_t (*out_numel)(int64_t in_numel, int64_t ranks);  // 0: in place
  double (*result_of_ones)(int64_t ranks);                // the output if all inputs are 1
  void (*call)(c10d::Backend& over, Buffers& b);
};
int64_t in_place(int64_t, int64_t) { return 0; }
double unchanged(int64_t) { return 1; }
double summed(int64_t ranks) { return static_cast<double>(ranks); }

constexpr CollectiveCase kOps[] = {
    {"all_reduce", in_place, summed,
     [](c10d::Backend& over, Buffers& b) {
       std::vector<at::Tensor> xs{b.in};
       over.allreduce(xs)->wait();
     }},
    {"all_gather", [](int64_t in, int64_t ranks) { return in * ranks; }, unchanged,
     [](c10d::Backend& over, Buffers& b) { over._allgather_base(b.out, b.in)->wait(); }},
    {"reduce_scatter", [](int64_t in, int64_t ranks) { return in / ranks; }, summed,
     [](c10d::Backend& over, Buffers& b) { over._reduce_scatter_base(b.out, b.in)->wait(); }},
    {"all_to_all", [](int64_t in, int64_t) { return in; }, unchanged,
     [](c10d::Backend& over, Buffers& b) {
       std::vector<int64_t> even;
       over.alltoall_base(b.out, b.in, even, even)->wait();
     }},
    {"broadcast", in_place, unchanged,
     [](c10d::Backend& over, Buffers& b) {
       std::vector<at::Tensor> xs{b.in};
       over.broadcast(xs)->wait();
     }},
};

struct SizeCase {
  const char* name;
  int64_t bytes;
  int repetitions;
};
constexpr SizeCase kSizes[] = {
    {"16B", 16, 9}, {"4KiB", 4 << 10, 9}, {"512KiB", 512 << 10, 9}, {"16MiB", 16 << 20, 7}, {"256MiB", 256 << 20, 3}};

// Times one repetition on all ranks: microseconds per call, from the first rank's start to the last rank's end.
class Stopwatch {
 public:
  explicit Stopwatch(BackendPtr over) : over_(std::move(over)) {}

  template <class Call>
  double time_us(int64_t calls, Call&& call) {
    over_->barrier()->wait();
    const double start = now_us(TimerClock::Wall);
    for (int64_t i = 0; i < calls; i++) call();
    return (max_over_ranks(now_us(TimerClock::Wall)) + max_over_ranks(-start)) / static_cast<double>(calls);
  }
  double max_over_ranks(double x) {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    std::vector<at::Tensor> xs{at::full({1}, x, at::kDouble)};
    over_->allreduce(xs, options)->wait();
    return xs[0].item<double>();
  }

 private:
  BackendPtr over_;
};

double median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

Buffers buffers_of(const CollectiveCase& op, int64_t bytes, int64_t ranks, double value) {
  const int64_t numel = bytes / 4, out = op.out_numel(numel, ranks);
  return {at::full({numel}, value), out > 0 ? at::full({out}, -1.0) : at::Tensor()};
}

void check_answer(const CollectiveCase& op, c10d::Backend& over, int64_t bytes, int64_t ranks) {
  Buffers b = buffers_of(op, bytes, ranks, 1.0);
  op.call(over, b);
  const at::Tensor& result = b.out.defined() ? b.out : b.in;
  const auto wrong = result.ne(op.result_of_ones(ranks)).sum().item<int64_t>();
  TESSERA_CHECK(wrong == 0, CommError, op.name, " of ", bytes, " bytes over ", over.getBackendName(), ": ", wrong,
                " elements are wrong");
}

// ours, peer, plain
std::array<double, 3> measure(const CollectiveCase& op, const SizeCase& size, int64_t ranks, const BackendPtr& shm,
                              const BackendPtr& gloo) {
  for (const auto& over : {shm, gloo}) check_answer(op, *over, size.bytes, ranks);
  Buffers b = buffers_of(op, size.bytes, ranks, 0.0);
  const at::Tensor& larger = b.out.defined() && b.out.numel() > b.in.numel() ? b.out : b.in;
  const at::Tensor copy = at::zeros_like(larger);
  const std::array<std::function<void()>, 3> calls = {
      [&] { op.call(*shm, b); }, [&] { op.call(*gloo, b); },
      [&] { std::memcpy(copy.data_ptr(), larger.data_ptr(), larger.nbytes()); }};
  Stopwatch watch(shm);
  std::array<int64_t, 3> times;  // calls per repetition: about 20 ms, so that the barrier does not dominate
  for (size_t i = 0; i < 3; i++)
    times[i] = std::clamp<int64_t>(static_cast<int64_t>(20'000 / watch.time_us(1, calls[i])), 1, 2000);
  std::array<std::vector<double>, 3> samples;
  for (int repetition = 0; repetition < size.repetitions; repetition++)
    for (size_t i = 0; i < 3; i++) samples[i].push_back(watch.time_us(times[i], calls[i]));
  return {median(samples[0]), median(samples[1]), median(samples[2])};
}

void run_rank(testing::Rank& me, const SizeCase& size, const EmitRow& emit) {
  const auto connect = [&](const std::string& backend) {
    comm::ConnectOptions options;
    options.store = c10::make_intrusive<c10d::PrefixStore>(backend, me.world.store());
    options.rank = static_cast<int>(me.rank);
    options.size = static_cast<int>(me.size());
    options.group = backend;
    options.ranks = me.group()->ranks();
    options.timeout = std::chrono::minutes(5);
    return comm::connect(backend, options);
  };
  const BackendPtr shm = me.group()->backend(), gloo = connect("gloo");
  for (const CollectiveCase& op : kOps) {
    const auto [ours, peer, plain] = measure(op, size, me.size(), shm, gloo);
    if (me.rank != 0) continue;
    std::ostringstream note;
    note << std::setprecision(2) << std::fixed << peer / ours << "x";
    if (size.bytes >= 16 << 20) note << ", " << std::setprecision(0) << 100 * plain / ours << "% of memcpy";
    emit({.name = c10::str(op.name, "/", me.size(), "/", size.name, "/shm"),
          .unit = "us",
          .ours = ours,
          .plain = plain,
          .peer = peer,
          .note = note.str()});
  }
}

}  // namespace
}  // namespace comm_bench

void register_comm(BenchRegistry& registry) {
  registry.add({"comm", "collectives over shared memory and over Gloo", [](const EmitRow& emit) {
                  for (int64_t ranks : {2, 4})
                    for (const auto& size : comm_bench::kSizes)
                      run_process_ranks("comm", ranks, emit, [&](testing::Rank& me, const EmitRow& rows) {
                        comm_bench::run_rank(me, size, rows);
                      });
                }});
}

}  // namespace tessera::bench

#include "tessera/cli/selftest.h"

#include "tessera/base/error.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <iomanip>
#include <ostream>
#include <sstream>
#include <thread>

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

// The world of one run, and what every check needs.
struct SelftestRun {
  World world;
  at::Device device;
  SelftestFaults faults;
  std::vector<std::string> hosts;  // by rank

  int64_t rank() const { return world.rank(); }
  int64_t size() const { return world.size(); }
  std::string name_of(int64_t rank) const { return c10::str("rank ", rank, " on ", hosts[static_cast<size_t>(rank)]); }

  // The values that a rank contributes: 1000 rank + index.
  at::Tensor pattern(int64_t of_rank, int64_t count = 64) const {
    return at::arange(count, c10::TensorOptions(device).dtype(at::kFloat)) + 1000.0 * static_cast<double>(of_rank);
  }
  at::Tensor contribution(int64_t count = 64) const {
    auto mine = pattern(rank(), count);
    if (faults.wrong_rank == rank()) mine[std::min<int64_t>(3, count - 1)] += 1;
    return mine;
  }
};

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The texts of all ranks, on all ranks. Requires: one line each.
std::vector<std::string> gather_lines(const World& world, const std::string& mine) {
  return split_lines(comm::gather_decide_broadcast(
      world.group(), "tessera selftest", [&] { return mine; },
      [](const std::vector<std::string>& all) {
        std::string joined;
        for (const auto& one : all) joined += one + "\n";
        return joined;
      }));
}

std::string join(const std::vector<std::string>& texts, const char* separator) {
  std::string all;
  for (const auto& text : texts) all += (all.empty() ? "" : separator) + text;
  return all;
}

// ---- values: who sends, or receives, wrong ones

// Each rank compares what it got from each other rank. The matrix of all ranks tells a wrong sender, whose values are
// wrong for most ranks, from a wrong receiver, for whom the values of most ranks are wrong.
std::string check_contributions(const SelftestRun& run) {
  const auto count = run.pattern(0).numel();
  auto all = at::zeros({run.size() * count}, c10::TensorOptions(run.device));
  all_gather_into_tensor(all, run.contribution());
  auto wrong = at::zeros({run.size(), run.size()}, c10::TensorOptions(run.device));  // (receiver, sender)
  for (int64_t from = 0; from < run.size(); from++)
    if (!all.narrow(0, from * count, count).equal(run.pattern(from))) wrong[run.rank()][from] = 1;
  all_reduce(wrong);
  const auto matrix = wrong.cpu();
  std::vector<std::string> errors;
  for (int64_t r = 0; r < run.size(); r++) {
    const auto as_sender = matrix.select(1, r).sum().item<int64_t>(), as_receiver = matrix[r].sum().item<int64_t>();
    if (2 * as_sender > run.size())
      errors.push_back(c10::str(run.name_of(r), " sends wrong values: ", as_sender, " of ", run.size(),
                                " ranks got other values than it should have sent"));
    else if (2 * as_receiver > run.size())
      errors.push_back(
          c10::str(run.name_of(r), " receives wrong values from ", as_receiver, " of ", run.size(), " ranks"));
  }
  if (errors.empty() && matrix.sum().item<double>() > 0)
    for (int64_t to = 0; to < run.size(); to++)
      for (int64_t from = 0; from < run.size(); from++)
        if (matrix[to][from].item<double>() > 0)
          errors.push_back(c10::str("values from ", run.name_of(from), " to ", run.name_of(to), " are wrong"));
  return join(errors, "; ");
}

// ---- collectives

struct CollectiveCheck {
  const char* name;
  // Returns what this rank got and what it should have got.
  std::function<std::pair<at::Tensor, at::Tensor>(const SelftestRun&)> run;
};

at::Tensor sum_of_patterns(const SelftestRun& run) {
  auto sum = at::zeros_like(run.pattern(0));
  for (int64_t r = 0; r < run.size(); r++) sum += run.pattern(r);
  return sum;
}
Tensors all_patterns(const SelftestRun& run) {
  Tensors all;
  for (int64_t r = 0; r < run.size(); r++) all.push_back(run.pattern(r));
  return all;
}
Tensors empty_like_each(const Tensors& tensors) {
  Tensors all;
  for (const auto& t : tensors) all.push_back(at::zeros_like(t));
  return all;
}

const std::vector<CollectiveCheck>& collective_checks() {
  using Run = SelftestRun;
  static const std::vector<CollectiveCheck> all = {
      {"all_reduce sum",
       [](const Run& run) {
         auto x = run.contribution();
         all_reduce(x);
         return std::pair(x, sum_of_patterns(run));
       }},
      {"all_reduce avg",
       [](const Run& run) {
         auto x = run.contribution();
         all_reduce(x, ReduceOp::Avg);
         return std::pair(x, at::Tensor(sum_of_patterns(run) / run.size()));
       }},
      {"all_reduce max",
       [](const Run& run) {
         auto x = run.contribution();
         all_reduce(x, ReduceOp::Max);
         return std::pair(x, run.pattern(run.size() - 1));
       }},
      {"all_gather",
       [](const Run& run) {
         auto outs = empty_like_each(all_patterns(run));
         all_gather(outs, run.contribution());
         return std::pair(at::cat(outs), at::cat(all_patterns(run)));
       }},
      {"reduce_scatter",
       [](const Run& run) {
         auto in = at::cat(Tensors(static_cast<size_t>(run.size()), run.contribution()));
         auto out = at::zeros_like(run.pattern(0));
         reduce_scatter_tensor(out, in);
         return std::pair(out, sum_of_patterns(run));
       }},
      {"broadcast",
       [](const Run& run) {
         auto x = run.contribution();
         broadcast(x, run.size() - 1);
         return std::pair(x, run.pattern(run.size() - 1));
       }},
      {"scatter",
       [](const Run& run) {
         auto out = at::zeros_like(run.pattern(0));
         scatter(out, run.rank() == 0 ? all_patterns(run) : Tensors{}, 0);
         return std::pair(out, run.pattern(run.rank()));
       }},
      {"gather",
       [](const Run& run) {
         auto outs = run.rank() == 0 ? empty_like_each(all_patterns(run)) : Tensors{};
         gather(outs, run.contribution(), 0);
         return run.rank() == 0 ? std::pair(at::cat(outs), at::cat(all_patterns(run)))
                                : std::pair(run.pattern(0), run.pattern(0));
       }},
      {"reduce",
       [](const Run& run) {
         auto x = run.contribution();
         reduce(x, 0);
         return run.rank() == 0 ? std::pair(x, sum_of_patterns(run)) : std::pair(run.pattern(0), run.pattern(0));
       }},
      {"all_to_all",
       [](const Run& run) {
         auto in = run.contribution(run.size()), out = at::zeros_like(in), expected = at::zeros_like(in);
         all_to_all_single(out, in);
         for (int64_t r = 0; r < run.size(); r++) expected[r] = run.pattern(r, run.size())[run.rank()];
         return std::pair(out, expected);
       }},
      {"send and recv around a ring",
       [](const Run& run) {
         auto in = at::zeros_like(run.pattern(0));
         const auto out = run.contribution();
         const int64_t before = (run.rank() + run.size() - 1) % run.size();
         if (run.size() == 1) return std::pair(out, run.pattern(0));
         auto sent = isend(out, (run.rank() + 1) % run.size()), received = irecv(in, before);
         sent.wait();
         received.wait();
         return std::pair(in, run.pattern(before));
       }},
      {"barrier",
       [](const Run& run) {
         barrier();
         return std::pair(run.pattern(0), run.pattern(0));
       }},
  };
  return all;
}

std::string check_collective(const CollectiveCheck& check, const SelftestRun& run) {
  const auto [found, expected] = check.run(run);
  if (found.allclose(expected, 1e-5, 1e-5)) return "";
  const auto at = (found - expected).abs().argmax().item<int64_t>();
  return c10::str("element ", at, " is ", found[at].item<double>(), ", expected ", expected[at].item<double>());
}

// ---- links

// The pairs that are measured: all of them, or with many ranks those at distance 1, 2, 4, ...
std::vector<std::pair<int64_t, int64_t>> pairs_to_measure(int64_t ranks) {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  for (int64_t a = 0; a < ranks; a++)
    for (int64_t b = a + 1; b < ranks; b++) {
      const int64_t distance = b - a;
      if (ranks <= 16 || (distance & (distance - 1)) == 0) pairs.emplace_back(a, b);
    }
  return pairs;
}

// The shortest of several round trips of 1 MiB, in ms; at rank a. One pair at a time.
double measure_link(const SelftestRun& run, int64_t a, int64_t b) {
  auto data = at::zeros({1 << 18}, c10::TensorOptions(run.device));
  const bool slow = run.faults.slow_from == a && run.faults.slow_to == b;
  double best = 0;
  for (int repeat = 0; repeat < 7; repeat++) {
    const auto start = Clock::now();
    if (run.rank() == a) {
      send(data, b);
      recv(data, b);
      data[0].item<float>();                                                 // waits for a device
      if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the planted fault
      best = repeat == 0 ? ms_since(start) : std::min(best, ms_since(start));
    } else if (run.rank() == b) {
      recv(data, a);
      send(data, a);
    }
  }
  return best;
}

std::string check_links(const SelftestRun& run) {
  const auto pairs = pairs_to_measure(run.size());
  auto times = at::zeros({static_cast<int64_t>(pairs.size())}, c10::TensorOptions(run.device).dtype(at::kFloat));
  for (size_t i = 0; i < pairs.size(); i++) {
    barrier();
    times[static_cast<int64_t>(i)] = measure_link(run, pairs[i].first, pairs[i].second);
  }
  if (pairs.empty()) return "";
  all_reduce(times);
  times = times.cpu();
  const auto ms = [&](size_t i) { return times[static_cast<int64_t>(i)].item<double>(); };
  const auto crosses_hosts = [&](size_t i) {
    return run.hosts[static_cast<size_t>(pairs[i].first)] != run.hosts[static_cast<size_t>(pairs[i].second)];
  };
  std::vector<std::string> errors;
  for (const bool across : {false, true}) {  // links between hosts are compared with each other
    std::vector<double> sorted;
    for (size_t i = 0; i < pairs.size(); i++)
      if (crosses_hosts(i) == across) sorted.push_back(ms(i));
    if (sorted.size() < 3) continue;
    std::sort(sorted.begin(), sorted.end());
    const double median = sorted[sorted.size() / 2];
    for (size_t i = 0; i < pairs.size(); i++)
      if (crosses_hosts(i) == across && ms(i) > 5 * median + 5)
        errors.push_back(c10::str("the link between ", run.name_of(pairs[i].first), " and ",
                                  run.name_of(pairs[i].second), " is slow: ", ms(i),
                                  " ms for 1 MiB there and back; the median is ", median, " ms"));
  }
  return join(errors, "; ");
}

// ---- parallelisms

nn::Sequential make_selftest_net(at::Device device) {
  nn::Sequential net(nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 4));
  const at::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.copy_(at::sin(at::arange(p.numel()) * 1.3 + p.numel()).view_as(p) * 0.3);
  net->to(device);
  return net;
}

using NetLoss = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& y)>;
// Three steps of SGD. Returns the mean loss over all ranks of each step.
std::vector<double> train_selftest_net(const SelftestRun& run, const Tensors& parameters, const NetLoss& loss,
                                       bool full_batch) {
  optim::SGD optimizer(parameters, {.lr = 0.1, .momentum = 0.9});
  std::vector<double> losses;
  const int64_t rows = 2 * run.size();
  for (int step = 0; step < 3; step++) {
    auto x = at::sin(at::arange(rows * 8).view({rows, 8}) * (0.2 + step)).to(run.device);
    if (!full_batch) x = x.narrow(0, 2 * run.rank(), 2).contiguous();
    optimizer.zero_grad();
    losses.push_back(mean_over_ranks(loss(x, x.narrow(1, 0, 4).cos()).item<double>()));
    optimizer.step();
  }
  return losses;
}
template <class Model>
NetLoss loss_of(Model& model) {
  return [&model](const at::Tensor& x, const at::Tensor& y) {
    auto loss = at::mse_loss(model(x), y);
    loss.backward();
    return loss.detach();
  };
}

struct ParallelCheck {
  const char* name;
  std::function<std::vector<double>(const SelftestRun&, nn::Sequential& net, const DeviceMesh& mesh)> run;
};
const std::vector<ParallelCheck>& parallel_checks() {
  static const std::vector<ParallelCheck> all = {
      {"DistributedDataParallel",
       [](const SelftestRun& run, nn::Sequential& net, const DeviceMesh&) {
         DistributedDataParallel ddp(net);
         return train_selftest_net(run, ddp->parameters(), loss_of(ddp), false);
       }},
      {"fully_shard",
       [](const SelftestRun& run, nn::Sequential& net, const DeviceMesh& mesh) {
         fully_shard(net, {.mesh = mesh});
         return train_selftest_net(run, net->parameters(), loss_of(net), false);
       }},
      {"tensor parallelism",
       [](const SelftestRun& run, nn::Sequential& net, const DeviceMesh& mesh) {
         parallelize_module(net, mesh, {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
         return train_selftest_net(run, net->parameters(), loss_of(net), true);
       }},
      {"compiled step with DistributedDataParallel",
       [](const SelftestRun& run, nn::Sequential& net, const DeviceMesh&) {
         DistributedDataParallel ddp(net);
         auto step = compile([&](const at::Tensor& x, const at::Tensor& y) { return loss_of(ddp)(x, y); });
         return train_selftest_net(
             run, ddp->parameters(), [&](const auto& x, const auto& y) { return step(x, y); }, false);
       }},
  };
  return all;
}

std::string check_parallelism(const ParallelCheck& check, const SelftestRun& run) {
  auto plain = make_selftest_net(run.device), net = make_selftest_net(run.device);
  const auto expected = train_selftest_net(run, plain->parameters(), loss_of(plain), true);
  const auto mesh = init_device_mesh(c10::DeviceTypeName(run.device.type(), true), {run.size()}, {"all"});
  const auto found = check.run(run, net, mesh);
  for (size_t i = 0; i < expected.size(); i++)
    if (!(std::abs(found[i] - expected[i]) <= 1e-4 * (1 + expected[i])))
      return c10::str("the loss of step ", i, " is ", found[i], "; without parallelism it is ", expected[i]);
  return "";
}

// Runs one check on all ranks. An error of any rank is part of the result, on all ranks.
SelftestResult run_check(const SelftestRun& run, const std::string& name, const std::function<std::string()>& check) {
  const auto start = Clock::now();
  std::string error;
  try {
    error = check();
  } catch (const c10::Error& thrown) {
    error = thrown.what_without_backtrace();
  }
  std::replace(error.begin(), error.end(), '\n', ' ');
  const double ms = ms_since(start);
  const auto lines = gather_lines(run.world, c10::str(ms, " ", error));
  SelftestResult result{name, "", 0};
  std::vector<std::pair<std::string, std::vector<int64_t>>> errors;  // with the ranks that have it
  for (size_t r = 0; r < lines.size(); r++) {
    const auto space = lines[r].find(' ');
    result.ms = std::max(result.ms, std::stod(lines[r].substr(0, space)));
    const auto text = lines[r].substr(space + 1);
    if (text.empty()) continue;
    auto same = std::find_if(errors.begin(), errors.end(), [&](const auto& one) { return one.first == text; });
    if (same == errors.end()) same = errors.insert(errors.end(), {text, {}});
    same->second.push_back(static_cast<int64_t>(r));
  }
  for (const auto& [text, ranks] : errors) {
    result.error += result.error.empty() ? "" : "; ";
    if (static_cast<int64_t>(ranks.size()) < run.size())
      result.error += c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::IntArrayRef(ranks), ": ");
    result.error += text;
  }
  return result;
}

}  // namespace

SelftestFaults parse_selftest_fault(const std::string& text) {
  SelftestFaults faults;
  const auto read = [&](std::string_view part, int64_t& number) {
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
    return error == std::errc() && end == part.data() + part.size() && number >= 0;
  };
  const auto read_one = [&](std::string_view fault) {
    const auto dash = fault.find('-');
    if (fault.starts_with("wrong:")) return read(fault.substr(6), faults.wrong_rank);
    if (!fault.starts_with("slow:") || dash == std::string::npos) return false;
    return read(fault.substr(5, dash - 5), faults.slow_from) && read(fault.substr(dash + 1), faults.slow_to) &&
           faults.slow_from < faults.slow_to;
  };
  std::string_view left = text;
  while (!left.empty()) {
    const auto comma = std::min(left.find(','), left.size());
    TESSERA_CHECK(read_one(left.substr(0, comma)), UsageError, "--plant '", text,
                  "': write wrong:RANK, slow:RANK-RANK with the lower rank first, or both with a comma between them");
    left.remove_prefix(std::min(comma + 1, left.size()));
  }
  return faults;
}

std::vector<SelftestResult> run_selftest(const World& world, at::Device device, const SelftestFaults& faults) {
  SelftestRun run{world, device, faults, {}};
  run.hosts = gather_lines(world, host_name());
  std::vector<SelftestResult> results;
  results.push_back(run_check(run, "values of each rank", [&] { return check_contributions(run); }));
  for (const auto& check : collective_checks())
    results.push_back(run_check(run, check.name, [&] { return check_collective(check, run); }));
  results.push_back(run_check(run, "links between ranks", [&] { return check_links(run); }));
  for (const auto& check : parallel_checks())
    results.push_back(run_check(run, check.name, [&] { return check_parallelism(check, run); }));
  return results;
}

bool print_selftest(std::ostream& out, const std::string& title, const std::vector<SelftestResult>& results) {
  out << title << '\n';
  bool passed = true;
  for (const auto& result : results) {
    passed = passed && result.error.empty();
    out << "  " << std::left << std::setw(44) << result.name << (result.error.empty() ? "passed" : "FAILED")
        << std::right << std::setw(10) << std::fixed << std::setprecision(1) << result.ms << " ms"
        << (result.error.empty() ? "" : "\n      ") << result.error << '\n';
  }
  return passed;
}

}  // namespace tessera::cli

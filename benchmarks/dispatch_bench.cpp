// Dispatch overhead of ops on DTensors, with a hit and with a miss of the decision cache, and the time to register all
// rules. Plain is the same op on a plain tensor with the local sizes. 8 x 8, no_grad, one thread per rank. With four
// ranks as threads on a 2 x 2 mesh, thread CPU time counts, because there are more ranks than cores.
//
// gpt2_step is a train step of GPT-2 with 12 tiny layers (gpt2_step.h) on a mesh of one rank, beside the plain step. It
// is nearly all time of the host, as a step with a small batch is on a GPU.
#include "benchmarks/dispatch_misses.h"
#include "benchmarks/gpt2_step.h"
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/bench_timer.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/propagate/detail/decision.h"
#include "tessera/rules/detail/rule.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>

#include <functional>
#include <vector>

namespace tessera::bench {
namespace dispatch_bench {
namespace {

constexpr int kList = 200;

struct Case {
  const char* name;
  std::string size;
  std::function<void()> ours, plain;  // plain may be empty
  bool communicates = false;
};

std::vector<at::Tensor> copies(int n, const std::function<at::Tensor()>& make) {
  std::vector<at::Tensor> all;
  for (int i = 0; i < n; i++) all.push_back(make());
  return all;
}

// The closures own the inputs.
std::vector<Case> cases(const DeviceMesh& mesh) {
  const Placements rows = [&] {
    Placements p(mesh.ndim(), Replicate());
    p[0] = Shard(0);
    return p;
  }();
  const auto value = at::rand({8, 8});
  const at::Tensor d = distribute_tensor(value, mesh, rows), replicated = distribute_tensor(value, mesh);
  const auto local = DTensor(d).to_local().clone();
  const auto square = at::rand({8, 8});
  const at::Tensor zeros_d = zeros({8, 8}, mesh, rows);
  const auto zeros_p = at::zeros_like(local);
  const auto many_d = copies(kList, [&]() -> at::Tensor { return zeros({8, 8}, mesh, rows); });
  const auto many = copies(kList, [&] { return at::zeros_like(local); });
  const auto list = std::to_string(kList);
  const int64_t n = local.size(0);
  return {
      {"add", "-", [=] { at::add(d, d); }, [=] { at::add(local, local); }},
      {"mm", "-", [=] { at::mm(d, replicated); }, [=] { at::mm(local, square); }},
      {"t", "-", [=] { d.t(); }, [=] { local.t(); }},
      {"detach", "-", [=] { d.detach(); }, [=] { local.detach(); }},
      {"view", "-",
       [=] {
         d.view({8, 2, 4});
       },
       [=] {
         local.view({n, 2, 4});
       }},
      {"cat", "-",
       [=] {
         at::cat({d, d}, 1);
       },
       [=] {
         at::cat({local, local}, 1);
       }},
      {"add_", "-", [=] { zeros_d.add_(zeros_d); }, [=] { zeros_p.add_(zeros_p); }},
      {"native_dropout", "-", [=] { at::native_dropout(d, 0.5, true); }, [=] { at::native_dropout(local, 0.5, true); }},
      {"_foreach_add_", list, [=] { at::_foreach_add_(many_d, many_d); }, [=] { at::_foreach_add_(many, many); }},
      {"_foreach_add", list, [=] { at::_foreach_add(many_d, many_d); }, [=] { at::_foreach_add(many, many); }},
      {"redistribute_R_S", "-", [=] { DTensor(replicated).redistribute(rows); }, {}, true},
      {"redistribute_S_R",
       "-",
       [=] { DTensor(d).redistribute(Placements(mesh.ndim(), Replicate())).to_local(); },
       {},
       true},
  };
}

void run(int ranks, std::vector<int64_t> shape, std::vector<std::string> names, const EmitRow& emit) {
  testing::run_ranks(ranks, [&](testing::Rank& me) {
    at::NoGradGuard no_grad;
    const auto mesh = init_device_mesh("cpu", shape, names);
    auto& cache = propagate::decision_cache(*mesh.state());
    const bool one_rank = ranks == 1;
    const TimerOptions options{.clock = one_rank ? TimerClock::Wall : TimerClock::ThreadCpu};
    for (const auto& c : cases(mesh)) {
      const auto name = [&](const char* variant) {
        return std::string(c.name) + "/" + std::to_string(ranks) + "/" + c.size + "/" + variant;
      };
      if (c.communicates) {
        auto all = options;
        if (!one_rank) all.iterations = 300;
        const auto hit = time_us(all, c.ours);
        if (me.rank == 0) emit({.name = name("hit"), .unit = "us", .ours = hit.median_us});
      } else if (me.rank == 0) {
        const auto [ours, plain] = time_alternating(options, c.ours, c.plain);
        emit({.name = name("hit"), .unit = "us", .ours = ours.median_us, .plain = plain.median_us});
        auto miss_options = options;
        miss_options.iterations = 200;
        const auto [miss, clear] = time_alternating(
            miss_options, [&] { cache.clear(), c.ours(); }, [&] { cache.clear(); });
        emit({.name = name("miss"), .unit = "us", .ours = miss.median_us - clear.median_us, .plain = plain.median_us});
      }
      me.world.group()->barrier().wait();
    }
    if (!one_rank) time_misses(mesh, emit);
  });
}

void time_gpt2_steps(const EmitRow& emit) {
  const Gpt2Case of{.config = {.vocab_size = 64, .max_seq_len = 16, .n_layer = 12, .n_head = 2, .n_embd = 16},
                    .batch = 1,
                    .length = 8};
  testing::run_ranks(1, [&](testing::Rank& me) {
    const auto mesh = me.mesh("one=1");
    const auto plain = gpt2_step(of, "plain", false, mesh);
    for (const char* how : {"fsdp", "ddp", "tp"}) {
      const auto [ours, alone] = time_alternating({.iterations = 20}, gpt2_step(of, how, false, mesh), plain);
      emit({.name = c10::str("gpt2_step/1/-/", how),
            .unit = "ms",
            .ours = ours.median_us / 1000,
            .plain = alone.median_us / 1000});
    }
  });
}

// The registration of all rules, which a process does once at its first op on a DTensor.
void time_registration(const EmitRow& emit) {
  const auto time = time_us({.iterations = 20}, [] {
    rules::Registry registry;
    rules::register_all(registry);
  });
  emit({.name = "register_all_rules/1/-/ms", .unit = "ms", .ours = time.median_us / 1000});
}

}  // namespace
}  // namespace dispatch_bench

void register_dispatch(BenchRegistry& registry) {
  registry.add({"dispatch", "dispatch overhead of ops on DTensors", [](const EmitRow& emit) {
                  dispatch_bench::time_registration(emit);
                  dispatch_bench::time_gpt2_steps(emit);
                  dispatch_bench::run(1, {1}, {"tp"}, emit);
                  dispatch_bench::run(4, {2, 2}, {"dp", "tp"}, emit);
                }});
}

}  // namespace tessera::bench

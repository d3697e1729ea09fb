#include "tessera/testing/ranks.h"

#include "tessera/base/detail/hash.h"
#include "tessera/base/error.h"
#include "tessera/testing/detail/rank_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <mutex>
#include <optional>
#include <thread>

namespace tessera::testing {
namespace {

// View replay: autograd must replay view ops on DTensors. One torch thread: each rank uses one core.
// The lock: after a fork, the first set_num_threads() replaces LibTorch's thread pool, without a lock of its own.
void set_up_thread() {
  static std::mutex mutex;
  {
    const std::lock_guard lock(mutex);
    at::set_num_threads(1);
  }
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
}

// Depends on the seed of the caller's generator, and differs between the runs of a process.
uint64_t seed_of_run() {
  static std::atomic<uint64_t> runs = 0;
  return hash_combine(at::detail::getDefaultCPUGenerator().current_seed(), runs++);
}

std::string describe_failure(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace

DeviceMesh Rank::mesh(const std::string& text) const {
  MeshShape parsed = parse_mesh_shape(text);
  return init_device_mesh(world, "cpu", parsed.shape, parsed.names);
}
DeviceMesh Rank::mesh(std::vector<int64_t> shape, std::vector<std::string> names) const {
  return init_device_mesh(world, "cpu", std::move(shape), std::move(names));
}

void run_ranks(int64_t n, const Body& body, const RankOptions& options) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> failures(static_cast<size_t>(n));
  std::mutex mutex;
  int64_t first = -1;  // the first rank to fail; the others may fail as a consequence
  const auto run = [&, seed = seed_of_run()](int64_t rank) {
    set_up_thread();
    std::optional<RankGeneratorScope> generator;
    if (n > 1) generator.emplace(hash_combine(seed, static_cast<uint64_t>(rank)));
    Rank me{rank, {}};
    try {
      InitOptions init_options;
      init_options.backend = options.backend;
      init_options.rank = rank;
      init_options.world_size = n;
      init_options.store = store;
      init_options.timeout = options.timeout;
      me.world = init(init_options);
      body(me);
    } catch (...) {
      auto failure = std::current_exception();
      {
        std::lock_guard lock(mutex);
        failures[static_cast<size_t>(rank)] = failure;
        if (first < 0) first = rank;
      }
      if (me.world) me.world.abort(c10::str("rank ", rank, " failed: ", describe_failure(failure)));
    }
    destroy();
  };
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < n; rank++) threads.emplace_back(run, rank);
  for (auto& thread : threads) thread.join();
  if (first < 0) return;
  std::string report;
  int64_t failed = 0;
  for (int64_t rank = 0; rank < n; rank++) {
    const auto& failure = failures[static_cast<size_t>(rank)];
    if (!failure) continue;
    failed++;
    report += c10::str("\nrank ", rank, rank == first ? " (the first to fail): " : ": ", describe_failure(failure));
  }
  throw std::runtime_error(c10::str(failed, " of ", n, " ranks failed:", report));
}

}  // namespace tessera::testing

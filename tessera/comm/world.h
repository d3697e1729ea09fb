#pragma once
#include "tessera/comm/communicator.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

// Options of init(), as in torch.distributed.init_process_group.
struct InitOptions {
  std::string backend = "";            // a name in comm/backends.h, or "auto"; empty: TESSERA_BACKEND, else "auto"
  int64_t rank = -1;                   // -1: from the launcher's environment, else 0
  int64_t world_size = -1;             // -1: from the launcher's environment, else 1
  std::string init_method = "env://";  // "env://", "file:///path", "tcp://host:port"
  c10::intrusive_ptr<c10d::Store> store = {};  // if given, used instead of init_method
  std::chrono::milliseconds timeout{0};        // of each collective; 0: TESSERA_TIMEOUT_S, else ten minutes
};

// The counter-based state of ts::random for one rank. Every random op uses (seed, offset) and increments offset.
struct RandomState {
  uint64_t seed = 0;    // set by ts::manual_seed
  uint64_t offset = 0;  // number of random ops so far
};

// All ranks of the job, as seen from one rank (PyTorch: the default process group). Copies share the state.
// The current World belongs to the thread, so ranks can be threads of one process. Code that needs the rank takes a
// World, a mesh or a group.
//
// Example:
//   ts::World world = ts::init();
//   ts::comm::Group evens = world.new_group({0, 2});   // called by ranks 0 and 2
//   ts::destroy();
class World {
 public:
  World() = default;                                            // no world
  explicit operator bool() const { return state_ != nullptr; }  // false: no world

  int64_t rank() const;                                  // 0..size-1
  int64_t size() const;                                  // number of ranks
  const comm::Group& group() const;                      // the group of all ranks
  const std::string& backend() const;                    // of the group of all ranks: "shm", "gloo", ...
  const c10::intrusive_ptr<c10d::Store>& store() const;  // shared by all ranks
  RandomState& random() const;                           // of this rank

  // Creates a group. Only the members call it, each with the same list. Each call creates a new group.
  comm::Group new_group(const std::vector<int64_t>& ranks, const std::string& name = "") const;

  // The group of these ranks that meshes share: created by the first call, then reused. Only the members may call it.
  comm::Group shared_group(const std::vector<int64_t>& ranks) const;
  // Fails all operations, in every group of this rank, on all ranks, with a CommError that names this rank and contains
  // `reason`.
  void abort(const std::string& reason) const;

  // The World of this thread, set by init() or by World::Scope. Throws UsageError if the thread has none.
  static World current();
  static bool has_current();  // whether this thread has a World
  struct State;               // comm/detail/world_state.h
  State& state() const { return *state_; }

  // RAII: makes `world` the current World of this thread.
  class Scope {
   public:
    explicit Scope(World world);  // no communication
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    std::shared_ptr<State> before_;
  };

 private:
  friend World init(InitOptions);
  friend void destroy();
  explicit World(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

// Joins the world and makes it current for this thread. Communicates: all ranks must call it. Without a launcher's
// environment variables the world has one rank.
World init(InitOptions options = {});
// Leaves the current world: clears the cache of meshes and closes all groups. Tensors can still be freed afterwards.
void destroy();

int64_t get_rank(const comm::Group& group = {});        // in the group; no group: in the current world
int64_t get_world_size(const comm::Group& group = {});  // of the group; no group: of the current world

}  // namespace tessera

#pragma once
#include "tessera/comm/communicator.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

struct InitOptions {
  std::string backend = "";            // a row of comm/backends.cpp, a name given to register_backend, or "auto";
                                       // empty: from TESSERA_BACKEND, else "auto"
  int64_t rank = -1;                   // -1: from the environment, else 0
  int64_t world_size = -1;             // -1: from the environment, else 1
  std::string init_method = "env://";  // "env://", "file:///path", "tcp://host:port"
  c10::intrusive_ptr<c10d::Store> store = {};  // given: used instead of init_method
  std::chrono::milliseconds timeout{0};        // of each collective; 0: from TESSERA_TIMEOUT_S, else ten minutes
};

// Counter state of ts::random for one rank: every random op takes (seed, offset) and moves offset on by one.
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// All ranks of the job, seen from one of them. A handle; copies share. Nothing else knows "my rank": what needs one is
// given a World, a mesh or a group, so that ranks can be threads of one process.
class World {
 public:
  World() = default;
  explicit operator bool() const { return state_ != nullptr; }

  int64_t rank() const;
  int64_t size() const;
  const comm::Group& group() const;  // every rank
  const std::string& backend() const;
  const c10::intrusive_ptr<c10d::Store>& store() const;
  RandomState& random() const;

  // Only the members need call it, each with the same list; the same list asked for again gives a new group.
  comm::Group new_group(const std::vector<int64_t>& ranks, const std::string& name = "") const;

  // The group of these ranks that meshes share: made once, then the same. Only the members may ask.
  comm::Group shared_group(const std::vector<int64_t>& ranks) const;
  // Frees every rank that waits for this one, in any group, with a CommError that carries `reason`.
  void abort(const std::string& reason) const;

  // The World of this thread, set by init() or by a thread rank. Throws UsageError if there is none.
  static World current();
  static bool has_current();
  struct State;
  State& state() const { return *state_; }

  // Makes `world` the current one of this thread while alive.
  class Scope {
   public:
    explicit Scope(World world);
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

// Joins the world and makes it current for this thread. Without variables of a launcher: a world of one.
World init(InitOptions options = {});
// Leaves the current world: meshes' caches are emptied, groups closed. Tensors that are left can still be freed.
void destroy();

int64_t get_rank(const comm::Group& group = {});        // in the group; none: in the current world
int64_t get_world_size(const comm::Group& group = {});  // of the group; none: of the current world

}  // namespace tessera

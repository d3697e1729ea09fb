#pragma once
#include "tessera/tracing/op_mode.h"
#include "tessera/compile/detail/ir/program.h"
#include "tessera/compile/detail/trace/live_numbers.h"

#include <c10/core/Storage.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// A step becomes a program by running once, on this thread, below autograd: ops on plain tensors are written down, with
// what an op on distributed tensors does to this rank's pieces in its place. Nothing is communicated: collectives give
// zeros of the right shape. Nothing lasts: what the step wrote to memory of before is put back.
namespace tessera::compiler {

// Memory that is known before the step runs.
struct Lifted {
  at::Tensor handle;  // plain, or distributed: then its piece counts
  Role role = Role::Argument;
  std::string name;
};

class Tracer final : public OpMode {
 public:
  Tracer(const std::vector<Lifted>& lifted, LiveNumbers numbers);
  ~Tracer() override;

  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;

  size_t nodes() const { return program_.nodes.size(); }  // so far
  void add_input(const at::Tensor& plain, Role role, const std::string& name) { input(plain, role, name); }

  // After the step.
  ValueId value_of(const at::Tensor& plain);  // kNone: undefined
  void put_out(const at::Tensor& plain, Output::Kind kind, std::string name);
  bool was_used(const at::Tensor& plain) const;  // is its memory read or written?
  bool made(const at::Tensor& plain) const;      // by the step
  // Leaves that the step computed with, in that order, and the gradient each had when it was first seen.
  struct Leaf {
    at::Tensor handle, gradient;
  };
  const std::vector<Leaf>& leaves() const { return leaves_; }
  void restore();  // memory of before; once

  struct Result {
    Program program;
    // By buffer, the memory it is bound to: of inputs the tensor it was found in, of kept ones the storage.
    std::vector<at::Tensor> handles;
    std::vector<c10::Storage> storages;
  };
  // Values made by the step that somebody outside still holds become outputs. Requires: restored.
  Result finish();

 private:
  using Key = std::tuple<int32_t, int64_t, std::vector<int64_t>, std::vector<int64_t>, c10::ScalarType>;
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> weak;  // strong ones would change what autograd does in place
    at::Tensor handle = {};                          // of memory of before
    bool external = false, used = false;
    at::Tensor before = {};  // its bytes, if they were written
  };

  Arg read(const c10::IValue& value, const c10::OperatorHandle& op, size_t argument);
  Arg read_tensor(const at::Tensor& t, Role role);
  ValueId value_in_list(const at::Tensor& t);
  ValueId first_value_in(int32_t buffer) const;
  Arg define(const c10::IValue& value);
  ValueId define_tensor(const at::Tensor& t);
  ValueId input(const at::Tensor& t, Role role, const std::string& name);
  Arg group(const comm::Group& group);
  void save_before_write(const Node& node);
  void note_leaves(const c10::IValue& argument);
  static Key key_of(int32_t buffer, const at::Tensor& t);

  Program program_;
  LiveNumbers numbers_;
  std::unordered_map<const void*, int32_t> buffers_;  // by storage
  std::vector<Memory> memory_;                        // by buffer
  std::map<Key, ValueId> values_;                     // the latest of each
  std::vector<Leaf> leaves_;
  std::unordered_set<const void*> known_leaves_;
};

}  // namespace tessera::compiler

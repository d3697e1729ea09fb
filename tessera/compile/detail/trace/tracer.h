#pragma once
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/program.h"
#include "tessera/compile/detail/trace/generator_states.h"
#include "tessera/compile/detail/trace/runtime_scalars.h"
#include "tessera/tracing/op_mode.h"

#include <c10/core/Storage.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// Tracing runs the user's function once on this thread and records each op below autograd, as make_fx does in PyTorch.
// An op on DTensors is recorded as the ops on this rank's local tensors. Collectives do not communicate: they return
// zeros of the right sizes. Restoring afterwards undoes all writes to memory that existed before (see trace_run.h).
namespace tessera::compiler {

// A tensor that exists before the step runs and becomes an input (placeholder) of the program.
struct Lifted {
  at::Tensor tensor;  // for a DTensor the local tensor becomes the input
  Role role = Role::Argument;
  std::string name;
};

// Records ops into a Program. Buffers of the program correspond to storages:
//   external buffer   memory that existed before the run (inputs, captured tensors)
//   other buffers     memory that the traced function allocates
//
// While the function runs, the memory of its tensors can be reached by ops only: data_ptr() and accessors throw, since
// the tracer would not see what is read or written (see memory_access_error).
class Tracer final : public OpMode {
 public:
  // `generators`: those that an earlier trace of the same function has found.
  Tracer(const std::vector<Lifted>& lifted, RuntimeScalars scalars, const std::vector<at::Generator>& generators = {});
  ~Tracer() override;

  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;

  size_t nodes() const { return program_.nodes.size(); }  // recorded so far
  void add_input(const at::Tensor& local, Role role, const std::string& name) { input(local, role, name); }

  // After the traced function has returned or thrown: records seeds that it set last, and gives access to memory.
  void function_returned();
  void allow_memory_access();
  // The message of an error that data_ptr() threw in the function, as an error for the user; none for other errors.
  static std::optional<std::string> memory_access_error(const std::string& what);

  // After the traced function has returned. `local`: a plain tensor, not a DTensor.
  void add_output(const at::Tensor& local, Output::Kind kind, std::string name);
  bool was_used(const at::Tensor& local) const;       // an op read or wrote its memory
  bool was_allocated(const at::Tensor& local) const;  // by the traced function
  // Leaf tensors that ops have used, in order of first use, with the gradient each had then.
  struct Leaf {
    at::Tensor tensor, gradient;
  };
  const std::vector<Leaf>& leaves() const { return leaves_; }
  void restore_memory();  // undoes all writes to external buffers; a second call does nothing
  std::vector<at::Generator> generators() const { return generators_.generators(); }
  // Tensors that the function used and that were not lifted, in order of first use, without leaves that require
  // gradients.
  std::vector<at::Tensor> captured() const;
  // Memory that the function allocated and that is alive, without gradients of its leaves.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_left() const;

  // Inputs whose sizes, strides, dtype or memory the function has changed in place (t_, resize_, set_data). Restores
  // them and returns a description of the first one; none: nothing has changed.
  std::optional<std::string> restore_changed_inputs();

  struct Result {
    Program program;
    std::vector<at::Tensor> owners;      // by buffer: of an external one, the tensor it was found in
    std::vector<c10::Storage> storages;  // by buffer: null if the memory is freed
    // By buffer: the function reads its memory by an offset from the begin of the storage (as_strided), or by another
    // handle than the input, outside of the input's elements (the base of an argument that is a view).
    std::vector<char> reads_by_offset, reads_outside;
  };
  // Values that the function allocated and that are still alive elsewhere become outputs of kind Kept.
  // Requires: restore_memory() was called.
  Result finish();

 private:
  static void note_reads_of_storage(Result& result, size_t buffers);
  using ValueKey =
      std::tuple<int32_t, int64_t, std::vector<int64_t>, std::vector<int64_t>, c10::ScalarType, bool, bool>;
  struct Buffer {
    c10::weak_intrusive_ptr<c10::StorageImpl> weak;  // a strong reference would change in-place decisions of autograd
    at::Tensor owner = {};                           // of an external buffer
    bool external = false, used = false;
    at::Tensor saved_bytes = {};  // content before the first write to an external buffer
    bool unwritten = false;       // allocated by an op such as empty(); no op has written to it yet
    bool protect = false;         // data_ptr() throws between ops
    bool is_protected = false;
    bool unknown = false;   // depends on a collective, whose result a trace does not have
    bool constant = false;  // depends on no input and no random number: the same in every run
  };
  // An input as it was before the run.
  struct InputBefore {
    at::Tensor tensor, alias;  // `alias` has the sizes, strides and memory
    Role role;
    std::string name;
    at::Tensor copy = {};  // of memory that the tensor does not own
  };

  Arg read(const c10::IValue& value, const c10::OperatorHandle& op, size_t argument);
  Arg read_tensor(const at::Tensor& t, Role role);
  static void check_strided(const at::Tensor& t);
  ValueId value_in_list(const at::Tensor& t);
  ValueId value_of(const at::Tensor& local);  // kNone: undefined
  ValueId first_value_in(int32_t buffer) const;
  Arg define(const c10::IValue& value);
  ValueId define_tensor(const at::Tensor& t);
  ValueId input(const at::Tensor& t, Role role, const std::string& name);
  void note_input(const at::Tensor& t, Role role, const std::string& name);
  Arg group(const comm::Group& group);
  void save_before_write(const Node& node);
  void set_protected(int32_t buffer, bool on);
  void set_protected(const Node& node, bool on);
  void keep_numbers_from_host(const c10::OperatorHandle& op, const std::vector<Arg>& args);
  bool equal(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  bool any_unknown(const Node& node) const;
  bool all_constant(const Node& node) const;
  void note_values(const Node& node, OpKind kind);
  // In tracer_host_reads.cpp.
  bool has_fixed_sizes(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  bool is_constant(const at::Tensor& t);
  bool read_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  void read_number(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  at::Scalar assumed_number(const at::Tensor& t) const;
  void check_errors_at_run(const c10::OperatorHandle& op, torch::jit::Stack* stack);
  void replace_rejected_values(const Node& node, torch::jit::Stack& stack) const;
  void record_seed(const at::Generator& generator);
  void keep_temporary_tensors();
  void note_leaves(const c10::IValue& argument);
  static ValueKey key_of(int32_t buffer, const at::Tensor& t);

  Program program_;
  RuntimeScalars scalars_;
  std::unordered_map<const void*, int32_t> buffer_ids_;  // by storage
  std::vector<Buffer> buffers_;
  std::map<ValueKey, ValueId> values_;  // the latest value of each view
  GeneratorStates generators_;
  std::vector<InputBefore> inputs_before_;
  bool memory_access_ = false;
  std::vector<Leaf> leaves_;
  std::unordered_set<const void*> known_leaves_;
};

}  // namespace tessera::compiler

#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/compile/detail/ir/program.h"
#include "tessera/compile/detail/replay/memory_plan.h"
#include "tessera/compile/detail/replay/op_kernel.h"
#include "tessera/cuda/detail/graph.h"

#include <c10/core/Storage.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

// A program that is ready to run: memory is planned, kernels are looked up, arguments are boxed. A run calls one kernel
// after the other, without dispatcher and autograd. Not thread-safe.
//
//   node                              how it runs
//   a view, an empty                  not at all: its readers have its sizes and strides
//   has an out= overload              writes into its place in the arena
//   in-place op                       writes into its arguments
//   generated kernel                  is called directly
//   any other                         allocates its result, which becomes the memory of the value
//
// On a CUDA device the calls are captured into CUDA graphs on the third run and replayed from then on, unless
// why_no_graph() has a reason. A graph ends before a call that cannot be captured, and the next one begins after it:
// listing() names these calls, and why. Graphs have fixed addresses: arguments are copied to memory of the executable,
// returned values out of it, and when other memory moves the graphs are captured anew.
namespace tessera::compiler {

// A custom way to run a program: takes one tensor per input, mutates them as the program does, returns the outputs.
// Example: interpret().
using Runner = std::function<Tensors(const Tensors& inputs)>;
// Called once per program.
using MakeRunner = std::function<Runner(const Program& program)>;

class Executable {
 public:
  // `bound`: by buffer, the storage of memory that is shared with the environment (inputs, gradients, kept state); null
  // for buffers that the executable allocates. Gradients that the program computes on the CPU, and old gradients that
  // it does not read, are not taken from `bound`.
  // `make_runner`: if given, its runner runs the program, and no kernels are prepared.
  // `library`: the generated kernels; null: they are loaded from the kernel cache, or built.
  Executable(Program program, const std::vector<c10::Storage>& bound, const MakeRunner& make_runner = {},
             std::shared_ptr<const codegen::KernelLibrary> library = nullptr);
  ~Executable();
  Executable(const Executable&) = delete;

  const Program& program() const { return program_; }
  const MemoryPlan& memory() const { return plan_; }

  // Must the arguments be bound before every run, even if their memory has not moved?
  bool copies_arguments() const { return arguments_are_copies_; }
  // Why no CUDA graph is captured; empty: some are, or will be.
  const std::string& why_no_graph() const { return why_no_graph_; }
  // The calls that run between the graphs: 0 if all of them are in one graph.
  int64_t calls_outside_graphs() const;

  // Rebinds a buffer. Values in it begin `shift` elements later than in the program.
  void bind(int32_t buffer, const c10::Storage& storage, int64_t shift);
  // Allocates new memory for a buffer that the program writes; of a gradient in the arena, a new arena. The old memory
  // stays with its other owners.
  void give_new_memory(int32_t buffer);
  void run();
  // Calls `then` after the next run, with the milliseconds of each node; 0: it needs no kernel. The destructor calls it
  // with an empty list if the program does not run again.
  using NodeTimes = std::vector<double>;
  void time_next_run(std::function<void(const NodeTimes&)> then) { after_next_run_ = std::move(then); }
  // After run(). A returned value has memory that no later run writes; other outputs are where they are bound.
  at::Tensor output(const Output& output) const;

  // The program, one node per line, with op names as in PyTorch's generated code, the number of runs, and the bytes of
  // collectives as their records count them. A line without a number of runs is a view, which needs no kernel. parse()
  // reads it; the sources of kernels are left out.
  std::string listing() const;
  int64_t runs() const { return runs_; }
  // The generated kernels; null if the program has none.
  const codegen::KernelLibrary* library() const { return library_.get(); }

 private:
  struct KernelCall {
    size_t node;
    OpKernel kernel;
    std::vector<std::pair<size_t, RuntimeScalar>> live = {};  // arguments that are read on every run
    struct ListResult {
      size_t result;
      int64_t at;
      ValueId value;
    };
    std::vector<std::pair<size_t, ValueId>> results = {};  // index of a result, the value whose memory it becomes
    std::vector<ListResult> list_results = {};
    bool replaces_storage = false;                // a result replaces the storage of its value, not only the bytes
    std::vector<int32_t> new_memory = {};         // buffers of returned values, which get new memory before the call
    std::vector<int32_t> last_used = {};          // buffers that ops allocate, whose memory is freed after the call
    codegen::KernelFunction generated = nullptr;  // is called instead of `kernel`
    ValueList operands = {};                      // of the generated kernel; it writes the first `outs`
    size_t outs = 0;
    std::vector<Arg> numbers = {};  // the numbers that the generated kernel takes
    int64_t elements = 0;
    int64_t runs = 0;
    std::string why_not_captured = {};  // in a CUDA graph
  };
  void prepare();
  void find_results_of_ops();
  std::vector<char> memory_is_not_shared() const;
  std::vector<char> buffers_outside_arena();
  void allocate_arenas();
  c10::Storage storage_in_arena(size_t buffer, c10::Device device);
  void allocate_buffers();
  std::optional<c10::OperatorHandle> results_out_overload(const Node& node) const;
  void prepare_call(size_t n, const Node& node);
  void prepare_generated(KernelCall& call, const Node& node) const;
  void prepare_results(KernelCall& call, const Node& node) const;
  void renew_returned_buffers(const std::vector<char>& external);
  void free_after_last_use();
  void run_by_runner();
  NodeTimes run_calls();
  void read_numbers();
  void run_range(size_t begin, size_t end, NodeTimes& times);
  void renew(int32_t buffer);
  void point_to(int32_t buffer, const c10::Storage& storage, int64_t shift);
  void run_call(KernelCall& call);
  void call_generated(const KernelCall& call);
  std::vector<char> used_buffers() const;
  at::Tensor tensor_for(ValueId value) const;
  void take_result(const at::Tensor& result, ValueId id, bool replace_storage);

  Program program_;
  std::shared_ptr<const codegen::KernelLibrary> library_;
  MemoryPlan plan_;
  std::vector<c10::Storage> arenas_;             // by arena of the plan
  bool arenas_in_use_ = false;                   // a run has written to them
  std::vector<c10::Storage> storages_;           // by buffer
  std::vector<at::Tensor> tensors_;              // by value
  std::vector<std::vector<ValueId>> values_in_;  // by buffer
  std::vector<char> returned_;                   // by buffer: gets new memory on every run
  std::vector<char> result_of_op_;               // by buffer: an op without an out= kernel allocates it
  std::vector<char> is_output_;                  // by buffer
  std::vector<char> allocated_by_op_;            // by buffer: a temporary that has memory from its op to its last use
  std::vector<int64_t> bytes_;                   // by buffer
  std::vector<KernelCall> calls_;
  std::vector<c10::IValue> numbers_;
  torch::jit::Stack stack_;
  std::vector<void*> operands_;
  std::vector<double> kernel_numbers_;
  int64_t runs_ = 0;

  // CUDA graphs (executable_graphs.cpp)
  struct GraphPart {
    size_t begin, end;  // of calls_
    bool captured;      // else they run one by one
    std::unique_ptr<cuda::Graph> graph = {};
  };
  void plan_graphs();
  std::string why_not_captured(const Node& node, const KernelCall& call, c10::Device device) const;
  bool has_graphs() const { return why_no_graph_.empty(); }
  bool can_run_graphs() const;
  void discard_graphs();
  void run_graphs();
  void copy_arguments();
  void capture_and_run();
  std::vector<GraphPart> parts_;
  std::string why_no_graph_;
  std::optional<c10::Device> graph_device_;
  std::vector<char> used_outside_graphs_;  // by buffer: keeps its memory between graphs
  bool is_captured_ = false, is_capturing_ = false;
  std::vector<char> is_argument_;  // by buffer
  bool arguments_are_copies_ = false;
  int64_t runs_with_these_addresses_ = 0, captures_ = 0;
  Runner runner_;      // null: replay
  bool is_invariant_;  // traced under Numerics::Invariant
  std::function<void(const NodeTimes&)> after_next_run_;
};

}  // namespace tessera::compiler

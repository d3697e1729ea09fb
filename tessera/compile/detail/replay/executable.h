#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/codegen/library.h"
#include "tessera/compile/detail/ir/program.h"
#include "tessera/compile/detail/replay/kernel.h"
#include "tessera/compile/detail/replay/memory_plan.h"

#include <c10/core/Storage.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

// A program made ready to run: memory laid out, kernels looked up, arguments put together. Running it calls one kernel
// after the other, without dispatcher and autograd. Not for several threads at a time.
//
//   node                              how it runs
//   a view, an empty                  not at all: who reads it has its sizes and strides
//   has an out= form with a kernel    into its place in the arena
//   writes into its arguments         as it is
//   calls a generated function        directly
//   any other                         its own memory is moved to where its readers look
namespace tessera::compiler {

// Another way to run a program: called with a tensor for each of its inputs, which it writes to as the program does;
// gives the outputs. interpret() does that.
using Runner = std::function<Tensors(const Tensors& inputs)>;
using MakeRunner = std::function<Runner(const Program& program)>;

class Executable {
 public:
  // What buffers are bound to: by buffer, the storage of memory from outside or that somebody keeps; none for those
  // that the program makes for itself.
  // `make_runner`: who runs it instead; nothing is prepared then.
  Executable(Program program, const std::vector<c10::Storage>& bound, const MakeRunner& make_runner = {});
  ~Executable();
  Executable(const Executable&) = delete;

  const Program& program() const { return program_; }
  const MemoryPlan& memory() const { return plan_; }

  // Binds the memory of an input buffer anew: values in it begin `shift` elements later than in the program.
  void bind(int32_t buffer, const c10::Storage& storage, int64_t shift);
  void give_new_memory(int32_t buffer);  // to one that the program fills; what it was belongs to others from now on
  void run();
  // After run(): what it returns is in memory of its own, others where they are bound.
  at::Tensor output(const Output& output) const;

  // The program that runs, line by line, with how often each has run and, of collectives, the bytes that their records
  // say; ops by the names PyTorch's listings have. Lines without a count are views: nothing is done for them.
  std::string listing() const;
  int64_t runs() const { return runs_; }
  // Of the generated functions; null if there are none.
  const codegen::Library* library() const { return library_.get(); }

 private:
  struct Step {
    size_t node;
    Kernel kernel;
    std::vector<std::pair<size_t, Live>> live = {};  // arguments to read
    struct InList {
      size_t result;
      int64_t at;
      ValueId value;
    };
    std::vector<std::pair<size_t, ValueId>> moved = {};  // result -> the value whose memory it becomes
    std::vector<InList> moved_lists = {};
    bool moves_storage = false;             // not only the bytes in it
    std::vector<int32_t> fresh = {};        // buffers put out, which get new memory
    codegen::Function generated = nullptr;  // is called instead of the kernel
    ValueList operands = {};                // with their memory: of these the first `outs` are written
    size_t outs = 0;
    int64_t elements = 0;
    int64_t runs = 0;
  };
  void prepare();
  void run_by_other();
  void prepare_step(size_t n, const Node& node);
  void prepare_generated(Step& step, const Node& node) const;
  void call_generated(const Step& step);
  std::vector<char> used_buffers() const;
  at::Tensor tensor_for(ValueId value) const;
  void move_in(const at::Tensor& made, ValueId id, bool whole);

  Program program_;
  std::shared_ptr<const codegen::Library> library_;
  MemoryPlan plan_;
  at::Tensor arena_;
  std::vector<c10::Storage> storages_;           // by buffer
  std::vector<at::Tensor> tensors_;              // by value
  std::vector<std::vector<ValueId>> values_in_;  // by buffer
  std::vector<char> returned_;                   // by buffer: new memory at every run
  std::vector<int64_t> bytes_;
  std::vector<Step> steps_;
  std::vector<c10::IValue> numbers_;
  torch::jit::Stack stack_;
  std::vector<void*> operands_;
  int64_t runs_ = 0;
  Runner runner_;  // null: replay
};

}  // namespace tessera::compiler

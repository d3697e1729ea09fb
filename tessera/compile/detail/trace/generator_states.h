#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace tessera::compiler {

// The generators of LibTorch that a traced step draws from: the default one of the CPU and generators of the user. The
// ops that draw are recorded. manual_seed() and set_state() are host code, which does not run again in a replay; the
// next draw finds their effect here. The destructor restores all states.
class GeneratorStates {
 public:
  // `known`: generators that an earlier trace of the step has found. Their state is replaced, so that a step that seeds
  // one before its first draw is seen to do so.
  explicit GeneratorStates(const std::vector<at::Generator>& known = {});
  ~GeneratorStates();
  GeneratorStates(const GeneratorStates&) = delete;

  // The state that the step has set on the host since the last draw; none if it has not.
  // UsageError if it is a state that the generator had earlier in the step: the program would have to compute it.
  std::optional<at::Tensor> set_on_host(const at::Generator& generator);
  // After an op that draws.
  void drew(const at::Generator& generator);
  // All of them, in order of first use.
  std::vector<at::Generator> generators() const;

 private:
  struct Known {
    at::Generator generator;
    at::Tensor before;            // the state before the trace
    at::Tensor expected;          // after the last draw
    std::vector<size_t> earlier;  // hashes of all states so far
    bool shared = false;          // ranks are threads that draw from it concurrently: its state cannot be followed
  };
  Known& find(const at::Generator& generator);
  std::vector<Known> known_;
};

}  // namespace tessera::compiler

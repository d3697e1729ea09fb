#pragma once
#include "tessera/compile/detail/api/returned_tensors.h"
#include "tessera/compile/detail/api/thread_state.h"
#include "tessera/compile/detail/api/trace_text.h"
#include "tessera/compile/detail/passes/pass.h"

#include <string>
#include <vector>

namespace tessera::compiler {

struct Settings;

// What a file contains of a compiled step, and another process cannot know: the lowered program, its built kernels, and
// what tracing has found out. Tensors have names (lift()); the process that loads the step finds its own tensors by
// them.
struct SavedStep {
  // Where a runtime scalar of the program is read.
  struct NumberSource {
    enum class Kind : int64_t { LearningRate, Seed, Draws, NumberOfCall } kind = Kind::Seed;
    int64_t index = 0;  // of the optimizer, or of the number
    int64_t group = 0;
  };
  struct GradientType {
    std::string parameter, type;  // TensorGuard::text()
  };
  std::vector<std::string> call;  // describe_call()
  std::string settings;           // describe_settings()
  ThreadState thread;
  std::string program, library;  // text; bytes of the built kernels, "" if it has none
  std::vector<NumberSource> numbers;
  std::vector<std::string> constants;  // by captured constant of the program: its bytes
  std::vector<ReturnedTensors::Saved> results;
  std::vector<std::string> without_gradient;  // parameters
  std::vector<GradientType> gradient_guards;
  std::string result_leaves;  // ResultLeaves::others
  TraceText trace;
  std::vector<NumberUse> number_uses, returned_number_uses;
  std::vector<double> returned_numbers;
  std::vector<bool> number_is_key;
  bool gradient_placeholders = false, sets_seed = false, draws_from_generators = false;
  uint64_t seed = 0, draws = 0;  // what a run does to Tessera's random stream
  std::vector<PassReport> report;

  // The file: step_file.h.
  void write(const std::string& path) const;
  static SavedStep read(const std::string& path);
};

// The settings that decide how a step is compiled.
std::string describe_settings(const Settings& settings);

}  // namespace tessera::compiler

#pragma once
#include <cfenv>
#include <cstddef>
#include <optional>
#include <vector>

// Numbers that a compiled step takes as inputs: double arguments, and variables behind ts::live(). The compiler must
// know what the step does with a number: pass it to an op, which makes it an input of the program, or anything else
// (arithmetic, a comparison, a size), which makes it a key: another value recompiles.
//
// It traces the step with marks instead of the numbers. A mark is a signaling NaN with the index of the number in its
// payload. A processor moves it unchanged, and raises FE_INVALID when it computes, compares or converts it. So:
//   - a constant of the trace that is the mark itself, or its negative, is the number;
//   - FE_INVALID after host code of the step means that the host has read a number. NumberProbe tests this before
//     every op, and clears the flag after it, because kernels compute with the marks.
namespace tessera {

// The mark of number `index`. `negative`: with its sign bit set, as -x would be.
double number_mark(size_t index, bool negative);

struct MarkedNumber {
  size_t index = 0;
  bool negative = false;
};
// The number whose mark `value` is, or nothing.
std::optional<MarkedNumber> find_number_mark(double value);

// While alive, watches whether host code of this thread reads a mark.
class NumberProbe {
 public:
  // False if the program has asked for a signal at FE_INVALID (feenableexcept): marks would end it.
  static bool is_possible();
  NumberProbe();
  ~NumberProbe();
  NumberProbe(const NumberProbe&) = delete;
  // Call it when the traced function has returned.
  bool host_has_read() const;

 private:
  unsigned long callback_;
  std::fexcept_t flags_{};  // before
};

// The live numbers of the step that this thread traces.
class LiveNumberScope {
 public:
  // `variables`: those that earlier traces have found. Marks have the indices from `first` on.
  LiveNumberScope(std::vector<const double*> variables, size_t first);
  ~LiveNumberScope();
  LiveNumberScope(const LiveNumberScope&) = delete;
  const std::vector<const double*>& variables() const { return variables_; }
  // The numbers that get marks instead of their values: all (`only` == -1), or one.
  void substitute(bool negative, int only = -1) { substitutes_ = true, negative_ = negative, only_ = only; }
  double read(const double* variable);
  // Whether the step has read any live variable, of whatever type.
  bool any_read() const { return any_read_; }
  static void note_read() {
    if (current()) current()->any_read_ = true;
  }
  static LiveNumberScope*& current();

 private:
  std::vector<const double*> variables_;
  size_t first_;
  bool substitutes_ = false, negative_ = false, any_read_ = false;
  int only_ = -1;
  LiveNumberScope* outer_;
};

// The value of a live variable. While a step is traced: registers the variable as an input of the program.
double read_live_number(const double* variable);

}  // namespace tessera

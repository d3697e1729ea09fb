#pragma once
#include "tessera/compile/detail/codegen/kernel_source.h"

#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::compiler::codegen {

// The C++ source of one function that runs several small ops, one after the other, without a call of LibTorch.
//
//   %3 = aten.addmm(%b, %x, %w, 1, 1)         for (i ...) { row[j] = in0[j]; for (k ...) row[j] += in1[...] * ...; }
//   %4 = aten.relu(%3)                        for (i ...) out1[i] = out0[i] < 0 ? 0 : out0[i];
//
// Every op reads and writes memory, in program order, so nothing has to be known about aliases between ops. Sums over
// k and over elements are not in LibTorch's order: bits differ from eager mode by some ulps. Sums are in double.
class SmallFunctionWriter {
 public:
  static constexpr size_t kMaxNumbers = 4;  // arguments of tessera.cpp_kernel.numbers

  explicit SmallFunctionWriter(const Program& program) : program_(&program) {}

  // Appends the op. False, without an effect, if the op is large or has no source.
  bool add(const Node& node);
  // Has it an op whose sums are in another order than in LibTorch? Otherwise it has pointwise ops alone.
  bool changes_rounding() const { return changes_rounding_; }
  // The function `name`. numbers(): what it reads on every call, in the order of its arguments.
  KernelSource finish(const std::string& name);
  const std::vector<RuntimeScalar>& numbers() const { return numbers_; }

 private:
  struct Pointer {
    std::string name;
    ValueId value;
    bool written;
  };
  bool add_pointwise(const Node& node);
  bool add_product(const Node& node);
  bool add_sum(const Node& node);
  bool add_adam(const Node& node);

  bool is_number_tensor(ValueId id) const;
  std::string read(ValueId id) { return pointer(id, false); }
  std::string write(ValueId id) { return pointer(id, true); }
  std::string pointer(ValueId id, bool written);
  std::string number(const Arg& arg);  // a constant or runtime scalar as double; "" if it is neither, or one too many

  const Program* program_;
  std::ostringstream text_;
  std::map<MemoryLocation, size_t> pointer_at_;
  std::vector<Pointer> pointers_;
  std::vector<RuntimeScalar> numbers_;
  size_t statements_ = 0;
  bool changes_rounding_ = false;
};

}  // namespace tessera::compiler::codegen

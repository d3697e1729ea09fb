#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <c10/util/ArrayRef.h>

#include <string>
#include <string_view>
#include <vector>

// The text of a debug mode: one line per op, redistribution and collective, in order, indented below its cause.
//
//   aten::mm(f32[8, 10][S(0)], f32[10, 4][S(0)]) -> f32[8, 4][S(0)]
//     redistribute_input(1, S(0)->R) implicit
//       c10d_functional::all_gather_into_tensor(tp, 160 B)
namespace tessera::detail {

class OpTree {
 public:
  void begin_op(const std::string& name, c10::ArrayRef<const TensorSpec*> in);
  void end_op(c10::ArrayRef<const TensorSpec*> out);
  void begin_redistribution(int tensor, const TensorSpec& from, const TensorSpec& to, bool is_explicit);
  void end_redistribution();
  void collective(const comm::Record& record);
  void clear();

  // The innermost op that runs now, or "".
  std::string_view current_op() const;
  std::string to_string() const;

 private:
  enum class What : uint8_t { Op, Redistribution, Collective };
  struct Line {
    What what;
    size_t depth;
    std::string text;
    std::string module;
    std::string op = {};  // the op's name, if this is an Op
  };
  void add(What what, std::string text);
  bool redistributing() const { return !open_.empty() && lines_[open_.back()].what == What::Redistribution; }

  std::vector<Line> lines_;
  std::vector<size_t> open_;  // lines whose op or redistribution has not ended, outermost first
};

}  // namespace tessera::detail

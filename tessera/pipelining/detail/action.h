#pragma once
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// One action of a pipeline schedule, in the text form that PyTorch uses: stage, type, microbatch.
//
//   2F0           forward of stage 2 on microbatch 0
//   2I0  2W0  2B0 backward: gradient of the input, of the weights, of both
//   1SEND_F3      sends the output of stage 1 for microbatch 3 to the rank of stage 2; 2RECV_F3 receives it there
//   1UNSHARD  1RESHARD  1REDUCE_GRAD   parameters and gradients of a sharded stage; no microbatch
//   (0F2;3B1)OVERLAP_F_B               a forward and a backward that may run at the same time
namespace tessera::pipelining {

enum class ActionType {
  Forward,
  BackwardInput,
  BackwardWeight,
  FullBackward,
  OverlapForwardBackward,
  Unshard,
  Reshard,
  ReduceGrad,
  SendForward,
  RecvForward,
  SendBackward,
  RecvBackward,
};

struct Action {
  int64_t stage = -1;  // -1: an overlapped action, whose parts have the stages
  ActionType type = ActionType::Forward;
  std::optional<int64_t> microbatch;
  std::vector<Action> parts;  // of an overlapped action

  bool operator==(const Action&) const = default;
};

// "F", "SEND_F", ...
std::string_view to_string(ActionType type);
std::string to_string(const Action& action);
std::ostream& operator<<(std::ostream& out, const Action& action);

// The inverse of to_string. Throws UsageError if `text` is not an action.
Action parse_action(std::string_view text);

// Forward, the three kinds of backward, and their overlap. The others move data.
bool is_compute(ActionType type);
// The action itself, or the parts of an overlapped one.
std::vector<Action> parts_of(const Action& action);

}  // namespace tessera::pipelining

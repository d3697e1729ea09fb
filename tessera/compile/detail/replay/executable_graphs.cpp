#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/replay/executable_memory.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <optional>

// The CUDA graphs of an Executable. Calls are divided into parts: consecutive calls that can be captured are one graph,
// the calls between them run one by one.
//
//   part 0, a graph             forward and backward
//   part 1, one by one          _fused_adamw_, which takes a learning rate that is read on every run
//   part 2, a graph             what follows
//
// What a call between graphs reads and writes keeps its address: its memory is not freed inside of a step, and what
// such a call allocates is copied to where the first run put it.
namespace tessera::compiler {
namespace {

constexpr int64_t kRunsBeforeGraph = 2;  // libraries allocate workspaces and choose algorithms in the first runs
constexpr int64_t kMaxCaptures = 4;
constexpr size_t kFewestCalls = 3;  // fewer are launched as fast one by one

std::optional<c10::Device> cuda_device_of(const Program& program, const Node& node) {
  std::optional<c10::Device> device;
  const auto see = [&](ValueId id) {
    if (program[id].type.device.is_cuda()) device = program[id].type.device;
  };
  node.each_read(see);
  node.each_result(see);
  return device;
}

}  // namespace

std::string Executable::why_not_captured(const Node& node, const KernelCall& call, c10::Device device) const {
  if (call.generated) return "it runs on the CPU";
  if (!call.live.empty()) return "it takes a number that is read on every run";
  const auto kind = kind_of(node);
  const auto group = group_of(node);
  if (kind == OpKind::Collective) return "it communicates";
  if (kind == OpKind::Wait && group >= 0 && program_.groups[static_cast<size_t>(group)].group->size() > 1)
    return "it waits for a collective";
  std::string why;
  const auto see = [&](ValueId id) {
    const auto& here = program_[id].type.device;
    if (here != device) why = c10::str("it uses a tensor on ", here);
  };
  node.each_read(see);
  node.each_result(see);
  return why;
}

void Executable::plan_graphs() {
  for (const auto& input : program_.inputs)
    if (input.role == Role::Argument) is_argument_[static_cast<size_t>(program_.buffer_of(input.value))] = 1;
  for (const auto& call : calls_)
    if (!graph_device_) graph_device_ = cuda_device_of(program_, program_.nodes[call.node]);
  if (!graph_device_) {
    why_no_graph_ = "the program uses no CUDA device";
    return;
  }
  for (const auto& input : program_.inputs)
    if (input.role == Role::Argument && program_[input.value].type.span() != program_[input.value].type.numel())
      why_no_graph_ = "argument " + input.name + " has gaps or overlaps in memory";
  for (size_t i = 0; i < calls_.size(); i++) {
    const auto& node = program_.nodes[calls_[i].node];
    node.each_write([&](ValueId id) {
      if (is_argument_[static_cast<size_t>(program_.buffer_of(id))])
        why_no_graph_ = c10::str(node.name(), ": it writes to an argument of the step");
    });
    calls_[i].why_not_captured = why_not_captured(node, calls_[i], *graph_device_);
    const bool captured = calls_[i].why_not_captured.empty();
    if (parts_.empty() || parts_.back().captured != captured) parts_.push_back({i, i, captured});
    parts_.back().end = i + 1;
  }
  bool any = false;
  used_outside_graphs_.assign(storages_.size(), 0);
  for (auto& part : parts_) {
    if (part.captured && part.end - part.begin < kFewestCalls) {
      part.captured = false;
      for (size_t i = part.begin; i < part.end; i++)
        calls_[i].why_not_captured = "too few calls beside it can be captured";
    }
    any |= part.captured;
    const auto use = [&](ValueId id) { used_outside_graphs_[static_cast<size_t>(program_.buffer_of(id))] = 1; };
    for (size_t i = part.begin; i < part.end && !part.captured; i++) {
      program_.nodes[calls_[i].node].each_read(use);
      program_.nodes[calls_[i].node].each_result(use);
    }
  }
  if (!any && why_no_graph_.empty())
    why_no_graph_ = calls_.empty() ? "the program is empty"
                                   : c10::str(program_.nodes[calls_[0].node].name(), ": ", calls_[0].why_not_captured);
}

int64_t Executable::calls_outside_graphs() const {
  return std::count_if(calls_.begin(), calls_.end(), [](const auto& call) { return !call.why_not_captured.empty(); });
}

bool Executable::can_run_graphs() const { return has_graphs() && runs_with_these_addresses_ >= kRunsBeforeGraph; }

void Executable::discard_graphs() {
  is_captured_ = false;
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) part->graph.reset();
}

// Gives the graphs memory of their own for the arguments.
void Executable::copy_arguments() {
  for (const auto& input : program_.inputs) {
    if (input.role != Role::Argument) continue;
    const auto buffer = program_.buffer_of(input.value);
    auto& copy = tensors_[static_cast<size_t>(input.value)];
    const auto given = copy.alias();
    point_to(buffer, allocate_storage(bytes_[static_cast<size_t>(buffer)], copy.device()), 0);
    copy.copy_(given);
  }
  arguments_are_copies_ = true;
}

// Captures each graph and replays it before the next calls run, which read what it has computed.
void Executable::capture_and_run() {
  copy_arguments();
  free_cached_memory(*graph_device_);  // graphs have a pool of their own
  const cuda::Graph* first = nullptr;
  NodeTimes no_times;
  is_capturing_ = true;
  size_t done = 0;  // calls
  try {
    for (auto& part : parts_) {
      const auto run = [&] { run_range(part.begin, part.end, no_times); };
      if (part.captured) {
        part.graph = cuda::Graph::capture(*graph_device_, run, first);
        if (!first) first = part.graph.get();
        part.graph->replay();
      } else {
        run();
      }
      done = part.end;
    }
    captures_++;
    is_captured_ = true;
  } catch (const std::exception& error) {
    const auto failed = std::find_if(parts_.begin(), parts_.end(), [&](const auto& part) { return part.end > done; });
    if (failed == parts_.end() || !failed->captured) {  // the call itself failed
      is_capturing_ = false;
      throw;
    }
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    why_no_graph_ = torch_error ? torch_error->what_without_backtrace() : error.what();
    TORCH_WARN("compile: the step runs without CUDA graphs: ", why_no_graph_);
    run_range(done, calls_.size(), no_times);
    discard_graphs();
  }
  is_capturing_ = false;
}

void Executable::run_graphs() {
  if (!is_captured_ && captures_ == kMaxCaptures) {
    why_no_graph_ = "the memory of its parameters or gradients moves between calls";
    run_calls();
    return;
  }
  arenas_in_use_ = true;
  read_numbers();
  runs_++;
  if (!is_captured_) return capture_and_run();
  NodeTimes no_times;
  for (auto& part : parts_) {
    if (!part.captured) {
      run_range(part.begin, part.end, no_times);
      continue;
    }
    part.graph->replay();
    for (size_t i = part.begin; i < part.end; i++) calls_[i].runs++;
  }
}

}  // namespace tessera::compiler

#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/debug/detail/comm_counts.h"
#include "tessera/debug/detail/op_tree.h"
#include "tessera/dtensor/detail/observer.h"

#include <map>
#include <optional>
#include <string>

namespace tessera {

// Counts the collectives that this thread posts while it is open, and tells which op caused which.
//
// Opens when made. Modes nest: all that are open see each collective. wait, barrier, send and recv are not counted. A
// group of one rank counts like any other. Backward on CPU runs in the thread that called it, and is seen.
// Ops on distributed tensors take their slower path meanwhile; they choose_strategy and compute the same.
//
// Example:  CommDebugMode mode;
//           auto y = DTensor(torch::mm(x, w)).redistribute({Replicate()});
//           EXPECT_EQ(mode.get_comm_counts().of(comm::Kind::AllReduce), 1);
//           std::cout << mode.debug_string();
class CommDebugMode final : public comm::Observer, public detail::OpObserver {
 public:
  CommDebugMode();
  ~CommDebugMode() override;
  CommDebugMode(const CommDebugMode&) = delete;
  CommDebugMode& operator=(const CommDebugMode&) = delete;

  void exit();   // stops counting; what was counted stays to be read. Innermost first, or UsageError.
  void enter();  // starts afresh. UsageError if it is open.
  void reset();  // forgets what was counted, open or not
  bool is_open() const { return open_; }

  const CommCounts& get_comm_counts() const { return counts_; }
  int64_t get_total_counts() const { return counts_.total(); }
  // By the module that was running, "" for none (base/module_name.h). In backward: the module in which forward moved
  // the value, if the mode was open then.
  const std::map<std::string, CommCounts>& get_comm_counts_by_module() const { return by_module_; }
  // The same in bytes, as records count them.
  const std::map<std::string, int64_t>& get_bytes_by_module() const { return bytes_by_module_; }
  // By group: a mesh axis under its name. As records count bytes: the tensor as it is when whole.
  const std::map<std::string, int64_t>& get_bytes_by_axis() const { return bytes_; }

  // Redistributions that communicated although nobody asked for them, all and by op: those of which
  // CommPolicy::Warn would warn.
  int64_t implicit_redistributions() const;
  const std::map<std::string, int64_t>& implicit_redistributions_by_op() const { return implicit_; }

  // Every op on distributed tensors with its placements, below it the redistributions it caused, below those their
  // collectives; laid out like the text of PyTorch's DebugMode.
  std::string debug_string() const { return tree_.to_string(); }

  void on_post(const comm::Record& record) override;
  void begin_op(const propagate::OpEntry& entry, c10::ArrayRef<const TensorSpec*> in) override;
  void redistributes(int tensor, const TensorSpec& from, const TensorSpec& to, bool is_explicit) override;
  void redistributed() override;
  void end_op(c10::ArrayRef<const TensorSpec*> out) override;

 private:
  CommCounts counts_;
  std::map<std::string, CommCounts> by_module_;
  std::map<std::string, int64_t> bytes_, bytes_by_module_;
  std::map<std::string, int64_t> implicit_;
  detail::OpTree tree_;

  bool open_ = false;
  std::optional<comm::ObserverScope> comm_scope_;
  detail::OpObserver* outer_ = nullptr;  // told everything as well
};

}  // namespace tessera

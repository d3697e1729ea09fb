#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/debug/detail/comm_counts.h"
#include "tessera/debug/detail/op_tree.h"
#include "tessera/dtensor/detail/observer.h"

#include <map>
#include <optional>
#include <string>

namespace tessera {

// Counts the collectives that this thread posts, and records which op caused which (PyTorch: CommDebugMode).
//
// The constructor enters the mode. Modes nest: each open mode counts each collective. wait, barrier, send and recv are
// not counted. Collectives of a group of one rank are counted. Backward on CPU runs in the calling thread, so it is
// counted too. While a mode is open, ops on distributed tensors use a slower path with the same results.
//
// Example:  CommDebugMode mode;
//           auto y = DTensor(torch::mm(x, w)).redistribute({Replicate()});
//           EXPECT_EQ(mode.get_comm_counts().of(comm::CommKind::AllReduce), 1);
//           std::cout << mode.debug_string();
class CommDebugMode final : public comm::Observer, public detail::OpObserver {
 public:
  // Enters the mode; the destructor exits it.
  CommDebugMode();
  ~CommDebugMode() override;
  CommDebugMode(const CommDebugMode&) = delete;
  CommDebugMode& operator=(const CommDebugMode&) = delete;

  void exit();                            // stops to count; the counts stay readable. UsageError if not the innermost
  void enter();                           // resets and starts to count. UsageError if it is open
  void reset();                           // sets all counts to zero
  bool is_open() const { return open_; }  // true between enter() and exit()

  // The number of collectives by name, and of all collectives.
  const CommCounts& get_comm_counts() const { return counts_; }
  int64_t get_total_counts() const { return counts_.total(); }
  // Counts by the module that ran, "" for none. A collective in backward belongs to the module whose forward
  // redistributed the value, if the mode was open then.
  const std::map<std::string, CommCounts>& get_comm_counts_by_module() const { return by_module_; }
  // Bytes by module. The bytes of a collective are those of its full tensor.
  const std::map<std::string, int64_t>& get_bytes_by_module() const { return bytes_by_module_; }
  // Bytes by process group. The group of a mesh axis has the name of the axis.
  const std::map<std::string, int64_t>& get_bytes_by_axis() const { return bytes_; }

  // Redistributions that ops inserted and that communicated, in total and by op. CommPolicy::Warn warns of the same
  // ones.
  int64_t implicit_redistributions() const;
  const std::map<std::string, int64_t>& implicit_redistributions_by_op() const { return implicit_; }

  // Every op on distributed tensors with its placements. Below each op are the redistributions that it caused, and
  // below those their collectives. The format is that of PyTorch's DebugMode.
  std::string debug_string() const { return tree_.to_string(); }

  // For internal use: callbacks of the communication and dispatch layers.
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
  detail::OpObserver* outer_ = nullptr;  // gets all callbacks too
};

}  // namespace tessera

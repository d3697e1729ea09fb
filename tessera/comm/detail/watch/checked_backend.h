#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/watch/checked_launcher.h"
#include "tessera/comm/detail/watch/monitored_backend.h"

// Gloo aborts the process if sizes differ between ranks, returns garbage if dtypes differ, and cannot be aborted. So
// each collective goes through a CheckedLauncher first: it is posted to gloo only after all ranks agree on it.
namespace tessera::comm::watch {

class CheckedBackend final : public MonitoredBackend {
 public:
  CheckedBackend(const ConnectOptions& options, c10::intrusive_ptr<c10d::Backend> inner,
                 std::shared_ptr<Comparer> comparer);
  ~CheckedBackend() override;

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void shutdown() override;
  void abort_with(const std::string& reason) override;

  TESSERA_C10D_COLLECTIVES;  // send and recv are not compared, but abort_with() ends them too
  WorkPtr recvAnysource(Tensors& xs, int tag) override;

 private:
  WorkPtr run(const region::CollectiveFingerprint& fingerprint, const SendRecvBytes& sizes, const at::Tensor& any,
              CheckedLauncher::Launch launch, std::function<void()> after = {});
  WorkPtr reduce_rows(CommKind kind, const at::Tensor& rows, const c10d::ReduceScatterOptions& options,
                      std::function<void(const at::Tensor& own_row)> use_own_row);
  region::CollectiveFingerprint fingerprint(CommKind kind, const at::Tensor& x, int64_t root = -1);
  region::CollectiveFingerprint fingerprint(CommKind kind, const at::Tensor& x, const c10d::ReduceOp& op,
                                            int64_t root = -1);
  SendRecvBytes same_for_all(int64_t send, int64_t recv) const;

  std::shared_ptr<CheckedLauncher> launcher_;  // null after shutdown
  const std::string name_;
};

// Connects a group with `connect`, behind a CheckedBackend. On one host the comparer connects first: it finds a missing
// rank at once, whereas `connect` would only time out.
c10::intrusive_ptr<c10d::Backend> connect_checked_backend(const ConnectOptions& options, const Connect& connect);

}  // namespace tessera::comm::watch

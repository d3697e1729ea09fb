#pragma once
#include "tessera/comm/detail/store/client_connection.h"
#include "tessera/comm/detail/store/store_server.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::comm::store {

struct AuthenticatedStoreOptions {
  SocketAddress server;
  std::string secret;  // of the job; TESSERA_JOB_SECRET
  std::chrono::milliseconds timeout = c10d::Store::kDefaultTimeout;
  std::shared_ptr<StoreServer> own_server = {};  // kept alive by this client: the process that runs the server
};

// A client of StoreServer. It behaves like c10d::TCPStore, with these differences:
//   - both ends prove that they have the secret of the job, and every message has a MAC;
//   - any number of threads may use one object: a thread that waits for a key does not delay the others;
//   - a time-out is a CommError that names the key and the server.
// Queues (queuePush, queuePop) and listKeys are not implemented.
//
// Example:
//   auto server = std::make_shared<StoreServer>(SocketAddress{"127.0.0.1", 0}, secret);
//   auto store = c10::make_intrusive<AuthenticatedStore>(AuthenticatedStoreOptions{server->address(), secret});
//   store->set("key", "value");
class AuthenticatedStore : public c10d::Store {
 public:
  // Connects. Waits for the server to listen, up to options.timeout.
  // Throws UsageError if the server refuses the secret, CommError if no server that has the secret answers.
  explicit AuthenticatedStore(AuthenticatedStoreOptions options);

  c10::intrusive_ptr<c10d::Store> clone() override;

  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  // Waits for the key, up to getTimeout().
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

 private:
  // Executes the request on a free connection. Throws CommError on time-out, UsageError if the server refuses it.
  Message call(const char* operation, const Message& request);
  Message call_with_timeout(const char* operation, Message request, std::chrono::milliseconds timeout);
  std::unique_ptr<ClientConnection> take_connection(Deadline deadline, const std::string& purpose);

  const AuthenticatedStoreOptions options_;
  const JobSecret secret_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<ClientConnection>> idle_connections_;  // as many as threads used the store at once
};

}  // namespace tessera::comm::store

#include "tessera/comm/detail/store/client_connection.h"

#include "tessera/base/error.h"

#include <cstring>
#include <thread>

namespace tessera::comm::store {
namespace {

constexpr const char* kServerHasStopped =
    "; the process that runs the store (rank 0, or the launcher) has stopped: look for its error first";

}  // namespace

std::unique_ptr<ClientConnection> ClientConnection::open(const SocketAddress& server, const JobSecret& secret,
                                                         Deadline deadline, const std::string& purpose) {
  const auto began = Clock::now();
  for (;;) {
    auto connected = connect_once(server, deadline);
    std::string problem = std::strerror(connected.error);
    if (connected.error == 0) {
      std::unique_ptr<ClientConnection> connection(new ClientConnection(server, std::move(connected.socket)));
      problem = connection->authenticate(secret, deadline);
      if (problem.empty()) return connection;
    }
    // A server that closes during the handshake may have too many clients. One that is gone refuses the next try.
    TESSERA_CHECK(purpose.empty() || connected.error == 0, CommError, "store, ", purpose, ": the server at ",
                  to_text(server), " is gone (", problem, ")", kServerHasStopped);
    const std::chrono::duration<double> waited = Clock::now() - began;
    TESSERA_CHECK(Clock::now() < deadline, CommError, "no store answers at ", to_text(server), " (", problem,
                  ") after ", waited.count(),
                  " s; is rank 0 (or the launcher of node 0) started, and is that its address?");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // no event reports that a remote port opens
  }
}

std::string ClientConnection::authenticate(const JobSecret& secret, Deadline deadline) {
  const int fd = socket_.get();
  const std::string where = to_text(server_);
  std::string hello, verdict;
  const auto received = receive_until(fd, hello, kServerHelloBytes, deadline);
  if (received == Transfer::Closed) return "it closed the connection";
  if (received == Transfer::TimedOut) return "it sent nothing; it may not be a store of Tessera";
  const Hello parsed = parse_server_hello(hello);
  TESSERA_CHECK(parsed.state == ParseState::Complete, CommError, "the process at ", where,
                " is not a store of Tessera, or one of another version; choose another port (MASTER_PORT, --rdzv)");

  const std::string nonce = random_bytes(kNonceBytes);
  ConnectionKeys keys(secret, parsed.nonce, nonce);
  const std::string reply = std::string(kMagic) + nonce + std::string(view(keys.client_proof));
  if (send_all(fd, reply, deadline) != Transfer::Done ||
      receive_until(fd, verdict, kVerdictBytes, deadline) != Transfer::Done)
    return "it closed the connection during authentication";
  TESSERA_CHECK(verdict[0] != 'R', UsageError, "the store at ", where,
                " refuses this process, which has another secret",
                ". Start all ranks with the same TESSERA_JOB_SECRET, or give this job another port (MASTER_PORT)");
  const bool is_proof = equal_in_constant_time(std::string_view(verdict).substr(1), view(keys.server_proof));
  TESSERA_CHECK(verdict[0] == 'A' && is_proof, CommError, "the process at ", where,
                " does not have the secret of this job. It is the store of another job or user: choose another port "
                "(MASTER_PORT, --rdzv), and find out what listens there");
  keys_ = keys;
  return "";
}

Message ClientConnection::call(const Message& request, Deadline deadline, const std::string& purpose) {
  const int fd = socket_.get();
  std::string bytes;
  const auto check = [&](Transfer transfer) {
    TESSERA_CHECK(transfer != Transfer::Closed, CommError, "store, ", purpose, ": the server at ", to_text(server_),
                  " closed the connection", kServerHasStopped);
    TESSERA_CHECK(transfer != Transfer::TimedOut, CommError, "store, ", purpose, ": the server at ", to_text(server_),
                  " did not answer in time; its process may be stopped (SIGSTOP, debugger), or its host unreachable");
  };
  check(send_all(fd, seal_frame(encode_body(request), keys_->client_to_server), deadline));

  Frame frame = parse_frame(bytes);
  while (frame.state == ParseState::Incomplete) {
    check(receive_until(fd, bytes, frame.size, deadline));
    frame = parse_frame(bytes);
  }
  const bool is_genuine = frame.state == ParseState::Complete &&
                          equal_in_constant_time(view(keys_->server_to_client.next_tag(frame.body)), frame.tag);
  const auto reply = is_genuine ? parse_body(frame.body) : std::nullopt;
  TESSERA_CHECK(reply && is_reply(*reply), CommError, "store, ", purpose, ": the reply from ", to_text(server_),
                " was not made by the server of this job; another process may interfere with the connection");
  return *reply;
}

}  // namespace tessera::comm::store

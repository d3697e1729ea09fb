#include "tessera/comm/detail/store/authentication.h"

#include "store_test_server.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/store/server_loop.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>

// Attacks on the authenticated store, by a process that can connect to its port, or that clients connect to by mistake.
namespace tessera::comm::store {
namespace {

Descriptor accept_one(const Descriptor& listener) {
  return Descriptor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
}

c10::intrusive_ptr<AuthenticatedStore> join(const SocketAddress& address, const std::string& secret) {
  return c10::make_intrusive<AuthenticatedStore>(AuthenticatedStoreOptions{address, secret, 10s});
}

std::string frame_of(const Message& message, FrameMac& mac) { return seal_frame(encode_body(message), mac); }

// A client that has the secret, made of raw bytes.
struct RawClient : RawConnection {
  explicit RawClient(const TestServer& server) : RawConnection(server.address), nonce(random_bytes(kNonceBytes)) {
    const JobSecret secret(server.secret);
    const std::string hello = receive(kServerHelloBytes);
    keys.emplace(secret, parse_server_hello(hello).nonce, nonce);
    client_hello = std::string(kMagic) + nonce + std::string(view(keys->client_proof));
    send(client_hello);
    verdict = receive(kVerdictBytes);
  }
  std::string nonce, client_hello, verdict;
  std::optional<ConnectionKeys> keys;
};

TEST(StoreAuthentication, FiftyWrongSecretsAreRefused) {
  const TestServer server;
  const auto owner = server.client();
  owner->set("region", value_of("/dev/shm/mine"));
  int successes = 0;
  for (int i = 0; i < 50; i++) {
    std::string wrong = i % 2 ? make_job_secret() : server.secret;
    if (i % 2 == 0) wrong[static_cast<size_t>(i) % wrong.size()] ^= 1;
    try {
      join(server.address, wrong)->set("region", value_of("/dev/shm/theirs"));
      successes++;
    } catch (const UsageError& error) {
      EXPECT_CONTAINS(std::string(error.what_without_backtrace()), "refuses this process");
      EXPECT_CONTAINS(std::string(error.what_without_backtrace()), "TESSERA_JOB_SECRET");
    }
  }
  EXPECT_EQ(successes, 0);
  EXPECT_EQ(owner->get("region"), value_of("/dev/shm/mine"));
}

TEST(StoreAuthentication, ShortSecretsAreRefused) {
  EXPECT_ERROR(UsageError, JobSecret(""), "0 characters", "at least 16", "openssl rand");
  EXPECT_ERROR(UsageError, StoreServer({"127.0.0.1", 0}, "password"), "8 characters");
  EXPECT_EQ(make_job_secret().size(), 64u);
  EXPECT_NE(make_job_secret(), make_job_secret());
}

TEST(StoreAuthentication, RequestsWithoutAProofAreNotExecuted) {
  const TestServer server;
  RawConnection attacker(server.address);
  attacker.receive(kServerHelloBytes);
  FrameMac mac{Digest{}};
  const std::string hello = std::string(kMagic) + random_bytes(kNonceBytes) + random_bytes(kDigestBytes);
  attacker.send(hello + frame_of(make_message(RequestCode::Set, {"key", "value"}), mac));
  EXPECT_EQ(attacker.receive(kVerdictBytes).substr(0, 1), "R");
  EXPECT_TRUE(attacker.is_closed_by_peer());
  EXPECT_EQ(server.client()->getNumKeys(), 0);
}

// A server without the secret sends the client's own proof back.
TEST(StoreAuthentication, AReflectedProofIsNotAProofOfTheServer) {
  const auto listener = listen_on({"127.0.0.1", 0});
  auto client = std::async(std::launch::async, [&] {
    EXPECT_ERROR(CommError, join(listening_address(listener.get()), make_job_secret()),
                 "does not have the secret of this job", "choose another port");
  });
  RawConnection victim(accept_one(listener));
  victim.send(std::string(kMagic) + random_bytes(kNonceBytes));
  const std::string hello = victim.receive(kClientHelloBytes);
  victim.send("A" + std::string(parse_client_hello(hello).proof));
  client.get();
}

// A client without the secret sends the server's nonce as its own, or the nonce and the proofs of another connection.
TEST(StoreAuthentication, NoncesAndProofsOfOtherConnectionsAreRefused) {
  const TestServer server;
  const RawClient genuine(server);
  EXPECT_EQ(genuine.verdict.substr(0, 1), "A");
  for (const bool reflect : {false, true})
    for (const std::string_view proof : {view(genuine.keys->client_proof), view(genuine.keys->server_proof)}) {
      RawConnection attacker(server.address);
      const std::string hello = attacker.receive(kServerHelloBytes);
      const std::string nonce(reflect ? parse_server_hello(hello).nonce : genuine.nonce);
      attacker.send(std::string(kMagic) + nonce + std::string(proof));
      EXPECT_EQ(attacker.receive(kVerdictBytes).substr(0, 1), "R");
    }
}

TEST(StoreAuthentication, ARecordedConnectionCannotBeReplayed) {
  const TestServer server;
  RawClient recorded(server);
  const std::string request = frame_of(make_message(RequestCode::Add, {"count"}, 1), recorded.keys->client_to_server);
  recorded.send(request);
  EXPECT_NE(recorded.receive(4), "");
  RawConnection replay(server.address);
  replay.receive(kServerHelloBytes);
  replay.send(recorded.client_hello + request);
  EXPECT_EQ(replay.receive(kVerdictBytes).substr(0, 1), "R");
  EXPECT_EQ(server.client()->add("count", 0), 1);
}

TEST(StoreAuthentication, ARepeatedReorderedOrChangedFrameClosesTheConnection) {
  const TestServer server;
  const auto request = make_message(RequestCode::Add, {"count"}, 1);
  for (int attack = 0; attack < 40; attack++) {
    RawClient client(server);
    std::string first = frame_of(request, client.keys->client_to_server);
    const std::string second = frame_of(request, client.keys->client_to_server);
    if (attack == 0) client.send(first + first);   // executes one
    if (attack == 1) client.send(second + first);  // executes none
    if (attack == 2) client.send(encode_u32(kMaxBodyBytes + 1) + first);
    if (attack > 2) {
      first[4 + static_cast<size_t>(attack) % (first.size() - 4)] ^= 0x10;
      client.send(first);
    }
    EXPECT_EQ(client.receive(4 + 13 + kDigestBytes).empty(), attack != 0) << attack;
    EXPECT_TRUE(client.is_closed_by_peer()) << attack;
  }
  EXPECT_EQ(server.client()->add("count", 0), 1);
}

// A process without the secret relays the handshake between a client and the server. Then it changes a message.
TEST(StoreAuthentication, ARelayWithoutTheSecretCannotAddOrChangeMessages) {
  const TestServer server;
  for (const bool change_reply : {false, true}) {
    const auto listener = listen_on({"127.0.0.1", 0});
    auto client = std::async(std::launch::async, [&] {
      const auto store = join(listening_address(listener.get()), server.secret);
      EXPECT_ERROR(CommError, store->add("count", 1), "add of key 'count'",
                   change_reply ? "was not made by the server" : "closed the connection");
    });
    RawConnection to_client(accept_one(listener)), to_server(server.address);
    to_client.send(to_server.receive(kServerHelloBytes));
    to_server.send(to_client.receive(kClientHelloBytes));
    to_client.send(to_server.receive(kVerdictBytes));
    std::string request = to_client.receive(4 + 13 + 4 + 5 + kDigestBytes);
    if (!change_reply) request[5] ^= 0x40;  // the summand
    to_server.send(request);
    std::string reply = to_server.receive(4 + 13 + kDigestBytes);
    if (change_reply) {
      reply[5] ^= 0x40;
      to_client.send(reply);
    }
    to_client.socket = Descriptor();
    client.get();
  }
  EXPECT_EQ(server.client()->add("count", 0), 1);  // only the unchanged request was executed
}

TEST(StoreAuthentication, GarbageIsDroppedAndOthersAreServed) {
  const TestServer server;
  const auto owner = server.client();
  std::mt19937 random(5);
  for (int i = 0; i < 200; i++) {
    RawConnection attacker(server.address);
    std::string bytes = random_text(random, 400) + std::string(kClientHelloBytes, 'x');
    if (i % 2) bytes.replace(0, kMagic.size(), kMagic);
    attacker.send(bytes);
    EXPECT_EQ(owner->add("served", 1), i + 1);
  }
  EXPECT_EQ(owner->getNumKeys(), 1);
}

TEST(StoreAuthentication, SilentClientsAreDroppedAndDelayNobody) {
  const TestServer server("127.0.0.1", 300ms);
  std::vector<RawConnection> silent;
  for (int i = 0; i < 100; i++) silent.emplace_back(server.address);
  EXPECT_EQ(server.client(10s)->add("count", 1), 1);
  for (auto& connection : silent) {
    EXPECT_EQ(connection.receive(kServerHelloBytes).size(), kServerHelloBytes);
    EXPECT_TRUE(connection.is_closed_by_peer());
  }
  EXPECT_EQ(StoreServer::kHandshakeLimit, 5s);
}

TEST(StoreAuthentication, TheOldestOfTooManySilentClientsAreReplaced) {
  const TestServer server;
  std::vector<RawConnection> silent;
  for (size_t i = 0; i < ServerLoop::kMaxHandshakes + 20; i++) silent.emplace_back(server.address);
  const auto began = Clock::now();
  EXPECT_EQ(server.client(10s)->add("count", 1), 1);
  EXPECT_EQ(silent.front().receive(kServerHelloBytes).size(), kServerHelloBytes);
  EXPECT_TRUE(silent.front().is_closed_by_peer());
  EXPECT_LT(Clock::now() - began, StoreServer::kHandshakeLimit / 2);
}

TEST(StoreAuthentication, AnotherProgramAtThePortIsNamed) {
  const auto listener = listen_on({"127.0.0.1", 0});
  const SocketAddress address = listening_address(listener.get());
  const std::string where = to_text(address);
  auto client = std::async(std::launch::async, [&] {
    EXPECT_ERROR(CommError, join(address, make_job_secret()), "is not a store of Tessera", where.c_str());
  });
  RawConnection victim(accept_one(listener));
  victim.send("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
  client.get();
}

}  // namespace
}  // namespace tessera::comm::store

#include "tessera/comm/detail/store/authentication.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/store/wire.h"

namespace tessera::comm::store {
namespace {

// The version is part of each label, so no MAC is valid in two versions of the protocol.
constexpr std::string_view kClientProof = "tessera store 1: client proof";
constexpr std::string_view kServerProof = "tessera store 1: server proof";
constexpr std::string_view kClientToServer = "tessera store 1: client to server";
constexpr std::string_view kServerToClient = "tessera store 1: server to client";

}  // namespace

std::string make_job_secret() {
  constexpr char kHexDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : random_bytes(32)) {
    text += kHexDigits[static_cast<uint8_t>(byte) >> 4];
    text += kHexDigits[static_cast<uint8_t>(byte) & 15];
  }
  return text;
}

JobSecret::JobSecret(std::string_view secret) : keyed_(secret) {
  TESSERA_CHECK(secret.size() >= kMinBytes, UsageError, "the secret of the job has ", secret.size(),
                " characters; it needs at least ", kMinBytes,
                ". Set it for all ranks:  export TESSERA_JOB_SECRET=$(openssl rand -hex 32)");
}

// The nonces have a fixed size. So label | nonces has only one reading per label, and no label is a prefix of another.
Digest JobSecret::mac(std::string_view label, std::string_view server_nonce, std::string_view client_nonce) const {
  HmacSha256 mac = keyed_;
  mac.update(label);
  mac.update(server_nonce);
  mac.update(client_nonce);
  return mac.finish();
}

Digest FrameMac::next_tag(std::string_view body) {
  HmacSha256 mac = keyed_;
  mac.update(encode_u64(frame_number_++));
  mac.update(encode_u32(static_cast<uint32_t>(body.size())));
  mac.update(body);
  return mac.finish();
}

ConnectionKeys::ConnectionKeys(const JobSecret& secret, std::string_view server_nonce, std::string_view client_nonce)
    : client_proof(secret.mac(kClientProof, server_nonce, client_nonce)),
      server_proof(secret.mac(kServerProof, server_nonce, client_nonce)),
      client_to_server(secret.mac(kClientToServer, server_nonce, client_nonce)),
      server_to_client(secret.mac(kServerToClient, server_nonce, client_nonce)) {}

std::string seal_frame(std::string_view body, FrameMac& mac) {
  TESSERA_CHECK(body.size() <= kMaxBodyBytes, InternalError, "a frame of ", body.size(), " bytes; at most ",
                kMaxBodyBytes, " are allowed");
  std::string frame = encode_u32(static_cast<uint32_t>(body.size()));
  frame.reserve(frame.size() + body.size() + kDigestBytes);
  frame += body;
  frame += view(mac.next_tag(body));
  return frame;
}

}  // namespace tessera::comm::store

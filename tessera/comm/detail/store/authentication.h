#pragma once
#include "tessera/comm/detail/store/sha256.h"

#include <cstdint>
#include <string>
#include <string_view>

// What both ends of a connection compute from the secret of the job (wire.h has the messages).
namespace tessera::comm::store {

// 64 hexadecimal digits from the random number generator of the kernel. A launcher makes one per job and passes it to
// the ranks in the environment (TESSERA_JOB_SECRET). Never on a command line: every user of the host can read those.
std::string make_job_secret();

// The secret of a job. Checks its length once and keeps the keyed state, not the text.
// Requires: at least kMinBytes bytes. A shorter one can be guessed. Throws UsageError.
class JobSecret {
 public:
  static constexpr size_t kMinBytes = 16;
  explicit JobSecret(std::string_view secret);
  Digest mac(std::string_view label, std::string_view server_nonce, std::string_view client_nonce) const;

 private:
  HmacSha256 keyed_;
};

// The MACs of the frames of one direction, in order. The sender appends tags, the receiver compares them.
class FrameMac {
 public:
  explicit FrameMac(const Digest& direction_key) : keyed_(view(direction_key)) {}
  Digest next_tag(std::string_view body);

 private:
  HmacSha256 keyed_;
  uint64_t frame_number_ = 0;
};

// Everything that the two ends of one connection derive from its nonces.
struct ConnectionKeys {
  ConnectionKeys(const JobSecret& secret, std::string_view server_nonce, std::string_view client_nonce);
  Digest client_proof, server_proof;
  FrameMac client_to_server, server_to_client;
};

// A frame that is ready to send.
// Requires: body.size() <= kMaxBodyBytes.
std::string seal_frame(std::string_view body, FrameMac& mac);

}  // namespace tessera::comm::store

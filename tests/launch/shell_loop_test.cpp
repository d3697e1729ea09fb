// Ranks started by a shell loop that sets RANK, WORLD_SIZE and MASTER_PORT.
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/StringUtil.h>

#include <random>

namespace tessera::testing {
namespace {

// Below the ports that the system gives to connections (32768 and more on Linux): no other program takes it meanwhile.
int free_port() {
  std::random_device random;
  sockaddr_in at{};
  at.sin_family = AF_INET;
  for (;;) {
    const int port = static_cast<int>(10'000 + random() % 20'000), fd = socket(AF_INET, SOCK_STREAM, 0);
    at.sin_port = htons(static_cast<uint16_t>(port));
    const bool is_free = bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0;
    close(fd);
    if (is_free) return port;
  }
}

TEST(ShellLoop, RanksFormOneWorld) {
  const auto ran = shell(c10::str("export MASTER_PORT=", free_port(), " WORLD_SIZE=3;",
                                  "for r in 2 1 0; do RANK=$r \"$PROBE\" sum & done; wait"));
  for (int rank = 0; rank < 3; rank++) EXPECT_CONTAINS(ran.text, c10::str("sum 6 on rank ", rank, " of 3"));
}

// With a secret the store is at MASTER_PORT. Without one, rank 0 takes any port and gives it to its own user only.
TEST(ShellLoop, ListensOnLoopbackOnly) {
  const int port = free_port();
  const auto ran =
      shell(c10::str("export TESSERA_JOB_SECRET=0123456789abcdef MASTER_PORT=", port,
                     " WORLD_SIZE=2; RANK=0 \"$PROBE\" sum & hex=$(printf %04X ", port, ");",
                     "until grep -q \":$hex 0*:0000 0A\" /proc/net/tcp /proc/net/tcp6; do sleep 0.01; done;"
                     "grep -h \":$hex 0*:0000 0A\" /proc/net/tcp /proc/net/tcp6 | sed 's/^[^:]*://; s/:.*//'; "
                     "RANK=1 \"$PROBE\" sum; wait"));
  EXPECT_CONTAINS(ran.text, " 0100007F\n");
  EXPECT_EQ(count(ran.text, " 00000000"), 0) << ran.text;
}

}  // namespace
}  // namespace tessera::testing

#pragma once
#include <chrono>
#include <cstdint>
#include <string>

// Ranks of one machine that know a common name but no port find each other through a socket of that name in Linux's
// abstract namespace: there is no file to leave behind, and the name is free again when rank 0 is gone, however it
// went.
namespace tessera::comm::detail {

// Rank 0: tells `port` to every other rank of the job, and returns when all have it.
void tell_port(const std::string& job, uint16_t port, int64_t ranks, std::chrono::milliseconds timeout);

// The others: the port rank 0 tells; waits for it to be there.
uint16_t ask_port(const std::string& job, std::chrono::milliseconds timeout);

}  // namespace tessera::comm::detail

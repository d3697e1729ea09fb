#pragma once
#include <chrono>
#include <cstdint>
#include <string>

// Rendezvous of ranks on one machine that know a common job name but no port. They use a Unix socket with that name in
// Linux's abstract namespace. It leaves no file, and the name is free again when rank 0 ends, however it ends.
namespace tessera::comm::detail {

// Called by rank 0: sends `port` to every other rank of the job, and returns when all have it.
void publish_port(const std::string& job, uint16_t port, int64_t ranks, std::chrono::milliseconds timeout);

// Called by the other ranks: waits for rank 0 and returns its port.
uint16_t receive_port(const std::string& job, std::chrono::milliseconds timeout);

}  // namespace tessera::comm::detail

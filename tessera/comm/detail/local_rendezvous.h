#pragma once
#include <chrono>
#include <cstdint>
#include <string>

// Rendezvous of ranks on one machine that know a common job name, but no port and no secret. They use a Unix socket
// with that name in Linux's abstract namespace. It leaves no file, and the name is free again when rank 0 ends, however
// it ends. Every user of the machine can open such a socket, so both ends ask the kernel for the user id of the other
// one.
namespace tessera::comm::detail {

// What a rank needs to join the store of rank 0.
struct StoreTicket {
  int64_t port = 0;    // on 127.0.0.1
  std::string secret;  // of the job
};

// Called by rank 0: sends the ticket to every other rank of the job, and returns when all have it. A process of another
// user gets nothing.
void send_store_ticket(const std::string& job, const StoreTicket& ticket, int64_t ranks,
                       std::chrono::milliseconds timeout);

// Called by the other ranks: waits for rank 0 and returns its ticket. A ticket of another user is not accepted.
StoreTicket receive_store_ticket(const std::string& job, std::chrono::milliseconds timeout);

}  // namespace tessera::comm::detail

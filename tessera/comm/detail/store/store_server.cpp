#include "tessera/comm/detail/store/store_server.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/store/server_loop.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace tessera::comm::store {
namespace {

// The server's thread receives no signals, so that the handlers of the program run on the program's threads.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

StoreServer::StoreServer(const SocketAddress& address, std::string_view secret,
                         std::chrono::milliseconds handshake_limit)
    : StoreServer(listen_on(address), secret, handshake_limit) {}

StoreServer::StoreServer(Descriptor listening_socket, std::string_view secret,
                         std::chrono::milliseconds handshake_limit)
    : secret_(secret),
      listening_socket_(std::move(listening_socket)),
      address_(listening_address(listening_socket_.get())),
      stop_event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      owner_(getpid()) {
  TESSERA_CHECK(stop_event_.get() >= 0, CommError, "the store at ", to_text(address_),
                " cannot be stopped without an eventfd: ", std::strerror(errno), "; raise the limit of open files");
  auto loop = std::make_unique<ServerLoop>(listening_socket_.get(), stop_event_.get(), secret_, handshake_limit);
  const AllSignalsBlocked inherited_by_the_thread;
  thread_ = std::make_unique<std::thread>([loop = std::move(loop)] { loop->run(); });
  pthread_setname_np(thread_->native_handle(), "tessera-store");
}

StoreServer::~StoreServer() {
  if (getpid() != owner_) {
    (void)thread_.release();  // the thread is not in this process, and the event belongs to the parent too
    return;
  }
  eventfd_write(stop_event_.get(), 1);
  thread_->join();
}

}  // namespace tessera::comm::store

#include "tessera/launch/signals.h"

#include "tessera/base/error.h"

#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>

namespace tessera::launch {
namespace {

sigset_t watched() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (const auto& row : Signals::kPassedOn) sigaddset(&set, row.signal);
  return set;
}

}  // namespace

Signals::Signals() {
  const sigset_t set = watched();
  pthread_sigmask(SIG_BLOCK, &set, &before_);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &pipe_before_);  // a reader of our output that leaves shows as EPIPE
  fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  TESSERA_CHECK(fd_ >= 0, InternalError, "no signalfd: errno ", errno);
}

Signals::~Signals() {
  close(fd_);
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::vector<int> Signals::read() const {
  std::vector<int> came;
  signalfd_siginfo info{};
  while (::read(fd_, &info, sizeof info) == sizeof info) came.push_back(static_cast<int>(info.ssi_signo));
  return came;
}

void Signals::restore() const {
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

Signals::Delivered::Delivered(const Signals& signals) { pthread_sigmask(SIG_SETMASK, &signals.before_, &ours_); }
Signals::Delivered::~Delivered() { pthread_sigmask(SIG_SETMASK, &ours_, nullptr); }

}  // namespace tessera::launch

#include "tessera/launch/detail/signals.h"

#include "tessera/base/error.h"

#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>

namespace tessera::launch {
namespace {

sigset_t watched(bool stops) {
  sigset_t set;
  sigemptyset(&set);
  if (!stops) sigaddset(&set, SIGCHLD);
  for (const auto& row : Signals::kPassedOn) {
    struct sigaction now {};
    sigaction(row.signal, nullptr, &now);
    if (row.stops == stops && now.sa_handler != SIG_IGN) sigaddset(&set, row.signal);
  }
  return set;
}

}  // namespace

Signals::Signals() {
  const sigset_t others = watched(false), stops = watched(true);
  pthread_sigmask(SIG_BLOCK, &others, &before_);
  pthread_sigmask(SIG_BLOCK, &stops, nullptr);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &pipe_before_);  // a reader of our output that leaves shows as EPIPE
  fd_ = signalfd(-1, &others, SFD_CLOEXEC | SFD_NONBLOCK);
  stop_fd_ = signalfd(-1, &stops, SFD_CLOEXEC | SFD_NONBLOCK);
  TESSERA_CHECK(fd_ >= 0 && stop_fd_ >= 0, InternalError, "no signalfd: errno ", errno);
}

Signals::~Signals() {
  close(fd_);
  close(stop_fd_);
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::vector<int> Signals::read() const {
  std::vector<int> came;
  signalfd_siginfo info{};
  for (const int fd : {fd_, stop_fd_})
    while (::read(fd, &info, sizeof info) == sizeof info) came.push_back(static_cast<int>(info.ssi_signo));
  return came;
}

void Signals::restore() const {
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

Signals::Delivered::Delivered(const Signals& signals) { pthread_sigmask(SIG_SETMASK, &signals.before_, &ours_); }
Signals::Delivered::~Delivered() { pthread_sigmask(SIG_SETMASK, &ours_, nullptr); }

}  // namespace tessera::launch

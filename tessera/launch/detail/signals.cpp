#include "tessera/launch/detail/signals.h"

#include "tessera/base/detail/system_error.h"

#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

namespace tessera::launch {
namespace {

sigset_t signal_set(bool ends_job) {
  sigset_t set;
  sigemptyset(&set);
  if (!ends_job) sigaddset(&set, SIGCHLD);
  const auto add_unless_ignored = [&](int signal) {
    struct sigaction current {};
    sigaction(signal, nullptr, &current);
    if (current.sa_handler != SIG_IGN) sigaddset(&set, signal);
  };
  if (!ends_job) add_unless_ignored(SIGTSTP);
  for (const auto& forwarded : Signals::kForwarded)
    if (forwarded.ends_job == ends_job) add_unless_ignored(forwarded.signal);
  return set;
}

}  // namespace

Signals::Signals() {
  const sigset_t others = signal_set(false), stops = signal_set(true);
  pthread_sigmask(SIG_BLOCK, &others, &original_mask_);
  pthread_sigmask(SIG_BLOCK, &stops, nullptr);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &original_sigpipe_);  // writing to a closed pipe gives EPIPE instead
  fd_ = signalfd(-1, &others, SFD_CLOEXEC | SFD_NONBLOCK);
  stop_fd_ = signalfd(-1, &stops, SFD_CLOEXEC | SFD_NONBLOCK);
  TESSERA_CHECK_ERRNO(fd_ >= 0 && stop_fd_ >= 0, "cannot create a signalfd");
}

Signals::~Signals() {
  close(fd_);
  close(stop_fd_);
  sigaction(SIGPIPE, &original_sigpipe_, nullptr);
  pthread_sigmask(SIG_SETMASK, &original_mask_, nullptr);
}

std::vector<int> Signals::read() const {
  std::vector<int> received;
  signalfd_siginfo info{};
  for (const int fd : {fd_, stop_fd_})
    while (::read(fd, &info, sizeof info) == sizeof info) received.push_back(static_cast<int>(info.ssi_signo));
  return received;
}

void Signals::stop_if_requested() const {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTSTP);
  const timespec no_wait{};
  if (sigtimedwait(&stop, nullptr, &no_wait) == SIGTSTP) raise(SIGSTOP);
}

void Signals::restore() const {
  sigaction(SIGPIPE, &original_sigpipe_, nullptr);
  pthread_sigmask(SIG_SETMASK, &original_mask_, nullptr);
}

Signals::UnblockScope::UnblockScope(const Signals& signals) {
  pthread_sigmask(SIG_SETMASK, &signals.original_mask_, &blocked_);
}
Signals::UnblockScope::~UnblockScope() { pthread_sigmask(SIG_SETMASK, &blocked_, nullptr); }

}  // namespace tessera::launch

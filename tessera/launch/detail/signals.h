#pragma once
#include <csignal>
#include <vector>

namespace tessera::launch {

// While alive, blocks signals to this process and makes them readable through file descriptors, for poll().
// Signals that were ignored before stay ignored, so nohup works. New threads inherit the blocked mask.
// Ranks get the original mask back: see restore().
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  int fd() const { return fd_; }            // readable: a child has exited or stopped, ^Z, or a signal for the ranks
  int stop_fd() const { return stop_fd_; }  // readable: a signal that ends the job
  std::vector<int> read() const;            // pending signals, each once; does not block
  // Stops this process if ^Z (SIGTSTP) is pending, until SIGCONT. For waits without ranks; with ranks, read() returns
  // it.
  void stop_if_requested() const;
  void restore() const;  // restores the original mask; for a child between fork and exec

  // Restores the original mask while alive, so that Ctrl-C interrupts a blocking call.
  class UnblockScope {
   public:
    explicit UnblockScope(const Signals& signals);
    ~UnblockScope();
    UnblockScope(const UnblockScope&) = delete;

   private:
    sigset_t blocked_;
  };

  // Signals that are forwarded to the ranks.
  struct ForwardedSignal {
    int signal;
    bool ends_job;
  };
  static constexpr ForwardedSignal kForwarded[] = {{SIGHUP, true},  {SIGINT, true},   {SIGQUIT, true},
                                                   {SIGTERM, true}, {SIGUSR1, false}, {SIGUSR2, false}};

 private:
  int fd_ = -1, stop_fd_ = -1;
  sigset_t original_mask_{};
  struct sigaction original_sigpipe_ {};
};

}  // namespace tessera::launch

#pragma once
#include <csignal>
#include <vector>

namespace tessera::launch {

// While alive, signals to this process are not delivered but can be read one by one; poll the descriptors with other
// things. Those that were ignored before stay ignored, as nohup wants it. Threads that are made meanwhile do not
// receive them either. Ranks get back what was there before: see restore().
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  int fd() const { return fd_; }            // readable: the end of a child, or a signal for the ranks' own use
  int stop_fd() const { return stop_fd_; }  // readable: a signal that ends the job
  std::vector<int> read() const;            // those that came, each kind once; never waits
  void restore() const;                     // for a new process, between fork and exec

  // Back to normal while alive: for calls that wait by themselves, which Ctrl-C should end.
  class Delivered {
   public:
    explicit Delivered(const Signals& signals);
    ~Delivered();
    Delivered(const Delivered&) = delete;

   private:
    sigset_t ours_;
  };

  // Those that go on to the ranks. `stops`: the job ends with it; the rest are for the ranks' own use.
  struct Row {
    int signal;
    bool stops;
  };
  static constexpr Row kPassedOn[] = {{SIGHUP, true},  {SIGINT, true},   {SIGQUIT, true},
                                      {SIGTERM, true}, {SIGUSR1, false}, {SIGUSR2, false}};

 private:
  int fd_ = -1, stop_fd_ = -1;
  sigset_t before_{};
  struct sigaction pipe_before_ {};
};

}  // namespace tessera::launch

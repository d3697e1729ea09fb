#pragma once
#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

// Merges the output of the ranks line by line.
namespace tessera::launch {

// A file descriptor that lines of all ranks go to: standard output, standard error or a log file. Does not own it.
// A reader that stops reading blocks the ranks, as with any pipe, but does not block the handling of signals: when
// `interrupt_fd` becomes readable while the reader is slow, the rest of the output is dropped.
class OutputSink {
 public:
  explicit OutputSink(int fd, int interrupt_fd = -1) : fd_(fd), interrupt_fd_(interrupt_fd) {}
  void write(std::string_view text);
  bool closed() const { return closed_; }  // the reader has closed its end

 private:
  int fd_, interrupt_fd_;
  bool closed_ = false, dropping_ = false;
};

// One output stream of one rank. Takes bytes and writes complete lines, each with `prefix`. finish() adds the missing
// newline of the last line.
//   feed("a\nb"); feed("c\n"); feed("d"); finish();   ->  "[rank 2] a\n" "[rank 2] bc\n" "[rank 2] d\n"
class LineStream {
 public:
  static constexpr size_t kMaxLineBytes = 1 << 20;  // longer lines are split
  static constexpr size_t kTailLines = 20;          // last lines, kept for the failure report

  // `shown` and `log` may be null. The log gets the bytes without prefix.
  LineStream(std::string prefix, OutputSink* shown, OutputSink* log)
      : prefix_(std::move(prefix)), shown_(shown), log_(log) {}
  void feed(std::string_view bytes);
  void finish();
  const std::deque<std::string>& tail() const { return tail_; }

 private:
  void end_line();
  std::string prefix_, line_, ready_;
  OutputSink *shown_, *log_;
  std::deque<std::string> tail_;
};

}  // namespace tessera::launch

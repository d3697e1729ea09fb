#pragma once
#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

// What ranks print, brought together line by line.
namespace tessera::launch {

// Where lines of all ranks go: our own standard output or error, or a log file. Does not own the descriptor.
// A reader that has stopped reading holds the ranks up, as a pipe would, but not us: when `urgent` becomes readable (a
// signal came) while the reader is slow, what is left is dropped.
class Sink {
 public:
  explicit Sink(int fd, int urgent = -1) : fd_(fd), urgent_(urgent) {}
  void write(std::string_view text);
  bool closed() const { return closed_; }  // the reader has gone

 private:
  int fd_, urgent_;
  bool closed_ = false, dropping_ = false;
};

// One stream of one rank: bytes in, whole lines out, each with `prefix` before it. A last line without its end gets
// one.
//   feed("a\nb"); feed("c\n"); feed("d"); finish();   ->  "[rank 2] a\n" "[rank 2] bc\n" "[rank 2] d\n"
class LineStream {
 public:
  static constexpr size_t kLongestLine = 1 << 20;  // more than that without an end is cut here
  static constexpr size_t kKept = 20;              // last lines, for the report of a failure

  // `shown` and `log` may be null. The log gets the bytes as they are.
  LineStream(std::string prefix, Sink* shown, Sink* log) : prefix_(std::move(prefix)), shown_(shown), log_(log) {}
  void feed(std::string_view bytes);
  void finish();
  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  void end_line();
  std::string prefix_, line_, ready_;
  Sink *shown_, *log_;
  std::deque<std::string> last_lines_;
};

}  // namespace tessera::launch

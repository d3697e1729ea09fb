#include "tessera/launch/detail/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

namespace tessera::launch {
namespace {

struct Pipe {
  int ends[2];
  Pipe() { EXPECT_EQ(pipe2(ends, O_NONBLOCK), 0); }
  ~Pipe() {
    for (const int end : ends) close(end);
  }
  std::string read_all() {
    std::string text(1 << 16, '\0');
    const ssize_t n = read(ends[0], text.data(), text.size());
    text.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return text;
  }
};

TEST(Output, LinesAreWhole) {
  Pipe terminal, log;
  Sink shown(terminal.ends[1]), logged(log.ends[1]);
  LineStream stream("[rank 2] ", &shown, &logged);
  stream.feed("one\ntw");
  EXPECT_EQ(terminal.read_all(), "[rank 2] one\n");
  stream.feed("o\n\nthr");
  EXPECT_EQ(terminal.read_all(), "[rank 2] two\n[rank 2] \n");
  stream.finish();
  EXPECT_EQ(terminal.read_all(), "[rank 2] thr\n");
  EXPECT_EQ(log.read_all(), "one\ntwo\n\nthr");  // as it was printed
  EXPECT_EQ(stream.last_lines(), (std::deque<std::string>{"one", "two", "", "thr"}));
}

TEST(Output, ALineWithoutEndIsCut) {
  LineStream stream("", nullptr, nullptr);
  for (int i = 0; i < 3; i++) stream.feed(std::string(LineStream::kLongestLine / 2, 'x'));
  stream.feed("\n");
  ASSERT_EQ(stream.last_lines().size(), 2u);
  EXPECT_EQ(stream.last_lines()[0].size(), LineStream::kLongestLine);
  EXPECT_EQ(stream.last_lines()[1].size(), LineStream::kLongestLine / 2);
}

TEST(Output, OnlyTheLastLinesAreKept) {
  LineStream stream("", nullptr, nullptr);
  for (size_t i = 0; i < 3 * LineStream::kKept; i++) stream.feed(std::to_string(i) + "\n");
  ASSERT_EQ(stream.last_lines().size(), LineStream::kKept);
  EXPECT_EQ(stream.last_lines().back(), std::to_string(3 * LineStream::kKept - 1));
}

TEST(Output, AReaderThatStoppedReadingDoesNotHoldUpASignal) {
  Pipe terminal, urgent;
  ASSERT_EQ(write(urgent.ends[1], "!", 1), 1);
  Sink sink(terminal.ends[1], urgent.ends[0]);
  sink.write(std::string(1 << 20, 'x'));  // more than a pipe takes, and nobody reads
  EXPECT_FALSE(sink.closed());
}

TEST(Output, AReaderThatHasGoneIsNoticed) {
  signal(SIGPIPE, SIG_IGN);
  Pipe terminal;
  close(terminal.ends[0]);
  terminal.ends[0] = dup(terminal.ends[1]);  // something to close
  Sink sink(terminal.ends[1]);
  sink.write("x");
  EXPECT_TRUE(sink.closed());
}

}  // namespace
}  // namespace tessera::launch

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

TEST(Output, LinesAreWrittenComplete) {
  Pipe terminal, log;
  OutputSink shown(terminal.ends[1]), logged(log.ends[1]);
  LineStream stream("[rank 2] ", &shown, &logged);
  stream.feed("one\ntw");
  EXPECT_EQ(terminal.read_all(), "[rank 2] one\n");
  stream.feed("o\n\nthr");
  EXPECT_EQ(terminal.read_all(), "[rank 2] two\n[rank 2] \n");
  stream.finish();
  EXPECT_EQ(terminal.read_all(), "[rank 2] thr\n");
  EXPECT_EQ(log.read_all(), "one\ntwo\n\nthr");  // without prefix
  EXPECT_EQ(stream.tail(), (std::deque<std::string>{"one", "two", "", "thr"}));
}

TEST(Output, AVeryLongLineIsSplit) {
  LineStream stream("", nullptr, nullptr);
  for (int i = 0; i < 3; i++) stream.feed(std::string(LineStream::kMaxLineBytes / 2, 'x'));
  stream.feed("\n");
  ASSERT_EQ(stream.tail().size(), 2u);
  EXPECT_EQ(stream.tail()[0].size(), LineStream::kMaxLineBytes);
  EXPECT_EQ(stream.tail()[1].size(), LineStream::kMaxLineBytes / 2);
}

TEST(Output, OnlyTheLastLinesAreKept) {
  LineStream stream("", nullptr, nullptr);
  for (size_t i = 0; i < 3 * LineStream::kTailLines; i++) stream.feed(std::to_string(i) + "\n");
  ASSERT_EQ(stream.tail().size(), LineStream::kTailLines);
  EXPECT_EQ(stream.tail().back(), std::to_string(3 * LineStream::kTailLines - 1));
}

TEST(Output, ASlowReaderDoesNotBlockASignal) {
  Pipe terminal, interrupt;
  ASSERT_EQ(write(interrupt.ends[1], "!", 1), 1);
  OutputSink sink(terminal.ends[1], interrupt.ends[0]);
  sink.write(std::string(1 << 20, 'x'));  // more than a pipe takes
  EXPECT_FALSE(sink.closed());
}

TEST(Output, AClosedReaderIsDetected) {
  signal(SIGPIPE, SIG_IGN);
  Pipe terminal;
  close(terminal.ends[0]);
  terminal.ends[0] = dup(terminal.ends[1]);  // so that the destructor has an fd to close
  OutputSink sink(terminal.ends[1]);
  sink.write("x");
  EXPECT_TRUE(sink.closed());
}

}  // namespace
}  // namespace tessera::launch

#include "tessera/train/detail/console.h"

#include <c10/util/StringUtil.h>
#include <sys/ioctl.h>

#include <iomanip>
#include <ostream>
#include <sstream>

namespace tessera::train {
namespace {

enum class Colour : int { Red = 31, Green = 32, Yellow = 33, Blue = 34, Magenta = 35, Cyan = 36 };

std::string with_commas(double number) {  // 6667 -> "6,667"
  const auto digits = std::to_string(static_cast<int64_t>(number + 0.5));
  std::string text;
  for (size_t i = 0; i < digits.size(); i++) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

int64_t terminal_columns(int fd) {
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
}

// Formats "name: value  name: value".
class Fields {
 public:
  explicit Fields(bool colour) : colour_(colour) { text_ << std::fixed; }
  template <class T>
  Fields& add(Colour colour, const char* name, int width, int digits, const T& value, const char* unit = "") {
    if (colour_) text_ << "\x1b[" << static_cast<int>(colour) << 'm';
    text_ << (first_ ? "" : "  ") << name << ": " << std::setw(width) << std::setprecision(digits) << value << unit;
    if (colour_) text_ << "\x1b[39m";
    first_ = false;
    return *this;
  }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  bool colour_, first_ = true;
};

}  // namespace

std::string step_line(const StepMetrics& m, bool colour) {
  Fields fields(colour);
  fields.add(Colour::Red, "step", 2, 0, m.step)
      .add(Colour::Green, "loss", 8, 5, m.loss)
      .add(Colour::Yellow, "grad_norm", 7, 4, m.grad_norm)
      .add(Colour::Blue, "memory", 5, 2, m.memory_gib, "GiB")
      .add(Colour::Blue, "tps", 0, 0, with_commas(m.tokens_per_second))
      .add(Colour::Cyan, "tflops", 0, m.tflops < 0.1 ? 4 : 2, m.tflops);
  if (m.mfu) fields.add(Colour::Magenta, "mfu", 0, 2, *m.mfu, "%");
  if (!m.skipped.empty()) fields.add(Colour::Red, "skipped", 0, 0, m.skipped);
  return fields.text();
}

std::string eval_line(const EvalMetrics& m, bool colour) {
  Fields fields(colour);
  fields.add(Colour::Red, "eval at step", 2, 0, m.step).add(Colour::Green, "loss", 8, 5, m.loss);
  if (m.kind == EvalKind::Answers)
    fields.add(Colour::Green, "exact_match", 0, 2, 100 * m.accuracy, "%");
  else
    fields.add(Colour::Green, "perplexity", 0, 2, m.perplexity());
  if (m.kind == EvalKind::Bytes) fields.add(Colour::Green, "bits_per_byte", 0, 3, m.bits_per_byte());
  fields.add(Colour::Blue, "samples", 0, 0, m.samples);
  return fields.text();
}

Console::Console(std::ostream& out, const ConsoleOptions& options) : out_(out), options_(options) {}

Console::~Console() {
  if (bar_shown_) out_ << "\r\x1b[K" << std::flush;
}

void Console::line(const std::string& text) {
  if (bar_shown_) out_ << "\r\x1b[K";
  bar_shown_ = false;
  out_ << text << std::endl;
}

void Console::on_step(const StepMetrics& metrics) {
  tokens_ += metrics.tokens_per_second * metrics.seconds;
  seconds_ += metrics.seconds;
  if (metrics.step == options_.steps_made + 1 || metrics.step % options_.log_every == 0 || !metrics.skipped.empty()) {
    auto since = metrics;
    since.tokens_per_second = tokens_ / seconds_;
    const double ratio = since.tokens_per_second / metrics.tokens_per_second;
    since.tflops *= ratio;
    if (since.mfu) *since.mfu *= ratio;
    line(step_line(since, options_.colour));
    tokens_ = seconds_ = 0;
  }
  if (options_.terminal >= 0 && metrics.step < options_.steps) draw_bar(metrics.step);
}

void Console::on_eval(const EvalMetrics& metrics) { line(eval_line(metrics, options_.colour)); }

void Console::on_checkpoint(const std::string& path) { line("checkpoint: " + path); }

void Console::draw_bar(int64_t step) {
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const auto steps_done = static_cast<double>(step - options_.steps_made);
  const double left = elapsed * static_cast<double>(options_.steps - step) / steps_done;
  auto text = c10::str(step, "/", options_.steps, "  ", static_cast<int64_t>(left + 0.5), " s left");
  // One line on any terminal: "\r" returns to the start of the last line only, so a bar that wraps would stay.
  const int64_t columns = terminal_columns(options_.terminal) - 1;
  const int64_t width = std::min<int64_t>(30, columns - static_cast<int64_t>(text.size()) - 3);
  if (width >= 5) {
    const auto filled = static_cast<size_t>(width * step / options_.steps);
    text = "[" + std::string(filled, '#') + std::string(static_cast<size_t>(width) - filled, '.') + "] " + text;
  }
  out_ << "\r\x1b[K" << text.substr(0, static_cast<size_t>(columns)) << std::flush;
  bar_shown_ = true;
}

}  // namespace tessera::train

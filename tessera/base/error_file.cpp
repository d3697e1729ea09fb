#include "tessera/base/error_file.h"

#include "tessera/base/detail/settings.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <regex>
#include <typeinfo>

namespace tessera {
namespace {

std::string quoted(const std::string& text) {  // as a JSON string
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// Under another name first: a reader finds all of it or nothing, and link() leaves an earlier error in place.
void write_once(const std::string& path, const std::string& text) {
  const std::string draft = path + "." + std::to_string(getpid());
  const int file = open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return;  // the rank is ending anyway: its exit code has to do
  const bool whole = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(file);
  if (whole) (void)!link(draft.c_str(), path.c_str());
  unlink(draft.c_str());
}

std::atomic<void (*)(const std::string&)> listener = nullptr;

void record(const std::string& message) {
  if (auto* tell = listener.load()) tell(message);
  if (setting_is_set("TORCHELASTIC_ERROR_FILE"))
    write_once(setting("TORCHELASTIC_ERROR_FILE"), detail::error_file_text(message, std::time(nullptr)));
}

std::terminate_handler handler_before = nullptr;

[[noreturn]] void record_and_terminate() {
  if (const auto error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      record_error(known);
    } catch (...) {
      record("an exception that is no std::exception");
    }
  } else {
    record("std::terminate was called");
  }
  if (handler_before) handler_before();
  std::abort();
}

}  // namespace

std::string detail::error_file_text(const std::string& message, int64_t seconds) {
  return "{\"message\": {\"message\": " + quoted(message) + ", \"extraInfo\": {\"timestamp\": \"" +
         std::to_string(seconds) + "\"}}}\n";
}

std::string detail::message_in(const std::string& text) {
  static const std::regex pattern(R"re("message"\s*:\s*")re");
  std::smatch found;
  if (!std::regex_search(text, found, pattern)) return "";
  std::string message;
  for (auto c = found[0].second; c != text.end() && *c != '"'; ++c) {
    if (*c != '\\') {
      message += *c;
      continue;
    }
    if (++c == text.end()) break;
    if (*c == 'n' || *c == 't') {
      message += *c == 'n' ? '\n' : '\t';
    } else if (*c == 'u' && text.end() - c > 4) {
      const int code = std::stoi("0" + std::string(c + 1, c + 5), nullptr, 16);
      message += code < 0x80 ? static_cast<char>(code) : '?';  // for people to read
      c += 4;
    } else {
      message += *c;
    }
  }
  return message;
}

void record_error(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  record(c10::demangle(typeid(error).name()) + ": " + (ours ? ours->what_without_backtrace() : error.what()));
}

void tell_errors_to(void (*to)(const std::string& message)) { listener.store(to); }

void record_uncaught_errors() {
  static std::once_flag once;
  std::call_once(once, [] { handler_before = std::set_terminate(record_and_terminate); });
}

}  // namespace tessera

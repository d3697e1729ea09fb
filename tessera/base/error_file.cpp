#include "tessera/base/error_file.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <mutex>
#include <typeinfo>

namespace tessera {
namespace {

// Writes the text under another name and then links it to `path`. So a reader never finds a part of it, and link()
// keeps an earlier error. Returns whether it wrote the file.
bool write_once(const std::string& path, const std::string& text) {
  const std::string draft = path + "." + std::to_string(getpid());
  const int file = open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return false;  // the rank is ending; the launcher still has its exit code
  const bool complete = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(file);
  const bool linked = complete && link(draft.c_str(), path.c_str()) == 0;
  unlink(draft.c_str());
  return linked;
}

std::atomic<void (*)(const std::string&)> error_callback = nullptr;

// Returns whether the error file has this message. Then the launcher shows it.
bool record(const std::string& message) {
  if (auto* callback = error_callback.load()) callback(message);
  return setting_is_set("TORCHELASTIC_ERROR_FILE") &&
         write_once(setting("TORCHELASTIC_ERROR_FILE"), detail::error_file_text(message, std::time(nullptr)));
}

// "tessera::UsageError: message", with or without the backtrace.
std::string text_of(const std::exception& error, bool backtrace) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10::demangle(typeid(error).name()) + ": " +
         (c10_error && !backtrace ? c10_error->what_without_backtrace() : error.what());
}

std::terminate_handler handler_before = nullptr;

// Reports an error once: by the launcher, or here. The handler of libstdc++ would print it a second time, with a
// backtrace of 20 lines. A handler of the program itself still runs.
[[noreturn]] void record_and_terminate() {
  std::string text = "std::terminate was called";
  bool shown = false;
  const bool backtrace = setting_is_set("TORCH_SHOW_CPP_STACKTRACES");
  if (const auto error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      shown = record(text_of(known, false)) && !backtrace;
      text = text_of(known, backtrace);
    } catch (...) {
      text = "an exception that is not a std::exception";
      shown = record(text);
    }
  } else {
    shown = record(text);
  }
  if (handler_before && handler_before != __gnu_cxx::__verbose_terminate_handler) handler_before();
  if (!shown) std::fprintf(stderr, "%s\n", text.c_str());
  std::abort();
}

}  // namespace

std::string detail::error_file_text(const std::string& message, int64_t seconds) {
  const Json extra = Json::Object{{"timestamp", std::to_string(seconds)}};
  const Json inner = Json::Object{{"message", message}, {"extraInfo", extra}};
  return Json(Json::Object{{"message", inner}}).dump() + "\n";
}

std::string detail::message_in(const std::string& text) {
  try {
    const auto json = Json::parse(text, "the error file");
    const Json* message = json.find("message");
    while (message && !message->get_if<std::string>()) message = message->find("message");
    return message ? message->text() : "";
  } catch (const UsageError&) {  // not JSON: a launcher shows the exit code instead
    return "";
  }
}

void record_error(const std::exception& error) { record(text_of(error, false)); }

void set_error_callback(void (*callback)(const std::string& message)) { error_callback.store(callback); }

void record_uncaught_errors() {
  static std::once_flag once;
  std::call_once(once, [] { handler_before = std::set_terminate(record_and_terminate); });
}

}  // namespace tessera

#include "tessera/base/error_file.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
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

// The last few notes. Threads of one process may note losses at the same time.
struct CulpritNotes {
  static constexpr size_t kKept = 16;
  std::mutex mutex;
  std::deque<std::pair<int64_t, std::string>> notes;  // newest first
};
CulpritNotes& culprit_notes() {
  static auto* const notes = new CulpritNotes;  // never destroyed: threads of a world may outlive main()
  return *notes;
}

// Returns whether the error file has this message. Then the launcher shows it. The file is written first: the other
// ranks fail because of the callback, and the launcher reports the oldest file.
bool record(const std::string& message) {
  const bool written = setting_is_set("TORCHELASTIC_ERROR_FILE") &&
                       write_once(setting("TORCHELASTIC_ERROR_FILE"),
                                  detail::error_file_text(message, std::time(nullptr), detail::culprit_of(message)));
  if (auto* callback = error_callback.load()) callback(message);
  return written;
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

void detail::note_culprit(int64_t rank, const std::string& why) {
  auto& all = culprit_notes();
  const std::lock_guard lock(all.mutex);
  const auto known = std::find(all.notes.begin(), all.notes.end(), std::pair(rank, why));
  if (known != all.notes.end()) return;
  all.notes.emplace_front(rank, why);
  if (all.notes.size() > CulpritNotes::kKept) all.notes.pop_back();
}

int64_t detail::culprit_of(const std::string& message) {
  auto& all = culprit_notes();
  const std::lock_guard lock(all.mutex);
  for (const auto& [rank, why] : all.notes)
    if (message.find(why) != std::string::npos) return rank;
  return -1;
}

std::string detail::error_file_text(const std::string& message, int64_t seconds, int64_t culprit) {
  Json::Object extra{{"timestamp", std::to_string(seconds)}};
  if (culprit >= 0) extra.emplace_back("culprit", std::to_string(culprit));
  const Json inner = Json::Object{{"message", message}, {"extraInfo", Json(extra)}};
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

int64_t detail::culprit_in(const std::string& text) {
  try {
    const auto json = Json::parse(text, "the error file");
    const Json* found = json.find("message");
    for (const char* key : {"extraInfo", "culprit"}) found = found ? found->find(key) : nullptr;
    return found ? std::stoll(found->text()) : -1;
  } catch (const std::exception&) {  // the file of another library
    return -1;
  }
}

void record_error(const std::exception& error) { record(text_of(error, false)); }

void set_error_callback(void (*callback)(const std::string& message)) { error_callback.store(callback); }

void record_uncaught_errors() {
  static std::once_flag once;
  std::call_once(once, [] { handler_before = std::set_terminate(record_and_terminate); });
}

}  // namespace tessera

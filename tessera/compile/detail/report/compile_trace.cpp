#include "tessera/compile/detail/report/compile_trace.h"

#include "tessera/base/detail/text_file.h"
#include "tessera/base/detail/warn_once.h"
#include "tessera/comm/world.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/report/trace_page.h"

#include <c10/util/StringUtil.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <sstream>

namespace tessera::compiler {
namespace {

// Numbers the pages of each folder, kind and rank. Locked, because ranks may be threads.
int64_t next_page_number(const std::string& of) {
  static std::mutex mutex;
  static auto* counts = new std::map<std::string, int64_t>;
  const std::lock_guard lock(mutex);
  return (*counts)[of]++;
}

}  // namespace

TraceSink trace_into(std::string folder) {
  return [folder = std::move(folder)](const CompileTrace& trace) {
    namespace fs = std::filesystem;
    const auto number = next_page_number(c10::str(folder, " ", trace.what, " ", trace.rank));
    const auto path = fs::path(folder) / c10::str(trace.what, "-", number, ".rank", trace.rank, ".html");
    std::error_code failed;
    fs::create_directories(folder, failed);
    std::ostringstream page;
    trace_page(page, trace, path.stem().string());
    try {
      write_text_file(path.string(), page.str());
    } catch (const c10::Error& error) {  // not an error: one rank must not stop alone
      warn_once("compile/trace/" + folder, c10::str("compile: ", error.what_without_backtrace(),
                                                    "; set TESSERA_TRACE_DIR to a folder that can be written to"));
    }
  };
}

TraceRecorder::TraceRecorder(const TraceSink& sink, std::string what, const Program& traced,
                             std::string recompiled_because)
    : sink_(sink) {
  if (!sink_) return;
  trace_.recompiled_because = std::move(recompiled_because);
  trace_.what = std::move(what);
  if (World::has_current()) {
    trace_.rank = World::current().rank();
    trace_.ranks = World::current().size();
  }
  trace_.stages.push_back({{"traced", {}, 0}, traced});
  scope_.emplace(static_cast<PassObserver*>(this));
}

void TraceRecorder::after_pass(const Program& program, const PassReport& report) {
  trace_.stages.push_back({report, program});
}

void TraceRecorder::finish(Executable& executable) {
  if (!sink_) return;
  scope_.reset();
  trace_.stages.push_back({{"runs", {}, 0}, executable.program()});
  trace_.memory = executable.memory();
  executable.time_next_run([sink = sink_, trace = std::move(trace_)](const Executable::NodeTimes& times) mutable {
    trace.milliseconds = times;
    sink(trace);
  });
}

}  // namespace tessera::compiler

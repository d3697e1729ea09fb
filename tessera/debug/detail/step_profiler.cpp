#include "tessera/debug/detail/step_profiler.h"

#include <c10/core/Allocator.h>
#include <c10/util/Logging.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace tessera::debug {
namespace {

int64_t nanoseconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}
int64_t steady_now() { return nanoseconds(std::chrono::steady_clock::now()); }

// LibTorch warns of every tensor that was allocated before the profiler and is freed now. The number of profilers of
// the process counts, because ranks may be threads.
class NoAllocatorWarnings {
 public:
  NoAllocatorWarnings() {
    const std::lock_guard lock(mutex());
    if (users()++ == 0) level() = std::exchange(FLAGS_caffe2_log_level, std::max(FLAGS_caffe2_log_level, 2));
  }
  ~NoAllocatorWarnings() {
    const std::lock_guard lock(mutex());
    if (--users() == 0) FLAGS_caffe2_log_level = level();
  }
  NoAllocatorWarnings(const NoAllocatorWarnings&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex it;
    return it;
  }
  static int& users() {
    static int it = 0;
    return it;
  }
  static int& level() {
    static int it = 0;
    return it;
  }
};

}  // namespace

// The state of LibTorch's thread-local debug info. Backward threads get it too, so it has a mutex.
class StepProfiler::Recorder final : public c10::MemoryReportingInfoBase {
 public:
  struct OpContext final : at::ObserverContext {
    size_t op;
  };

  // The recorder of this thread; null if another profiler is active inside.
  static Recorder* current() {
    return dynamic_cast<Recorder*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
  }

  static std::unique_ptr<at::ObserverContext> begin_op(const at::RecordFunction& function) {
    auto* recorder = current();
    return recorder ? recorder->begin(function.name()) : nullptr;
  }
  static void end_op(const at::RecordFunction&, at::ObserverContext* context) {
    if (auto* recorder = current(); recorder && context) recorder->end(static_cast<OpContext*>(context)->op);
  }

  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    const auto time = steady_now();
    const std::lock_guard lock(mutex_);
    if (!recording_) return;
    bytes_ += size;
    profile_.memory.emplace_back(time - profile_.start, bytes_);
  }

  void start() {
    const std::lock_guard lock(mutex_);
    recording_ = true;
    profile_.start = steady_now();
    profile_.memory = {{0, 0}};
    threads_[std::this_thread::get_id()] = 0;
  }
  StepProfile stop() {
    const std::lock_guard lock(mutex_);
    recording_ = false;
    profile_.duration = steady_now() - profile_.start;
    for (auto& op : profile_.ops)
      if (op.duration < 0) op.duration = profile_.duration - op.start;
    return std::move(profile_);
  }

  void add(const comm::Record& record) {
    const std::lock_guard lock(mutex_);
    if (!recording_ || nanoseconds(record.posted) < profile_.start) return;
    const auto since_start = [&](comm::Record::Time time) { return nanoseconds(time) - profile_.start; };
    // on_done() is called inside of wait(), whose event is the last open one of its name.
    int64_t waited = since_start(record.started);
    for (size_t i = profile_.ops.size(); i-- > 0;)
      if (profile_.ops[i].duration < 0 &&
          profile_.names[static_cast<size_t>(profile_.ops[i].name)] == "tessera::wait") {
        waited = std::max(waited, profile_.ops[i].start);
        break;
      }
    profile_.collectives.push_back({c10::str(record.kind), record.group, static_cast<int64_t>(record.sequence),
                                    record.bytes, since_start(record.posted), since_start(record.started), waited,
                                    since_start(record.done)});
  }

 private:
  std::unique_ptr<at::ObserverContext> begin(const char* name) {
    const auto time = steady_now();
    const std::lock_guard lock(mutex_);
    if (!recording_) return nullptr;
    if (profile_.ops.size() == kMaxProfiledOps) {
      profile_.dropped++;
      return nullptr;
    }
    const auto [known, is_new] = name_index_.emplace(name, static_cast<int64_t>(profile_.names.size()));
    if (is_new) profile_.names.emplace_back(name);
    const auto thread = threads_.emplace(std::this_thread::get_id(), static_cast<int64_t>(threads_.size()));
    auto context = std::make_unique<OpContext>();
    context->op = profile_.ops.size();
    profile_.ops.push_back({known->second, thread.first->second, time - profile_.start, -1});
    return context;
  }
  void end(size_t op) {
    const auto time = steady_now();
    const std::lock_guard lock(mutex_);
    if (recording_ && op < profile_.ops.size())
      profile_.ops[op].duration = time - profile_.start - profile_.ops[op].start;
  }

  NoAllocatorWarnings no_warnings_;
  std::mutex mutex_;
  bool recording_ = false;
  int64_t bytes_ = 0;
  StepProfile profile_;
  std::unordered_map<std::string, int64_t> name_index_;
  std::unordered_map<std::thread::id, int64_t> threads_;
};

StepProfiler::StepProfiler() : recorder_(std::make_shared<Recorder>()) {
  guard_.emplace(c10::DebugInfoKind::PROFILER_STATE, recorder_);
}

StepProfiler::~StepProfiler() {
  if (callback_) at::removeCallback(*callback_);
}

void StepProfiler::start() {
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&Recorder::begin_op, &Recorder::end_op).scopes({at::RecordScope::FUNCTION}));
  comm_scope_.emplace(static_cast<comm::Observer*>(this));
  recorder_->start();
}

StepProfile StepProfiler::stop() {
  auto profile = recorder_->stop();
  comm_scope_.reset();
  if (callback_) at::removeCallback(*std::exchange(callback_, std::nullopt));
  guard_.reset();
  return profile;
}

void StepProfiler::on_done(const comm::Record& record) { recorder_->add(record); }

}  // namespace tessera::debug

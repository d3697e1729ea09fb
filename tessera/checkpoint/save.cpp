#include "tessera/checkpoint/save.h"

#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/background_removal.h"
#include "tessera/checkpoint/detail/saver.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <thread>

namespace tessera::dcp {
namespace {

// The same ranks with a store of their own, for a thread that exchanges texts while the others do, too.
comm::Group group_of_thread(const World& world) {
  const auto& group = world.group();
  if (!group->store()) return group;  // one rank
  // All ranks call async_save in the same order, so this number is the same on all.
  const int64_t number = group->store()->add(c10::str("async_saves/", group->rank()), 1);
  auto store = c10::make_intrusive<c10d::PrefixStore>(c10::str("async_save/", number), group->store());
  return c10::make_intrusive<comm::Communicator>("checkpoint", group->ranks(), group->rank(), group->backend(),
                                                 std::move(store), group->timeout());
}

// Removes what the thread of a save has left in the store.
void remove_keys(const comm::Group& group) {
  if (group->size() == 1 || !group->store()) return;
  group->store()->deleteKey(c10::str("decide/calls/", group->rank()));
  if (group->rank() == 0) group->store()->deleteKey("decide/1/verdict");
}

}  // namespace

void save(const StateDict& dict, const std::string& path, const Values& values, const SaveOptions& options,
          const World& world) {
  const at::NoGradGuard no_grad;
  Saver saver(path, options);
  saver.plan(dict, values, world);
  saver.write(world.group());
}

struct AsyncSave::State {
  State(const std::string& path, const SaveOptions& options) : saver(path, options) {}
  ~State() {
    if (thread.joinable()) thread.join();
    if (!error) return;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& failed) {
      TORCH_WARN("an asynchronous save failed, and nobody waited for it: ", failed.what());
    }
  }

  Saver saver;
  std::thread thread;
  std::atomic<bool> staged = false, done = false, failed = false;
  comm::Group group;         // of the thread
  std::exception_ptr error;  // after done; wait() takes it
};

AsyncSave::AsyncSave() = default;
AsyncSave::AsyncSave(AsyncSave&&) noexcept = default;
AsyncSave& AsyncSave::operator=(AsyncSave&&) noexcept = default;
AsyncSave::~AsyncSave() = default;
AsyncSave::operator bool() const { return state_ != nullptr; }
bool AsyncSave::done() const { return !state_ || state_->done; }
bool AsyncSave::complete() const { return state_ && state_->done && !state_->failed; }

const std::string& AsyncSave::path() const {
  TESSERA_CHECK(state_, UsageError, "this AsyncSave is empty; it has no path");
  return state_->saver.path();
}

void AsyncSave::wait_staging() {
  if (state_) state_->staged.wait(false);
}

void AsyncSave::wait() {
  if (!state_) return;
  if (state_->thread.joinable()) state_->thread.join();
  if (auto error = std::exchange(state_->error, nullptr)) std::rethrow_exception(error);
}

AsyncSave async_save(const StateDict& dict, const std::string& path, const Values& values, const SaveOptions& options,
                     AsyncSave previous, const World& world) {
  const at::NoGradGuard no_grad;
  previous.wait();
  AsyncSave running;
  running.state_ = std::make_unique<AsyncSave::State>(path, options);
  auto& state = *running.state_;
  state.saver.plan(dict, values, world);
  auto memory = previous ? std::move(previous.state_->saver).take_memory() : std::map<std::string, at::Tensor>();
  const auto stage = [&state](std::map<std::string, at::Tensor> memory) {
    state.saver.stage(std::move(memory));
    state.staged = true;
    state.staged.notify_all();
  };
  if (!options.async_staging) stage(std::move(memory));
  if (previous) remove_keys(previous.state_->group);  // all ranks have made the plan, so all have waited
  state.group = group_of_thread(world);
  state.thread = std::thread([&state, stage, memory = std::move(memory)]() mutable {
    try {
      state.saver.write(state.group, [&] {
        if (!state.staged) stage(std::move(memory));
        lower_priority_of_this_thread();  // nobody waits for it from here to the next save
      });
    } catch (...) {
      state.error = std::current_exception();
      state.failed = true;
    }
    state.staged = true;  // also if the copy failed
    state.staged.notify_all();
    state.done = true;
  });
  return running;
}

}  // namespace tessera::dcp

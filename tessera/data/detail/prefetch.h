#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

namespace tessera::data {

// Computes values ahead of time on a background thread, at most `depth` of them. If make() throws, next() rethrows the
// exception at that position, and every later next() too.
// Example:  Prefetch<Batch> batches([&] { return read_batch(dataset, sampler.next().rows); }, 2);
template <class T>
class Prefetch {
 public:
  Prefetch(std::function<T()> make, size_t depth)
      : make_(std::move(make)), depth_(depth), thread_([this](const std::stop_token& stop) { work(stop); }) {}

  T next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !ready_.empty() || error_; });
    if (ready_.empty()) std::rethrow_exception(error_);
    T value = std::move(ready_.front());
    ready_.pop_front();
    changed_.notify_all();
    return value;
  }

 private:
  void work(const std::stop_token& stop) {
    try {
      for (;;) {
        {
          std::unique_lock lock(mutex_);
          if (!changed_.wait(lock, stop, [&] { return ready_.size() < depth_; })) return;
        }
        T value = make_();
        const std::lock_guard lock(mutex_);
        ready_.push_back(std::move(value));
        changed_.notify_all();
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
      changed_.notify_all();
    }
  }

  std::function<T()> make_;
  size_t depth_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<T> ready_;
  std::exception_ptr error_;
  std::jthread thread_;  // last: it uses all other members and must be destroyed first
};

}  // namespace tessera::data

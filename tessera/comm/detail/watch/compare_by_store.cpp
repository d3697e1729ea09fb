#include "tessera/base/error.h"
#include "tessera/comm/detail/region/collective_stamp.h"
#include "tessera/comm/detail/watch/comparer.h"
#include "tessera/comm/detail/watch/store_wait.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

// Each rank puts what it is about to post under "<number>/<rank>"; the first one reads all of them and puts what it
// found under "<number>/verdict". A thread does it, one collective after the other.
namespace tessera::comm::watch {
namespace {

using Bytes = std::vector<uint8_t>;

// Stamp, gives, takes: plain numbers of machines of one kind.
Bytes pack(const region::Stamp& stamp, const Claim& claim) {
  const size_t n = claim.gives.size() * 8;
  Bytes bytes(sizeof stamp + 2 * n);
  std::memcpy(bytes.data(), &stamp, sizeof stamp);
  std::memcpy(bytes.data() + sizeof stamp, claim.gives.data(), n);
  std::memcpy(bytes.data() + sizeof stamp + n, claim.takes.data(), n);
  return bytes;
}
void unpack(const std::string& bytes, region::Stamp& stamp, Claim& claim) {
  const size_t n = claim.gives.size() * 8;
  TESSERA_CHECK(bytes.size() == sizeof stamp + 2 * n, CommError, "the store holds ", bytes.size(),
                " bytes where a rank should have said what it posts");
  std::memcpy(&stamp, bytes.data(), sizeof stamp);
  std::memcpy(claim.gives.data(), bytes.data() + sizeof stamp, n);
  std::memcpy(claim.takes.data(), bytes.data() + sizeof stamp + n, n);
}

class StoreCheck final : public Check {
 public:
  StoreCheck(std::string what, bool passes) : what_(std::move(what)), done_(passes) {}
  bool done() override { return done_.load(std::memory_order_acquire); }
  std::string error() override {
    std::lock_guard lock(mutex_);
    return error_;
  }
  void wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    TESSERA_CHECK(changed_.wait_for(lock, timeout, [&] { return done(); }), CommError, what_, ": waited ",
                  static_cast<double>(timeout.count()) / 1000.0, " s for all ranks to post it; not all have");
    TESSERA_CHECK(error_.empty(), CommError, error_);
  }
  void finish(const std::string& error) {
    {
      std::lock_guard lock(mutex_);
      error_ = error;
      done_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
  }

 private:
  const std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_;
  std::string error_;
};

class StoreComparer final : public Comparer {
 public:
  StoreComparer(const ConnectOptions& options, uint64_t most)
      : options_(options), most_(most), store_(most > 0 ? options.store->clone() : nullptr) {}
  ~StoreComparer() override { leave(); }

  CheckPtr post(const region::Stamp& stamp, const Claim& claim, const std::function<void()>& then) override {
    std::lock_guard lock(mutex_);
    TESSERA_CHECK(poison_.empty(), CommError, in(stamp, poison_));
    const bool passes = posted_ >= most_;
    auto check = std::make_shared<StoreCheck>(in(stamp, ""), passes);
    if (passes) return check;
    jobs_.push_back({posted_++, stamp, claim, check, then});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    wake_.notify_one();
    return check;
  }

  void poison(const std::string& reason) override {
    std::lock_guard lock(mutex_);
    if (poison_.empty()) poison_ = reason;
  }
  void leave() override {
    poison(c10::str("rank ", global(options_.rank), " has left group '", options_.group, "'"));
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
  }

 private:
  struct Job {
    uint64_t number;
    region::Stamp stamp;
    Claim claim;
    std::shared_ptr<StoreCheck> check;
    std::function<void()> then;
  };

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      std::string error = poison_;
      lock.unlock();
      if (error.empty()) try {
          error = compare(job);
        } catch (const c10::Error& failure) {
          error = failure.what_without_backtrace();
        } catch (const std::exception& failure) {
          error = failure.what();
        }
      job.check->finish(error.empty() ? "" : in(job.stamp, error));
      if (job.then) job.then();
      lock.lock();
    }
  }

  std::string compare(const Job& job) {
    const auto key = [&](const auto& part) { return c10::str(job.number, "/", part); };
    if (options_.rank != 0) {
      store_->set(key(options_.rank), pack(job.stamp, job.claim));
      return wait(key("verdict"));
    }
    std::vector<Claim> claims(static_cast<size_t>(options_.size), job.claim);
    std::string verdict;
    for (int r = 1; r < options_.size; r++) {
      region::Stamp theirs{};
      unpack(wait(key(r)), theirs, claims[static_cast<size_t>(r)]);
      if (verdict.empty()) verdict = difference(job.stamp, theirs, global(0), global(r));
      store_->deleteKey(key(r));
    }
    if (verdict.empty()) verdict = difference_of_sizes(claims, options_.ranks);
    store_->set(key("verdict"), Bytes(verdict.begin(), verdict.end()));
    if (job.number > 0) store_->deleteKey(c10::str(job.number - 1, "/verdict"));  // all have read it
    return verdict;
  }

  std::string wait(const std::string& key) {
    return wait_for_key(*store_, key, options_.timeout, [&] {
      std::lock_guard lock(mutex_);
      return poison_;
    });
  }

  int64_t global(int rank) const { return options_.ranks[static_cast<size_t>(rank)]; }
  std::string in(const region::Stamp& stamp, const std::string& why) const {
    const std::string operation = describe(stamp);
    if (why.find(operation) != std::string::npos)
      return c10::str("ranks disagree on group '", options_.group, "': ", why);
    return c10::str("rank ", global(options_.rank), ", ", operation, " on group '", options_.group, "' (ranks ",
                    c10::Join(",", options_.ranks), ")", why.empty() ? "" : ": ", why);
  }

  const ConnectOptions options_;
  const uint64_t most_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  uint64_t posted_ = 0;
  std::string poison_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace

std::shared_ptr<Comparer> compare_by_store(const ConnectOptions& options, uint64_t most) {
  return std::make_shared<StoreComparer>(options, most);
}

}  // namespace tessera::comm::watch

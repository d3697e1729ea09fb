#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/detail/odd_rank_out.h"
#include "tessera/comm/detail/region/collective_fingerprint.h"
#include "tessera/comm/detail/watch/comparer.h"
#include "tessera/comm/detail/watch/store_wait.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

// Each rank stores what it is about to post under "<number>/<rank>". Rank 0 reads all of them and stores the result
// under "<number>/verdict". A thread compares one collective after the other.
namespace tessera::comm::watch {
namespace {

using Bytes = std::vector<uint8_t>;

// Fingerprint, send, recv, as raw bytes. All machines must have the same byte order.
Bytes pack(const region::CollectiveFingerprint& fingerprint, const SendRecvBytes& sizes) {
  const size_t n = sizes.send.size() * 8;
  Bytes bytes(sizeof fingerprint + 2 * n);
  std::memcpy(bytes.data(), &fingerprint, sizeof fingerprint);
  std::memcpy(bytes.data() + sizeof fingerprint, sizes.send.data(), n);
  std::memcpy(bytes.data() + sizeof fingerprint + n, sizes.recv.data(), n);
  return bytes;
}
void unpack(const std::string& bytes, region::CollectiveFingerprint& fingerprint, SendRecvBytes& sizes) {
  const size_t n = sizes.send.size() * 8;
  TESSERA_CHECK(bytes.size() == sizeof fingerprint + 2 * n, CommError, "the store holds ", bytes.size(),
                " bytes where the fingerprint of a collective is expected");
  std::memcpy(&fingerprint, bytes.data(), sizeof fingerprint);
  std::memcpy(sizes.send.data(), bytes.data() + sizeof fingerprint, n);
  std::memcpy(sizes.recv.data(), bytes.data() + sizeof fingerprint + n, n);
}

class StoreCheck final : public PendingCheck {
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
                  static_cast<double>(timeout.count()) / 1000.0, " s for all ranks to post it");
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
  StoreComparer(const ConnectOptions& options, uint64_t max_compared)
      : options_(options), max_compared_(max_compared), store_(max_compared > 0 ? options.store->clone() : nullptr) {}
  ~StoreComparer() override { leave(); }

  PendingCheckPtr post(const region::CollectiveFingerprint& fingerprint, const SendRecvBytes& sizes,
                       const std::function<void()>& then) override {
    std::lock_guard lock(mutex_);
    TESSERA_CHECK(abort_reason_.empty(), CommError, with_context(fingerprint, abort_reason_));
    const bool passes = posted_ >= max_compared_;
    auto check = std::make_shared<StoreCheck>(with_context(fingerprint, ""), passes);
    if (passes) return check;
    comparisons_.push_back({posted_++, fingerprint, sizes, check, then});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    wake_.notify_one();
    return check;
  }

  void abort_with(const std::string& reason) override {
    std::lock_guard lock(mutex_);
    if (abort_reason_.empty()) abort_reason_ = reason;
  }
  void leave() override {
    abort_with(c10::str("rank ", global(options_.rank), " has left group '", options_.group, "'"));
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
  }

 private:
  struct Comparison {
    uint64_t number;
    region::CollectiveFingerprint fingerprint;
    SendRecvBytes sizes;
    std::shared_ptr<StoreCheck> check;
    std::function<void()> then;
  };

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || !comparisons_.empty(); });
      if (comparisons_.empty()) return;
      Comparison comparison = std::move(comparisons_.front());
      comparisons_.pop_front();
      std::string error = abort_reason_;
      lock.unlock();
      if (error.empty()) try {
          error = compare(comparison);
        } catch (const c10::Error& failure) {
          error = failure.what_without_backtrace();
        } catch (const std::exception& failure) {
          error = failure.what();
        }
      comparison.check->finish(error.empty() ? "" : with_context(comparison.fingerprint, error));
      if (comparison.then) comparison.then();
      lock.lock();
    }
  }

  std::string compare(const Comparison& comparison) {
    const auto key = [&](const auto& part) { return c10::str(comparison.number, "/", part); };
    if (options_.rank != 0) {
      store_->set(key(options_.rank), pack(comparison.fingerprint, comparison.sizes));
      const std::string verdict = wait(key("verdict"));  // "culprit text"
      const size_t space = verdict.find(' ');
      if (space == std::string::npos) return "";
      const std::string text = verdict.substr(space + 1);
      if (const int64_t culprit = std::stoll(verdict); culprit >= 0) tessera::detail::note_culprit(culprit, text);
      return text;
    }
    std::vector<SendRecvBytes> all_sizes(static_cast<size_t>(options_.size), comparison.sizes);
    std::vector<region::CollectiveFingerprint> all(static_cast<size_t>(options_.size), comparison.fingerprint);
    for (int r = 1; r < options_.size; r++) {
      unpack(wait(key(r)), all[static_cast<size_t>(r)], all_sizes[static_cast<size_t>(r)]);
      store_->deleteKey(key(r));
    }
    std::string verdict = difference_of_fingerprints(all);
    if (verdict.empty()) verdict = difference_of_sizes(all_sizes, options_.ranks);
    const std::string stored = verdict.empty() ? "" : c10::str(tessera::detail::culprit_of(verdict), " ", verdict);
    store_->set(key("verdict"), Bytes(stored.begin(), stored.end()));
    if (comparison.number > 0)
      store_->deleteKey(c10::str(comparison.number - 1, "/verdict"));  // all ranks have read it
    return verdict;
  }

  std::string difference_of_fingerprints(const std::vector<region::CollectiveFingerprint>& all) const {
    const auto compared = [&](int a, int b) {
      return difference(all[static_cast<size_t>(a)], all[static_cast<size_t>(b)], global(a), global(b));
    };
    std::string first;
    for (int r = 1; r < options_.size && first.empty(); r++) first = compared(0, r);
    if (first.empty()) return "";
    const int odd = odd_rank_out(options_.size, [&](int a, int b) { return compared(a, b).empty(); });
    if (odd < 0) return first;
    const std::string why =
        c10::str("rank ", global(odd), " differs from most ranks: ", odd == 0 ? first : compared(0, odd));
    tessera::detail::note_culprit(global(odd), why);
    return why;
  }

  std::string wait(const std::string& key) {
    return wait_for_key(*store_, key, options_.timeout, [&] {
      std::lock_guard lock(mutex_);
      return abort_reason_;
    });
  }

  int64_t global(int rank) const { return options_.ranks[static_cast<size_t>(rank)]; }
  std::string with_context(const region::CollectiveFingerprint& fingerprint, const std::string& why) const {
    const std::string operation = describe(fingerprint);
    if (why.find(operation) != std::string::npos)
      return c10::str("ranks disagree on group '", options_.group, "': ", why);
    return c10::str("rank ", global(options_.rank), ", ", operation, " on group '", options_.group, "' (ranks ",
                    c10::Join(",", options_.ranks), ")", why.empty() ? "" : ": ", why);
  }

  const ConnectOptions options_;
  const uint64_t max_compared_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Comparison> comparisons_;
  uint64_t posted_ = 0;
  std::string abort_reason_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace

std::shared_ptr<Comparer> compare_by_store(const ConnectOptions& options, uint64_t max_compared) {
  return std::make_shared<StoreComparer>(options, max_compared);
}

}  // namespace tessera::comm::watch

#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/detail/odd_rank_out.h"
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/region/exchange.h"
#include "tessera/comm/detail/region/shared_region.h"
#include "tessera/comm/detail/watch/comparer.h"

#include <cstring>
#include <future>

// A comparison is an all_gather of SendRecvBytes. The region compares the fingerprints, as for every collective.
namespace tessera::comm::watch {
namespace {

using region::Exchange;
using region::Transfer;

// [send, recv] of every rank, concatenated in `all`. `own` is the row of this rank, which is sent.
struct SizeTable {
  SizeTable(const SendRecvBytes& sizes, size_t ranks) : own(sizes.send), all(ranks * 2 * ranks) {
    own.insert(own.end(), sizes.recv.begin(), sizes.recv.end());
  }
  std::vector<SendRecvBytes> rows() const {
    const size_t n = own.size() / 2;
    std::vector<SendRecvBytes> list(n, SendRecvBytes(static_cast<int>(n)));
    for (size_t r = 0; r < n; r++) {
      const int64_t* row = all.data() + r * 2 * n;
      list[r].send.assign(row, row + n);
      list[r].recv.assign(row + n, row + 2 * n);
    }
    return list;
  }
  std::vector<int64_t> own, all;
};

class RegionCheck final : public PendingCheck {
 public:
  RegionCheck(std::shared_ptr<Exchange> exchange, region::OperationPtr operation)
      : exchange_(std::move(exchange)), operation_(std::move(operation)) {}
  bool done() override { return operation_->done.load(std::memory_order_acquire); }
  std::string error() override { return exchange_->error_of(*operation_); }
  void wait(std::chrono::milliseconds timeout) override { exchange_->wait(*operation_, timeout); }

 private:
  std::shared_ptr<Exchange> exchange_;
  region::OperationPtr operation_;
};

class RegionComparer final : public Comparer {
 public:
  explicit RegionComparer(const ConnectOptions& options) : ranks_(options.ranks) {
    region::RegionLayout layout;  // small: only SendRecvBytes are sent
    layout.ranks = options.size;
    layout.slot_bytes = 64 + (16 * options.size + 63) / 64 * 64;
    layout.staging_bytes = layout.channel_bytes = 64 * options.size;
    region_ = region::connect_shared_region(options, layout);
    exchange_ = std::make_shared<Exchange>(region_, options.rank, region::GroupInfo{options.group, options.ranks},
                                           Exchange::Options{options.timeout, /*spin=*/false});
  }

  PendingCheckPtr post(const region::CollectiveFingerprint& fingerprint, const SendRecvBytes& sizes,
                       const std::function<void()>& then) override {
    const size_t n = ranks_.size();
    auto table = std::make_shared<SizeTable>(sizes, n);
    const auto bytes = [](int64_t* at, size_t count) {
      return region::Bytes{reinterpret_cast<char*>(at), static_cast<int64_t>(8 * count)};
    };
    Transfer t;
    t.fingerprint = fingerprint;
    t.inputs.push_back(bytes(table->own.data(), 2 * n));
    for (size_t r = 0; r < n; r++) t.outputs.push_back(bytes(table->all.data() + r * 2 * n, 2 * n));
    t.finish = [table, ranks = ranks_] {
      const std::string text = difference_of_sizes(table->rows(), ranks);
      TESSERA_CHECK(text.empty(), CommError, text);
    };
    auto operation = exchange_->post(std::move(t));
    if (then) exchange_->future(*operation, {})->addCallback([then](auto&) { then(); });
    return std::make_shared<RegionCheck>(exchange_, std::move(operation));
  }

  void abort_with(const std::string& reason) override { region_->abort(reason); }
  void leave() override { exchange_->leave(/*internal_collectives=*/1); }

 private:
  std::vector<int64_t> ranks_;
  std::shared_ptr<region::Region> region_;
  std::shared_ptr<Exchange> exchange_;
};

}  // namespace

std::string difference_of_sizes(const std::vector<SendRecvBytes>& all_sizes, const std::vector<int64_t>& ranks) {
  const auto mismatch = [&](size_t r, size_t s) {
    const int64_t expected = all_sizes[r].recv[s], posted = all_sizes[s].send[r];
    return expected >= 0 && posted >= 0 && expected != posted;
  };
  const auto text = [&](size_t r, size_t s) {
    return c10::str("rank ", ranks[r], " expects ", all_sizes[r].recv[s], " bytes from rank ", ranks[s],
                    ", which posted ", all_sizes[s].send[r]);
  };
  std::string first;
  for (size_t r = 0; r < all_sizes.size() && first.empty(); r++)
    for (size_t s = 0; s < all_sizes.size() && first.empty(); s++)
      if (mismatch(r, s)) first = text(r, s);
  if (first.empty()) return "";
  const int odd = odd_rank_out(static_cast<int>(ranks.size()), [&](int a, int b) {
    const auto r = static_cast<size_t>(a), s = static_cast<size_t>(b);
    return !mismatch(r, s) && !mismatch(s, r);
  });
  if (odd < 0) return "ranks disagree: " + first;
  const auto culprit = static_cast<size_t>(odd);
  for (size_t r = all_sizes.size(); r-- > 0;)
    if (mismatch(r, culprit)) first = text(r, culprit);
  const std::string why = c10::str("ranks disagree: rank ", ranks[culprit], " differs from most ranks: ", first);
  tessera::detail::note_culprit(ranks[culprit], why);
  return why;
}

std::shared_ptr<Comparer> compare_by_region(const ConnectOptions& options) {
  auto comparer = std::make_shared<RegionComparer>(options);
  region::CollectiveFingerprint connecting{};
  connecting.kind = static_cast<uint8_t>(CommKind::Barrier);
  connecting.dtype = static_cast<uint8_t>(c10::ScalarType::Undefined);
  connecting.root = -1;
  std::strncpy(connecting.tensor_name, "connecting", sizeof(connecting.tensor_name) - 1);
  // The monitor does not know this group yet, so a rank that is lost now does not abort it.
  const auto connected = std::make_shared<std::promise<void>>();
  const auto check = comparer->post(connecting, SendRecvBytes(options.size), [connected] { connected->set_value(); });
  const auto done = connected->get_future();
  try {
    while (done.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready)
      if (const std::string why = options.lost ? options.lost() : ""; !why.empty()) {
        comparer->abort_with(why);
        TESSERA_FAIL(CommError, why);
      }
    check->wait(options.timeout);
  } catch (...) {
    comparer->leave();  // ends its progress thread
    throw;
  }
  return comparer;
}

}  // namespace tessera::comm::watch

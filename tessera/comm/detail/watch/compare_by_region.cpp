#include "tessera/base/error.h"
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/region/exchange.h"
#include "tessera/comm/detail/region/shared_region.h"
#include "tessera/comm/detail/watch/comparer.h"

#include <cstring>

// A comparison is an all_gather of claims in which the region compares the stamps, as it does for every collective.
namespace tessera::comm::watch {
namespace {

using region::Exchange;
using region::Transfer;

// [gives, takes] of every rank, one after the other; `own` is this rank's, which is sent.
struct Sheet {
  Sheet(const Claim& claim, size_t ranks) : own(claim.gives), all(ranks * 2 * ranks) {
    own.insert(own.end(), claim.takes.begin(), claim.takes.end());
  }
  std::vector<Claim> claims() const {
    const size_t n = own.size() / 2;
    std::vector<Claim> list(n, Claim(static_cast<int>(n)));
    for (size_t r = 0; r < n; r++) {
      const int64_t* row = all.data() + r * 2 * n;
      list[r].gives.assign(row, row + n);
      list[r].takes.assign(row + n, row + 2 * n);
    }
    return list;
  }
  std::vector<int64_t> own, all;
};

class RegionCheck final : public Check {
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
    region::Layout layout;  // claims are all that travels
    layout.ranks = options.size;
    layout.slot_bytes = 64 + (16 * options.size + 63) / 64 * 64;
    layout.stage_bytes = layout.mail_bytes = 64 * options.size;
    region_ = region::meet_in_shared_memory(options, layout);
    exchange_ = std::make_shared<Exchange>(region_, options.rank, region::Names{options.group, options.ranks},
                                           Exchange::Options{options.timeout, /*spin=*/false});
  }

  CheckPtr post(const region::Stamp& stamp, const Claim& claim, const std::function<void()>& then) override {
    const size_t n = ranks_.size();
    auto sheet = std::make_shared<Sheet>(claim, n);
    const auto bytes = [](int64_t* at, size_t count) {
      return region::Bytes{reinterpret_cast<char*>(at), static_cast<int64_t>(8 * count)};
    };
    Transfer t;
    t.stamp = stamp;
    t.gives.push_back(bytes(sheet->own.data(), 2 * n));
    for (size_t r = 0; r < n; r++) t.takes.push_back(bytes(sheet->all.data() + r * 2 * n, 2 * n));
    t.finish = [sheet, ranks = ranks_] {
      const std::string text = difference_of_sizes(sheet->claims(), ranks);
      TESSERA_CHECK(text.empty(), CommError, text);
    };
    auto operation = exchange_->post(std::move(t));
    if (then) exchange_->future(*operation, {})->addCallback([then](auto&) { then(); });
    return std::make_shared<RegionCheck>(exchange_, std::move(operation));
  }

  void poison(const std::string& reason) override { region_->poison(reason); }
  void leave() override { exchange_->leave(/*uncounted=*/1); }  // the hello

 private:
  std::vector<int64_t> ranks_;
  std::shared_ptr<region::Region> region_;
  std::shared_ptr<Exchange> exchange_;
};

}  // namespace

std::string difference_of_sizes(const std::vector<Claim>& claims, const std::vector<int64_t>& ranks) {
  for (size_t r = 0; r < claims.size(); r++)
    for (size_t s = 0; s < claims.size(); s++) {
      const int64_t expected = claims[r].takes[s], posted = claims[s].gives[r];
      if (expected >= 0 && posted >= 0 && expected != posted)
        return c10::str("ranks disagree: rank ", ranks[r], " expects ", expected, " bytes from rank ", ranks[s],
                        ", which posted ", posted);
    }
  return "";
}

std::shared_ptr<Comparer> compare_by_region(const ConnectOptions& options) {
  auto comparer = std::make_shared<RegionComparer>(options);
  region::Stamp hello{};
  hello.kind = static_cast<uint8_t>(Kind::Barrier);
  hello.dtype = static_cast<uint8_t>(c10::ScalarType::Undefined);
  hello.root = -1;
  std::strncpy(hello.tensor_name, "connecting", sizeof(hello.tensor_name) - 1);
  comparer->post(hello, Claim(options.size), {})->wait(options.timeout);
  return comparer;
}

}  // namespace tessera::comm::watch

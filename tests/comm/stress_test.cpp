// Random collectives on random sub-groups, several in flight at a time. Each result is compared with a value computed
// from the inputs of all members. All ranks draw the same random numbers, so each rank can compute all inputs.
#include "tessera/comm/communicator.h"
#include "tessera/testing/ranks.h"
#include "tessera/testing/spawn.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>

namespace tessera {
namespace {

using testing::Rank;
using Tensors = std::vector<at::Tensor>;

// The input of rank `r` in collective `q`: small integers, exact in every dtype, so that sums can be compared bit by
// bit. It must be cheap, because there are ten thousand collectives.
at::Tensor input(int64_t q, int64_t r, int64_t numel, at::ScalarType dtype) {
  static const at::Tensor ramp = at::arange(1 << 20).remainder(7);
  return ramp.narrow(0, (q * 31 + r * 17) % 1000, numel).to(dtype);
}

struct Pending {
  comm::Work work;
  at::Tensor got, want;
  std::string what;
};

class Stress {
 public:
  Stress(Rank& me, uint64_t seed) : me_(me), random_(seed) {
    const int64_t n = me.size();
    for (int64_t bits = 1; bits < (1 << n); bits++) {  // every sub-group of two or more
      std::vector<int64_t> ranks;
      for (int64_t r = 0; r < n; r++)
        if (bits >> r & 1) ranks.push_back(r);
      if (ranks.size() < 2) continue;
      if (draw(2)) std::reverse(ranks.begin(), ranks.end());
      members_.push_back(ranks);
      const bool mine = std::find(ranks.begin(), ranks.end(), me.rank) != ranks.end();
      groups_.push_back(mine ? me.world.new_group(ranks) : comm::Group());
    }
  }

  void run(int64_t collectives) {
    for (int64_t q = 0; q < collectives; q++) {
      post(q);
      if (draw(4) == 0) wait_until_left(static_cast<size_t>(draw(6)));
    }
    wait_until_left(0);
  }

 private:
  int64_t draw(int64_t below) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(below)); }
  int64_t draw_numel() {  // mostly small; some are larger than a slot, a few have several chunks
    const int64_t which = draw(100);
    return which < 70 ? draw(50) : which < 95 ? draw(6'000) : which < 99 ? draw(60'000) : draw(400'000);
  }

  void post(int64_t q) {
    const size_t which = static_cast<size_t>(draw(static_cast<int64_t>(groups_.size())));
    const auto& ranks = members_[which];
    const int64_t n = static_cast<int64_t>(ranks.size()), kind = draw(7), numel = draw_numel(), root = draw(n);
    const auto dtype = std::array{at::kFloat, at::kBFloat16, at::kLong, at::kDouble}[static_cast<size_t>(draw(4))];
    const comm::Group& group = groups_[which];
    if (!group) return;
    const auto input_of = [&](int64_t place, int64_t count) {
      return input(q, ranks[static_cast<size_t>(place)], count, dtype);
    };
    const auto all = [&](int64_t count) {
      Tensors xs;
      for (int64_t p = 0; p < n; p++) xs.push_back(input_of(p, count));
      return xs;
    };
    const auto sum = [&](int64_t count) { return at::stack(all(count)).sum(0, false, at::kDouble).to(dtype); };
    const int64_t here = group->rank();
    Pending p;
    p.what = c10::str("#", q, ", kind ", kind, ", ", numel, " of ", dtype, " on ", group->name());
    at::Tensor mine = input_of(here, numel).clone();
    switch (kind) {
      case 0:
        p.got = mine;
        p.want = sum(numel);
        p.work = group->all_reduce(p.got, ReduceOp::Sum);
        break;
      case 1:
        p.got = at::empty({n * numel}, dtype);
        p.want = at::cat(all(numel));
        p.work = group->all_gather_into_tensor(p.got, mine);
        break;
      case 2:
        p.got = at::empty({numel}, dtype);
        p.want = sum(n * numel).narrow(0, here * numel, numel);
        p.work = group->reduce_scatter_tensor(p.got, input_of(here, n * numel).contiguous(), ReduceOp::Sum);
        break;
      case 3:
        p.got = mine;
        p.want = input_of(root, numel);
        p.work = group->broadcast(p.got, root);
        break;
      case 4: {  // rank i sends i + 1 parts to each rank
        const int64_t part = numel / (n * n) + 1;
        std::vector<int64_t> in(static_cast<size_t>(n), part * (here + 1)), out;
        Tensors wants;
        for (int64_t p = 0; p < n; p++) {
          out.push_back(part * (p + 1));
          wants.push_back(input_of(p, n * part * (p + 1)).narrow(0, here * part * (p + 1), part * (p + 1)));
        }
        p.want = at::cat(wants);
        p.got = at::empty_like(p.want);
        p.work = group->all_to_all_single(p.got, input_of(here, n * part * (here + 1)).contiguous(), out, in);
        break;
      }
      case 5:
        p.got = mine;
        p.want = here == root ? sum(numel) : mine.clone();
        p.work = group->reduce(p.got, root, ReduceOp::Sum);
        break;
      case 6: {  // a ring of messages
        p.got = at::empty({numel}, dtype);
        p.want = input_of((here + n - 1) % n, numel);
        auto sent = group->send(mine, (here + 1) % n, static_cast<int>(q));
        p.work = group->recv(p.got, (here + n - 1) % n, static_cast<int>(q));
        p.work.then([sent]() mutable { sent.wait(); });
        break;
      }
    }
    pending_.push_back(std::move(p));
  }

  // Waits, in random order, until `left` collectives are in flight.
  void wait_until_left(size_t left) {
    while (pending_.size() > left) {
      const size_t i = own_() % pending_.size();
      Pending p = std::move(pending_[i]);
      pending_.erase(pending_.begin() + static_cast<ptrdiff_t>(i));
      p.work.wait();
      ASSERT_TRUE(p.got.equal(p.want)) << p.what << ", rank " << me_.rank;
    }
  }

  Rank& me_;
  std::mt19937_64 random_;                                   // the same on all ranks
  std::mt19937 own_{static_cast<uint32_t>(me_.rank) + 100};  // different on each rank
  std::vector<std::vector<int64_t>> members_;
  std::vector<comm::Group> groups_;
  std::vector<Pending> pending_;
};

TEST(Stress, ThreadsOverAnonymousMemory) {
  testing::run_ranks(4, [](Rank& me) { Stress(me, 1).run(4000); });
}
TEST(Stress, ThreadsOverSharedMemory) {
  testing::run_ranks(3, [](Rank& me) { Stress(me, 2).run(2000); }, {.backend = "shm"});
}
TEST(Stress, Processes) {
  testing::spawn_ranks(4, [](Rank& me) { Stress(me, 3).run(4000); }, {.backend = "shm"});
}

}  // namespace
}  // namespace tessera

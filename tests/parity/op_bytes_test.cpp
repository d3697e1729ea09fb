// The bytes that redistributions move, beside PyTorch's DTensor: every entry of op_db with single-axis placements on
// four ranks. tests/parity/op_bytes.py counted PyTorch's bytes. Ops run on rank 0 of a fake world, without
// communication.
#include "op_db_replay.h"

#include "tessera/comm/detail/fake_world.h"
#include "tessera/dtensor/detail/observer.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/headeronly/version.h>
#include <cstdlib>
#include <iostream>
#include <map>
#include <set>

namespace tessera::parity {
namespace {

constexpr int64_t kRanks = 4;

// Bytes that leave a rank when one axis is redistributed; the same formula is in op_bytes.py.
int64_t moved_bytes(const Placement& from, const Placement& to, int64_t bytes) {
  if (from == to || from.is_replicate()) return 0;
  if (from.is_partial()) return (to.is_replicate() ? 2 : 1) * bytes * (kRanks - 1) / kRanks;
  if (!to.is_sharded()) return bytes * (kRanks - 1) / kRanks;
  return bytes * (kRanks - 1) / kRanks / kRanks;
}

// One redistribution that an op inserts.
struct MoveOfOp {
  std::string op, from, to;
  int64_t bytes = 0;
};

class ByteCounter final : public tessera::detail::OpObserver {
 public:
  ByteCounter() { tessera::detail::op_observer() = this; }
  ~ByteCounter() override { tessera::detail::op_observer() = nullptr; }
  ByteCounter(const ByteCounter&) = delete;

  void begin_op(const propagate::OpEntry& entry, c10::ArrayRef<const TensorSpec*>) override { op_ = entry.name; }
  void redistributes(int, const TensorSpec& from, const TensorSpec& to, bool) override {
    const auto bytes = moved_bytes(from.placements[0], to.placements[0],
                                   from.numel() * static_cast<int64_t>(c10::elementSize(from.dtype)));
    if (bytes > 0) moves.push_back({op_, c10::str(from.placements[0]), c10::str(to.placements[0]), bytes});
  }
  void redistributed() override {}
  void end_op(c10::ArrayRef<const TensorSpec*>) override {}

  std::vector<MoveOfOp> moves;

 private:
  std::string op_;
};

at::Tensor place_as(const at::Tensor& t, const std::string& placement, const DeviceMesh& mesh) {
  // A copy: the redistribution of a tensor that shares memory with a plain one is not cached.
  if (placement == "P") return DTensor::from_local(t, mesh, {Partial()}).clone();
  return distribute_tensor(t, mesh, parse_placements("[" + placement + "]"));
}

struct Counted {
  std::vector<MoveOfOp> moves;
  int64_t to_replicate = 0;  // bytes to make the results replicated after the program
  std::string error;         // empty if nothing was thrown

  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& move : moves) sum += move.bytes;
    return sum;
  }
  std::string text() const {
    std::string text;
    for (const auto& move : moves) text += c10::str(move.op, " ", move.from, " to ", move.to, "; ");
    return text;
  }
};

Counted count_bytes(const OpDb& db, size_t number, const Json& placements, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const ImplicitReplication plain_is_replicated;
  std::vector<IValue> values;
  for (size_t i = 0; i < placements.items().size(); i++)
    values.emplace_back(place_as(db.input(number, i), placements.items()[i].text(), mesh));
  ByteCounter counter;
  int64_t to_replicate = 0;
  try {
    Replay run(std::move(values));
    for (const auto& node : db.program(number).at("nodes").items()) run.run(node);
    for (const auto& output : db.program(number).at("outputs").items()) {
      const auto result = run.value(output.number()).toTensor();
      if (is_dtensor(result))
        to_replicate += moved_bytes(DTensor(result).placements()[0], Replicate(),
                                    result.numel() * static_cast<int64_t>(result.element_size()));
    }
  } catch (const std::exception& e) {
    const std::string text = e.what();
    return {{}, 0, text.substr(0, text.find('\n'))};
  }
  return {std::move(counter.moves), to_replicate, ""};
}

constexpr const char* kProduct =
    "a partial factor is reduced before its first product, once for all products that use it (query, key, value), "
    "unless "
    "the result is smaller; PyTorch's product is partial, and each product is reduced";
constexpr const char* kAllReduce =
    "all-reduce where PyTorch reduce-scatters: its result is sharded, and the next use gathers it";
constexpr const char* kBool = "the result is bool, which not every backend reduces";
constexpr const char* kMemory = "reads the memory or the positions of the full tensor";
constexpr const char* kSlices =
    "a loop over chunks reads and writes slices of a sharded dim, which are gathered one by one";
constexpr const char* kWindow = "a window spans shards, so its dim is gathered, and the result is replicated";

// Redistributions that are more than PyTorch's, and why. A case may exceed PyTorch by the bytes of such redistributions
// alone. `from` is the start of the placement.
const struct ByteReason {
  const char* op;
  const char* from;
  const char* reason;
} kByteReasons[] = {
    {"aten::addmm", "P", kProduct},
    {"aten::div.Tensor", "P", kProduct},
    {"aten::dot", "P", kProduct},
    {"aten::mul.Tensor", "P", kProduct},
    {"aten::embedding", "P", kAllReduce},
    {"aten::clamp", "P", kAllReduce},
    {"aten::exp", "P", kAllReduce},
    {"aten::log", "P", kAllReduce},
    {"aten::lt.Scalar", "P", kAllReduce},
    {"aten::any", "S", kBool},
    {"aten::linalg_pinv.atol_rtol_tensor", "", kMemory},
    {"aten::nll_loss_forward", "S", kMemory},
    {"aten::gather", "S", kSlices},
    {"aten::index_add", "S", kSlices},
    {"aten::index_select", "S", kSlices},
    {"aten::slice.Tensor", "S", kSlices},
    {"aten::slice_scatter", "", kSlices},
    {"aten::avg_pool2d", "S", kWindow},
};

const ByteReason* reason_for(const MoveOfOp& move) {
  for (const auto& row : kByteReasons)
    if (move.op == row.op && move.from.starts_with(row.from)) return &row;
  return nullptr;
}

TEST(OpBytes, NoMoreThanPyTorch) {
  const char* given = std::getenv("TESSERA_OP_DB");
  if (TORCH_VERSION_MINOR != 13 && !given)
    GTEST_SKIP() << "LibTorch " TORCH_VERSION
                    "; the entries are those of 2.13: set TESSERA_OP_DB to a dump of this one";
  at::set_num_threads(1);
  const std::string folder = given ? given : TESSERA_PARITY_SCRIPTS "/op_db";
  const OpDb db(folder);
  const auto pytorch = Json::parse(read_text_file(folder + "/op_bytes.json", "PyTorch's bytes"), "op_bytes.json");
  const FakeWorld world(kRanks);
  const auto mesh = init_device_mesh("cpu", {kRanks}, {"x"});
  int64_t fewer = 0, equal = 0, more = 0, only_here = 0, wrong_there = 0, deferred = 0;
  std::map<std::string, int64_t> cases_by_reason;
  std::set<const ByteReason*> used;
  for (const auto& program : pytorch.at("programs").items()) {
    const auto& name = program.at("name").text();
    for (const auto& entry : program.at("cases").items()) {
      const auto& placements = entry.items()[0];
      const auto* theirs = entry.items()[1].get_if<int64_t>();
      const auto ours = count_bytes(db, static_cast<size_t>(program.at("program").number()), placements, mesh);
      const bool raised = !ours.error.empty();
      if (raised || !theirs) {
        only_here += !raised;
        wrong_there += !theirs && entry.items()[1].text() == "wrong";
        if (raised && theirs)
          std::cout << "  " << name << "  " << placements.dump() << " raises: " << ours.error << '\n';
        continue;
      }
      fewer += ours.bytes() < *theirs;
      equal += ours.bytes() == *theirs;
      more += ours.bytes() > *theirs;
      if (ours.bytes() <= *theirs) continue;
      // PyTorch's result is partial, or sharded: to read it takes the bytes that were moved here before.
      if (ours.bytes() + ours.to_replicate <= *theirs + entry.items()[2].number()) {
        deferred++;
        continue;
      }
      int64_t without_reason = 0;
      std::set<std::string> reasons;
      for (const auto& move : ours.moves)
        if (const auto* row = reason_for(move)) {
          reasons.insert(row->reason);
          used.insert(row);
        } else {
          without_reason += move.bytes;
        }
      for (const auto& reason : reasons) cases_by_reason[reason]++;
      if (std::getenv("TESSERA_OP_BYTES_LIST"))
        std::cout << "  " << name << "  " << placements.dump() << " moves " << ours.bytes() << " bytes, PyTorch "
                  << *theirs << ": " << ours.text() << '\n';
      EXPECT_LE(given ? 0 : without_reason, *theirs) << name << "  " << placements.dump() << " moves " << ours.bytes()
                                                     << " bytes, PyTorch " << *theirs << ": " << ours.text();
    }
  }
  std::cout << "bytes moved beside PyTorch's DTensor, 4 ranks: fewer in " << fewer << " cases, equal in " << equal
            << ", more in " << more << "; PyTorch raises or is wrong (" << wrong_there << ") in " << only_here
            << " others, which run here\n";
  std::cout << "  more in " << deferred << ": no more once the results are replicated, too\n";
  for (const auto& row : kByteReasons) {
    const bool needed = given || used.contains(&row);
    EXPECT_TRUE(needed) << "no case needs the reason for " << row.op << " from " << row.from;
  }
  for (const auto& [reason, cases] : cases_by_reason) std::cout << "  more in " << cases << ": " << reason << '\n';
  EXPECT_GE(fewer, 100);
}

}  // namespace
}  // namespace tessera::parity

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

#include <cstdlib>
#include <iostream>
#include <map>

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

class ByteCounter final : public tessera::detail::OpObserver {
 public:
  ByteCounter() { tessera::detail::op_observer() = this; }
  ~ByteCounter() override { tessera::detail::op_observer() = nullptr; }
  ByteCounter(const ByteCounter&) = delete;

  void begin_op(const propagate::OpEntry& entry, c10::ArrayRef<const TensorSpec*>) override { op_ = entry.name; }
  void redistributes(int, const TensorSpec& from, const TensorSpec& to, bool) override {
    const auto moved = moved_bytes(from.placements[0], to.placements[0],
                                   from.numel() * static_cast<int64_t>(c10::elementSize(from.dtype)));
    bytes += moved;
    if (moved > 0) text += c10::str(op_, " ", to_string(from.placements[0]), " to ", to_string(to.placements[0]), "; ");
  }
  void redistributed() override {}
  void end_op(c10::ArrayRef<const TensorSpec*>) override {}

  int64_t bytes = 0;
  std::string text;

 private:
  std::string op_;
};

at::Tensor place_as(const at::Tensor& t, const std::string& placement, const DeviceMesh& mesh) {
  if (placement == "P") return DTensor::from_local(t, mesh, {Partial()});
  return distribute_tensor(t, mesh, parse_placements("[" + placement + "]"));
}

struct Counted {
  int64_t bytes = 0;
  std::string text;  // the redistributions, or the error
  bool raised = false;
};

Counted count_bytes(const OpDb& db, size_t number, const Json& placements, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const ImplicitReplication plain_is_replicated;
  std::vector<IValue> values;
  for (size_t i = 0; i < placements.items().size(); i++)
    values.emplace_back(place_as(db.input(number, i), placements.items()[i].text(), mesh));
  ByteCounter counter;
  try {
    Replay run(std::move(values));
    for (const auto& node : db.program(number).at("nodes").items()) run.run(node);
  } catch (const std::exception& e) {
    const std::string text = e.what();
    return {0, text.substr(0, text.find('\n')), true};
  }
  return {counter.bytes, counter.text};
}

// Cases that move more bytes than PyTorch's DTensor. Most have a partial input: products, pooling, padding and sorting
// reduce it first, so that the result is not partial. This number may only fall.
constexpr int64_t kMostCasesWithMore = 199;

TEST(OpBytes, NoMoreThanPyTorch) {
  at::set_num_threads(1);
  const char* given = std::getenv("TESSERA_OP_DB");
  const std::string folder = given ? given : TESSERA_PARITY_SCRIPTS "/op_db";
  const OpDb db(folder);
  const auto pytorch = Json::parse(read_text_file(folder + "/op_bytes.json", "PyTorch's bytes"), "op_bytes.json");
  const FakeWorld world(kRanks);
  const auto mesh = init_device_mesh("cpu", {kRanks}, {"x"});
  int64_t fewer = 0, equal = 0, more = 0, only_here = 0;
  std::map<std::string, std::string> unexpected;
  for (const auto& program : pytorch.at("programs").items()) {
    const auto& name = program.at("name").text();
    for (const auto& entry : program.at("cases").items()) {
      const auto& placements = entry.items()[0];
      const auto* theirs = entry.items()[1].get_if<int64_t>();
      const auto ours = count_bytes(db, static_cast<size_t>(program.at("program").number()), placements, mesh);
      if (ours.raised || !theirs) {
        only_here += !ours.raised;
        if (ours.raised && theirs) unexpected.emplace(name, placements.dump() + " raises: " + ours.text);
        continue;
      }
      fewer += ours.bytes < *theirs;
      equal += ours.bytes == *theirs;
      more += ours.bytes > *theirs;
      if (ours.bytes > *theirs)
        unexpected.emplace(
            name, c10::str(placements.dump(), " moves ", ours.bytes, " bytes, PyTorch ", *theirs, ": ", ours.text));
    }
  }
  if (given)
    for (const auto& [name, why] : unexpected) std::cout << "  " << name << "  " << why << '\n';
  std::cout << "bytes moved beside PyTorch's DTensor, 4 ranks: fewer in " << fewer << " cases, equal in " << equal
            << ", more in " << more << "; PyTorch raises in " << only_here << " more, which run here\n";
  EXPECT_GE(fewer, 100);
  EXPECT_LE(given ? 0 : more, kMostCasesWithMore);
}

}  // namespace
}  // namespace tessera::parity

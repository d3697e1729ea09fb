// Property: a checkpoint with damaged bytes gives an error that names the damaged file, or exactly what was saved.
#include "new_folder.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;

const Values kDamageValues{{"step", 1234}, {"seed", 42}, {"rate", 0.25}, {"model", "GPT2(n_layer=2)"}};

StateDict damage_dict(const DeviceMesh& mesh, bool filled) {
  const auto value = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    const auto t = at::arange(c10::multiply_integers(sizes), at::kFloat).sin().mul(100).to(dtype).view(sizes);
    return filled ? t : at::zeros_like(t);
  };
  const auto sharded = [&](at::IntArrayRef sizes, int64_t dim) {
    return distribute_tensor(value(sizes, at::kFloat), mesh, {Shard(dim)}, {.src_data_rank = {}});
  };
  return {
      {"w", sharded({7, 5}, 0)},       {"v", sharded({7, 5}, 0)},  // the sizes of w: a changed name must not swap them
      {"t", sharded({4, 6}, 1)},       {"long", value({5}, at::kLong)},
      {"half", value({6}, at::kHalf)}, {"scalar", value({}, at::kDouble)}};
}

enum class Damage : uint8_t { Bit, Byte, Bytes, Truncated, Swapped };

// Returns the damaged bytes. They can be equal to the given ones.
std::string damaged(std::string bytes, Damage kind, std::mt19937_64& random) {
  const auto place = [&] { return random() % bytes.size(); };
  switch (kind) {
    case Damage::Bit:
      bytes[place()] ^= static_cast<char>(1 << random() % 8);
      break;
    case Damage::Byte:
      bytes[place()] = static_cast<char>(random());
      break;
    case Damage::Bytes:
      for (size_t i = 0, n = 1 + random() % 8; i < n; i++) bytes[place()] = static_cast<char>('0' + random() % 10);
      break;
    case Damage::Truncated:
      bytes.resize(place());
      break;
    case Damage::Swapped:
      std::swap(bytes[place()], bytes[place()]);
      break;
  }
  return bytes;
}

TEST(Damage, IsAnErrorThatNamesTheFileOrChangesNothing) {
  const NewFolder folder;
  const auto path = folder / "x";
  testing::run_ranks(
      2, [&](testing::Rank& me) { save(damage_dict(me.mesh("dp=2"), true), path, kDamageValues, {.sync = false}); });
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  ASSERT_EQ(files.size(), 3u);  // two ranks and the manifest
  constexpr int kRounds = 100;  // per file
  testing::run_ranks(1, [&](testing::Rank& me) {
    std::mt19937_64 random(7);
    const auto mesh = me.mesh("dp=1");
    const auto wanted = damage_dict(mesh, true);
    const auto local = [](const at::Tensor& t) { return is_dtensor(t) ? DTensor(t).to_local() : t; };
    int silent = 0, unnamed = 0, refused = 0;
    std::string example;
    for (const auto& file : files) {
      const auto good = read(file);
      for (int round = 0; round < kRounds; round++) {
        const auto bad = damaged(good, static_cast<Damage>(round % 5), random);
        write(file, bad);
        const auto found = damage_dict(mesh, false);
        std::string error;
        try {
          const bool same_values = read_values(path) == kDamageValues;
          load(found, path);
          bool same = same_values;
          for (const auto& [name, tensor] : wanted) same = same && local(found.at(name)).equal(local(tensor));
          if (!same) silent++, example = c10::str("round ", round, " of ", file, " loads other values");
        } catch (const c10::Error& thrown) {
          error = thrown.what_without_backtrace();
          refused++;
          if (error.find(fs::path(file).filename().string()) == error.npos) unnamed++, example = error;
          for (const auto& [name, tensor] : found)
            EXPECT_TRUE(local(tensor).equal(at::zeros_like(local(tensor)))) << name << " changed, then: " << error;
        }
      }
      write(file, good);
    }
    EXPECT_EQ(silent, 0) << "of " << kRounds * 3 << "; " << example;
    EXPECT_EQ(unnamed, 0) << "of " << refused << "; " << example;
    EXPECT_GT(refused, kRounds) << "the damage has an effect";
    const auto found = damage_dict(mesh, false);
    EXPECT_TRUE(load(found, path).empty());  // the files are as they were
  });
}

// Checkpoints of version 1 have no checksum of the manifest.
TEST(Damage, OldManifestsAreRead) {
  const NewFolder folder;
  testing::run_ranks(1, [&](testing::Rank&) { save({{"w", at::ones({4})}}, folder / "x", {{"step", 3}}); });
  auto text = read(folder / "x/tessera.json");
  const auto last = text.rfind(",\"crc32c\":");
  ASSERT_NE(last, text.npos);
  text = text.substr(0, last) + "}\n";
  const auto version = text.find("\"tessera_checkpoint\":2");
  ASSERT_NE(version, text.npos);
  const auto without = text;
  text[version + 21] = '1';
  write(folder / "x/tessera.json", text);
  const auto w = at::zeros({4});
  testing::run_ranks(1, [&](testing::Rank&) { load({{"w", w}}, folder / "x"); });
  EXPECT_TRUE(w.equal(at::ones({4})));
  EXPECT_EQ(read_values(folder / "x"), (Values{{"step", 3}}));
  write(folder / "x/tessera.json", without);
  EXPECT_ERROR(UsageError, open_source(folder / "x"), "tessera.json", "no checksum");
}

}  // namespace
}  // namespace tessera::dcp

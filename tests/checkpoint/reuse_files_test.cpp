// A save overwrites the files of a checkpoint that is superfluous, unless somebody could see that.
#include "new_folder.h"
#include "tessera/checkpoint/detail/background_removal.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/checkpoint/save.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "/shard-00001-model-00001-of-00001.safetensors";

uint64_t inode(const std::string& path) {
  struct stat found {};
  return stat(path.c_str(), &found) == 0 ? found.st_ino : 0;
}

class ReuseFiles : public ::testing::Test {
 protected:
  std::string path(int64_t step) const { return step_folder(folder_.path(), step); }
  void save_step(int64_t step, int64_t numbers = 1000, bool reuse_files = true) const {
    testing::run_ranks(1, [&](testing::Rank&) {
      save({{"w", at::full({numbers}, static_cast<double>(step))}}, path(step), {},
           {.keep_latest = 1, .reuse_files = reuse_files});
    });
  }
  void expect_loads(int64_t step, int64_t numbers = 1000) const {
    const auto w = at::zeros({numbers});
    testing::run_ranks(1, [&](testing::Rank&) { load({{"w", w}}, path(step)); });
    EXPECT_TRUE(w.equal(at::full({numbers}, static_cast<double>(step)))) << step;
  }
  std::vector<std::string> partial() const { return partial_folders(folder_.path()); }

  const NewFolder folder_;
};

TEST_F(ReuseFiles, TheNextSaveOverwritesAsManyBytesAsItNeeds) {
  save_step(1);
  const auto first = inode(path(1) + kFile);
  save_step(2);
  EXPECT_EQ(partial(), std::vector{path(1) + ".partial"});
  save_step(3, 3000);
  EXPECT_EQ(inode(path(3) + kFile), first);
  expect_loads(3, 3000);
  save_step(4);
  save_step(5, 10);  // the file of step 3 is longer
  EXPECT_EQ(inode(path(5) + kFile), first);
  EXPECT_LT(fs::file_size(path(5) + kFile), 1000);
  expect_loads(5, 10);
  remove_left_folders();
  EXPECT_EQ(partial(), std::vector<std::string>());
}

TEST_F(ReuseFiles, AFileThatIsMappedIsNotOverwritten) {
  save_step(1);
  const auto old = [&] {  // the tensor keeps the file mapped, and no descriptor open
    const SafetensorsFile file(path(1) + kFile);
    return file.tensor(*file.find("w"));
  }();
  save_step(2);
  save_step(3);
  EXPECT_TRUE(old.equal(at::full({1000}, 1.0)));
  expect_loads(3);
}

TEST_F(ReuseFiles, AFileWithASecondNameIsNotOverwritten) {
  save_step(1);
  fs::create_hard_link(path(1) + kFile, folder_ / "kept.safetensors");
  save_step(2);
  save_step(3);
  const SafetensorsFile kept(folder_ / "kept.safetensors");
  EXPECT_TRUE(kept.tensor(*kept.find("w")).equal(at::full({1000}, 1.0)));
  expect_loads(3);
}

// The name of a .partial folder can be a link into a folder that is not ours.
TEST_F(ReuseFiles, ALinkIsRemovedAndNotFollowed) {
  const auto other = folder_ / "other";
  fs::create_directory(other);
  fs::copy_file("/proc/self/cmdline", other + "/file");
  fs::create_directory_symlink(other, path(9) + ".partial");
  save_step(1);
  fs::create_directory_symlink(other, path(2) + ".partial");
  save_step(2);
  EXPECT_TRUE(fs::exists(other + "/file"));
  EXPECT_EQ(std::distance(fs::directory_iterator(other), {}), 1);
  expect_loads(2);
}

TEST_F(ReuseFiles, WithoutTheOptionOldCheckpointsAreRemoved) {
  save_step(1);
  save_step(2, 1000, false);
  wait_for_removals();
  EXPECT_EQ(partial(), std::vector<std::string>());
  fs::create_directory(path(1) + ".partial");  // what a crash leaves
  save_step(3, 1000, false);
  wait_for_removals();
  EXPECT_EQ(partial(), std::vector<std::string>());
  expect_loads(3);
}

}  // namespace
}  // namespace tessera::dcp

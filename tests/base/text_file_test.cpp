// Files are written in full or not at all, and the errno of a failure decides who can fix it.
#include "tessera/base/detail/text_file.h"

#include "tessera/base/detail/system_error.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

namespace tessera {
namespace {

namespace fs = std::filesystem;

class TextFile : public ::testing::Test {
 protected:
  TextFile() {
    std::string pattern = "/tmp/tessera-text-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~TextFile() override { fs::remove_all(folder_); }
  std::string at(const std::string& name) const { return folder_ + "/" + name; }
  size_t files() const { return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {})); }
  std::string folder_;
};

// A limit on file sizes: a write fails in the middle, as on a full disk.
struct SmallDisk {
  explicit SmallDisk(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small{bytes, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
  }
  ~SmallDisk() { setrlimit(RLIMIT_FSIZE, &before); }
  rlimit before{};
};

TEST(SystemErrors, TheMachineOrThePath) {
  for (const int error : {ENOSPC, EDQUOT, EIO, EFBIG, ENOMEM, EMFILE, ENFILE})
    EXPECT_ERROR(SystemError, raise_errno(error, "cannot write 'x'"), "cannot write 'x': ");
  for (const int error : {ENOENT, EACCES, ENOTDIR, EISDIR, EEXIST, EROFS, EPERM, ENAMETOOLONG, ELOOP})
    EXPECT_ERROR(UsageError, raise_errno(error, "cannot write 'x'"), "cannot write 'x': ");
}

TEST_F(TextFile, AFullDiskKeepsTheOldFile) {
  write_text_file(at("x"), "old");
  fs::create_symlink("x", at("link"));
  {
    const SmallDisk disk(1000);
    for (const std::string name : {"x", "link", "new"})
      EXPECT_ERROR(SystemError, write_text_file(at(name), std::string(5000, 'n')), "cannot write '", name.c_str(),
                   "File too large");
  }
  EXPECT_EQ(read_text_file(at("x"), "it"), "old");
  EXPECT_EQ(files(), 2u);  // no temporary file
  write_text_file(at("link"), "changed");
  EXPECT_EQ(read_text_file(at("x"), "it"), "changed");
  EXPECT_TRUE(fs::is_symlink(at("link")));
  write_text_file("/dev/null", "a device is not replaced");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_ERROR(SystemError, write_text_file("/dev/full", "x"), "cannot write '/dev/full': No space left on device");
  EXPECT_ERROR(UsageError, write_text_file(at("no/x"), "x"), "No such file or directory");
}

TEST_F(TextFile, AppendsAllOfALineOrNothing) {
  AppendedFile file(at("x"), false);
  file.append("one\n");
  {
    const SmallDisk disk(10);
    EXPECT_ERROR(SystemError, file.append("two and more than the disk has\n"), "File too large");
    EXPECT_EQ(read_text_file(at("x"), "it"), "one\n");
  }
  file.append("three\n");
  EXPECT_EQ(read_text_file(at("x"), "it"), "one\nthree\n");
  AppendedFile(at("x"), true).append("four\n");
  EXPECT_EQ(read_text_file(at("x"), "it"), "one\nthree\nfour\n");
  EXPECT_ERROR(UsageError, read_text_file(folder_, "the plan"), "cannot read the plan '", "Is a directory");
  EXPECT_ERROR(UsageError, AppendedFile(folder_, true), "Is a directory");
}

}  // namespace
}  // namespace tessera

#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

// The current folder while it lives, for blocks that write files. Removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() : before_(std::filesystem::current_path()) {
    std::string pattern = ::testing::TempDir() + "docsXXXXXX";
    path_ = mkdtemp(pattern.data());
    std::filesystem::current_path(path_);
  }
  ~TemporaryFolder() {
    std::filesystem::current_path(before_);
    std::filesystem::remove_all(path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;

 private:
  std::filesystem::path before_, path_;
};

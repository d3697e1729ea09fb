#pragma once
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace tessera::dcp {

// A temporary folder that is removed after the test.
class NewFolder {
 public:
  NewFolder() {
    if (!mkdtemp(path_.data())) throw std::runtime_error("cannot create the folder " + path_);
  }
  ~NewFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/tessera-checkpoint-XXXXXX";
};

inline std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace tessera::dcp

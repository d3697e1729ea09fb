#pragma once
#include <cstdint>
#include <span>
#include <string>

// Durable file operations. All throw UsageError for a wrong path and SystemError for a full disk (system_error.h), with
// the path and the system's error message.
namespace tessera::dcp {

// A file that is written from its start.
class NewFile {
 public:
  // `bytes`, if given: the size that it will have. The space is reserved, so a full disk is an error at once; the size
  // that the file system shows grows with what is written.
  // An existing file is an error. With `replace` it is removed, or overwritten in place if nobody else can see that: no
  // process has it open or mapped, and it has no other name. Then its blocks and its pages in memory serve again.
  explicit NewFile(std::string path, int64_t bytes = 0, bool replace = false);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void finish(bool sync);  // must be the last call; reports errors of delayed writes

 private:
  std::string path_;
  int fd_;
  int64_t written_ = 0, flushed_ = 0;
};

void write_file(const std::string& path, const std::string& text, bool sync);
void sync_folder(const std::string& path);  // makes created, renamed and removed names durable

// Renames `from` to `to` atomically. If `to` exists and `replace` is set, exchanges the two atomically, so that `to`
// always exists. Returns whether it exchanged them.
bool rename_folder(const std::string& from, const std::string& to, bool replace);

}  // namespace tessera::dcp

#pragma once
#include <string>
#include <string_view>

// Text files: read in one call, replaced in one step, or appended in full lines. Errors are those of system_error.h and
// name the file.
namespace tessera {

// The contents of a file or pipe. `what` names it in errors, as in "cannot read the plan file 'x': Is a directory".
std::string read_text_file(const std::string& path, const std::string& what);

// Writes a file under a temporary name and renames it. So after an error or a crash, `path` is as before. A device or
// pipe, such as /dev/stdout, is written directly.
void write_text_file(const std::string& path, std::string_view text);

// A file that grows.
class AppendedFile {
 public:
  // Opens the file at its end, or creates it. `keep`: false removes its contents.
  AppendedFile(std::string path, bool keep);
  ~AppendedFile();
  AppendedFile(const AppendedFile&) = delete;
  AppendedFile& operator=(const AppendedFile&) = delete;

  // If the disk is full, nothing of `text` stays in the file.
  void append(std::string_view text);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_;
};

}  // namespace tessera

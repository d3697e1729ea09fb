#pragma once
#include <span>
#include <string>

// Writing so that it stays written. All throw UsageError with the path and what the system says.
namespace tessera::dcp {

// A new file; what is there already is an error.
class NewFile {
 public:
  explicit NewFile(std::string path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void finish(bool sync);  // the last call: errors that come late come here

 private:
  std::string path_;
  int fd_;
};

void write_file(const std::string& path, const std::string& text, bool sync);
void sync_folder(const std::string& path);  // names in it: files that were made, renamed, removed

// `from` takes the name `to` at one instant. If there is something of that name already and `replace` is set, the two
// change places, at one instant too, so that there always is a `to`; gives whether they did.
bool rename_folder(const std::string& from, const std::string& to, bool replace);

}  // namespace tessera::dcp

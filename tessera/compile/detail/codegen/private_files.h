#pragma once
#include <optional>
#include <string>

// Folders and files that nobody but this user (and root) can write. What is loaded as code is read from these alone.
namespace tessera::compiler::codegen {

// Creates the folder, and parents that are missing, with mode 0700 whatever the umask is. Returns its real path.
// Throws UsageError, which starts with `what`, unless
//   - the folder belongs to this user, and
//   - no other user can replace it or a file in it: every folder on its real path belongs to this user or to root, and
//     nobody else can write there. A sticky folder such as /tmp may be writable: its entries are safe from others. A
//     group may write if it is the owner's own group, with no other member.
std::string private_folder(const std::string& path, const std::string& what);

struct PrivateFile {
  std::optional<std::string> bytes;  // none: the file is missing or refused
  std::string refused;               // why, "" if it is missing
};
// Reads a regular file with one link that belongs to this user and that nobody else can write.
PrivateFile read_private_file(const std::string& path);

// Writes a new file with mode 0600. UsageError if that fails, for example if the file exists.
void write_private_file(const std::string& path, const std::string& bytes);

}  // namespace tessera::compiler::codegen

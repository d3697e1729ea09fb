#include "tessera/compile/detail/codegen/private_files.h"

#include "tessera/base/error.h"

#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace tessera::compiler::codegen {
namespace {

namespace fs = std::filesystem;

struct FileDescriptor {
  int fd;
  ~FileDescriptor() {
    if (fd >= 0) close(fd);
  }
};

// The group of this user alone, which some systems create with each user: it has the user's name and no other member.
bool is_own_group(uid_t user, gid_t group) {
  std::array<char, 4096> user_text, group_text;
  passwd user_entry{}, *user_found = nullptr;
  ::group group_entry{}, *group_found = nullptr;
  if (getpwuid_r(user, &user_entry, user_text.data(), user_text.size(), &user_found) != 0 || !user_found) return false;
  if (getgrgid_r(group, &group_entry, group_text.data(), group_text.size(), &group_found) != 0 || !group_found)
    return false;
  const std::string name = user_entry.pw_name;
  if (user_entry.pw_gid != group || name != group_entry.gr_name) return false;
  for (char** member = group_entry.gr_mem; *member; member++)
    if (name != *member) return false;
  return true;
}

std::string owner_and_mode(const struct stat& about) {
  char mode[8];
  std::snprintf(mode, sizeof mode, "%04o", static_cast<unsigned>(about.st_mode & 07777));
  return c10::str("belongs to user ", about.st_uid, " with mode ", mode);
}

// Why another user could replace entries of this folder; "" if nobody can.
std::string folder_risk(const struct stat& about, bool is_last) {
  const auto user = geteuid();
  if (!S_ISDIR(about.st_mode)) return "is not a folder";
  const bool owner_is_trusted = about.st_uid == user || (about.st_uid == 0 && !is_last);
  const bool group_writes = (about.st_mode & S_IWGRP) && !is_own_group(about.st_uid, about.st_gid);
  const bool others_write = group_writes || (about.st_mode & S_IWOTH);
  if (owner_is_trusted && (!others_write || (!is_last && (about.st_mode & S_ISVTX)))) return "";
  return owner_and_mode(about) +
         (owner_is_trusted ? ": others can write there" : c10::str(", and this is user ", user));
}

void create_missing_folders(const fs::path& path) {
  fs::path so_far;
  for (const auto& part : path) {
    so_far /= part;
    mkdir(so_far.c_str(), 0700);  // an error is found below: the folder is missing, or not ours
  }
}

}  // namespace

std::string private_folder(const std::string& path, const std::string& what) {
  std::error_code failed;
  create_missing_folders(fs::weakly_canonical(path, failed));
  const auto real = fs::canonical(path, failed);
  TESSERA_CHECK(!failed, UsageError, what, " '", path, "' cannot be created: ", failed.message());
  fs::path so_far;
  for (auto part = real.begin(); part != real.end(); ++part) {
    so_far /= *part;
    struct stat about {};
    const bool found = lstat(so_far.c_str(), &about) == 0;
    const auto risk = found ? folder_risk(about, std::next(part) == real.end()) : std::strerror(errno);
    TESSERA_CHECK(risk.empty(), UsageError, what, " '", path, "' is not used: '", so_far.string(), "' ", risk,
                  ". Code is loaded only from folders that this user alone can write");
  }
  return real.string();
}

PrivateFile read_private_file(const std::string& path) {
  const FileDescriptor file{open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) return {{}, errno == ENOENT ? "" : std::strerror(errno)};
  struct stat about {};
  if (fstat(file.fd, &about) != 0) return {{}, std::strerror(errno)};
  if (!S_ISREG(about.st_mode) || about.st_nlink != 1) return {{}, "it is not a regular file with one link"};
  if (about.st_uid != geteuid() || (about.st_mode & (S_IWGRP | S_IWOTH))) return {{}, "it " + owner_and_mode(about)};
  std::string bytes(static_cast<size_t>(about.st_size), '\0');
  size_t got = 0;
  while (got < bytes.size()) {
    const auto n = read(file.fd, bytes.data() + got, bytes.size() - got);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return {{}, n < 0 ? std::strerror(errno) : "it became shorter"};
    got += static_cast<size_t>(n);
  }
  return {std::move(bytes), ""};
}

void write_private_file(const std::string& path, const std::string& bytes) {
  const FileDescriptor file{open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600)};
  bool ok = file.fd >= 0;
  for (size_t done = 0; ok && done < bytes.size();) {
    const auto n = write(file.fd, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    ok = n > 0;
    if (ok) done += static_cast<size_t>(n);
  }
  TESSERA_CHECK(ok, UsageError, "codegen: cannot write ", path, ": ", std::strerror(errno),
                "; set TESSERA_CACHE_DIR to a folder that can be written");
}

}  // namespace tessera::compiler::codegen

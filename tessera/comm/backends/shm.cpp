#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/region/backend.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <random>

// Ranks are processes of one machine. The group's first rank makes a shared memory object and puts its name into the
// store; the others map it; the last one to do so removes the name. From then on only the mappings keep the memory, so
// however the processes end, nothing is left. An object whose maker died before that is removed by the next group made
// on the machine: the name tells who made it.
namespace tessera::comm::detail {
namespace {

using region::Layout;
using region::Region;

constexpr const char* kFolder = "/dev/shm";

// "tessera.<pid namespace>.<pid>.": the same number is another process in another namespace.
std::string prefix(const std::string& pid) {
  struct stat ns {};
  stat("/proc/self/ns/pid", &ns);
  return c10::str("tessera.", ns.st_ino, ".", pid.empty() ? "" : pid + ".");
}

void remove_what_the_dead_left() {
  DIR* folder = opendir(kFolder);
  if (!folder) return;
  const std::string ours = prefix("");
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (!name.starts_with(ours)) continue;
    const pid_t maker = static_cast<pid_t>(std::strtol(name.c_str() + ours.size(), nullptr, 10));
    if (maker > 0 && kill(maker, 0) != 0 && errno == ESRCH) shm_unlink(("/" + name).c_str());
  }
  closedir(folder);
}

std::string mib(double bytes) { return c10::str(static_cast<int64_t>(bytes / (1 << 20) + 0.5), " MiB"); }

// Gives the name, or "!" and the reason why there is none.
std::string make_object(const Layout& layout) {
  remove_what_the_dead_left();
  const std::string name = c10::str("/", prefix(std::to_string(getpid())), std::random_device{}());
  const int fd = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return c10::str("!cannot make a shared memory object in ", kFolder, ": ", std::strerror(errno));
  // All of it now: a page that cannot be had later would be a SIGBUS in the middle of a collective.
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(fd, 0, static_cast<off_t>(layout.total()));
  close(fd);
  if (error == 0) return name;
  shm_unlink(name.c_str());
  struct statvfs room {};
  statvfs(kFolder, &room);
  return c10::str("!needs ", mib(static_cast<double>(layout.total())), " of shared memory, but ", kFolder, " has ",
                  mib(static_cast<double>(room.f_bavail) * static_cast<double>(room.f_frsize)), " left (",
                  std::strerror(error), "); enlarge it (mount -o remount,size=1g ", kFolder,
                  ", or docker run --shm-size=1g)");
}

std::shared_ptr<Region> map_object(const std::string& name, const Layout& layout, bool maker) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  TESSERA_CHECK(fd >= 0, CommError, "cannot open shared memory object ", name, ": ", std::strerror(errno));
  struct stat found {};
  const bool right_size = fstat(fd, &found) == 0 && static_cast<size_t>(found.st_size) == layout.total();
  void* base = right_size ? mmap(nullptr, layout.total(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  TESSERA_CHECK(right_size, CommError, "shared memory object ", name, " has ", found.st_size, " bytes instead of ",
                layout.total(), "; give all ranks the same TESSERA_SLOT_BYTES and TESSERA_STAGE_BYTES");
  TESSERA_CHECK(base != MAP_FAILED, CommError, "cannot map ", layout.total(), " bytes: ", std::strerror(errno));
  return {new Region(static_cast<char*>(base), layout, /*shared=*/true),
          [base, bytes = layout.total(), name, maker](Region* region) {
            delete region;
            munmap(base, bytes);
            if (maker) shm_unlink(name.c_str());  // still there only if a member never came
          }};
}

std::shared_ptr<Region> meet(const ConnectOptions& options) {
  const Layout layout = Layout::of(options.size);
  c10d::Store& store = *options.store;
  const bool maker = options.rank == 0;
  if (maker) {
    const std::string name = make_object(layout);
    store.set("shm", std::vector<uint8_t>(name.begin(), name.end()));
  }
  store.wait({"shm"}, options.timeout);
  const auto text = store.get("shm");
  const std::string name(text.begin(), text.end());
  TESSERA_CHECK(!name.starts_with('!'), CommError, "group '", options.group, "' of ", options.size, " ranks ",
                name.substr(1), ", or use backend gloo");
  auto region = map_object(name, layout, maker);
  region->member(options.rank).pid.store(getpid());
  if (store.add("mapped", 1) == options.size) shm_unlink(name.c_str());
  return region;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_shm(const ConnectOptions& options) {
  return c10::make_intrusive<region::RegionBackend>(
      "shm", options.rank, options.size, options.size > 1 ? meet(options) : nullptr,
      region::Names{options.group, options.ranks}, region::Exchange::Options{options.timeout, options.spare_cores});
}

}  // namespace tessera::comm::detail

#include "tessera/comm/environment.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"

#include <unistd.h>

#include <charconv>
#include <ostream>

namespace tessera::comm {
namespace {

struct Launcher {
  const char* name;
  const char *rank, *size, *local_rank, *local_size;  // variables; `size` is set if this launcher was used
  const char* job[2];                                 // variables that identify the job on this machine; nullptr: none
  const char* over_hosts;                             // command for ranks on several machines
};

// The first launcher whose `size` variable is set has started this process. RANK and WORLD_SIZE come first: a launcher
// inside another job, or a script, sets them on purpose. Slurm comes last, because mpirun inside a Slurm step inherits
// Slurm's variables.
constexpr Launcher kLaunchers[] = {
    {"RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", {}, ""},
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {"OMPI_MCA_ess_base_jobid", nullptr},
     "mpirun -x MASTER_ADDR=the-host-of-rank-0 -x MASTER_PORT=29500 ..."},
    {"PMI",
     "PMI_RANK",
     "PMI_SIZE",
     "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS",
     {},
     "mpirun -genv MASTER_ADDR the-host-of-rank-0 -genv MASTER_PORT 29500 ..."},
    {"Slurm",
     "SLURM_PROCID",
     "SLURM_STEP_NUM_TASKS",
     "SLURM_LOCALID",
     "SLURM_STEP_TASKS_PER_NODE",
     {"SLURM_JOB_ID", "SLURM_STEP_ID"},
     ""},
};

int64_t number(const Variables& variables, const char* name, int64_t if_unset) {
  const std::string text = variables(name);
  if (text.empty()) return if_unset;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TESSERA_CHECK(error == std::errc() && end == text.data() + text.size(), UsageError, "environment variable ", name,
                " is '", text, "', which is not a number");
  return value;
}

const Launcher* find_launcher(const Variables& variables) {
  for (const auto& launcher : kLaunchers)
    if (!variables(launcher.size).empty()) return &launcher;
  TESSERA_CHECK(number(variables, "RANK", 0) == 0, UsageError, "RANK is ", variables("RANK"),
                " but WORLD_SIZE is not set; set both, or neither for a world of one rank");
  return nullptr;
}

int64_t local_size(const Launcher& launcher, const Variables& variables, const Environment& found) {
  if (launcher.local_size == std::string("SLURM_STEP_TASKS_PER_NODE"))
    return detail::tasks_on(variables(launcher.local_size), number(variables, "SLURM_NODEID", 0));
  return number(variables, launcher.local_size, found.size);
}

// Uses MASTER_ADDR and MASTER_PORT if they are set. RANK and WORLD_SIZE alone mean this machine. For Slurm the address
// follows from its node list and job id. mpirun gives no address, so its ranks must be on one machine.
void find_rendezvous(const Launcher& launcher, const Variables& variables, Environment& found) {
  const bool given = !variables("MASTER_ADDR").empty() || !variables("MASTER_PORT").empty();
  if (given || &launcher == &kLaunchers[0]) {
    found.host = variables("MASTER_ADDR").empty() ? "127.0.0.1" : variables("MASTER_ADDR");
    found.port = number(variables, "MASTER_PORT", 29500);
  } else if (found.local_size == found.size) {
    found.job = launcher.name;
    for (const char* name : launcher.job)
      if (name) found.job += "-" + variables(name);
    // Hydra gives a job no name, but it starts all ranks of a machine from one process.
    if (!launcher.job[0]) found.job += c10::str("-", getppid());
  } else {
    const std::string nodes = variables("SLURM_STEP_NODELIST");
    TESSERA_CHECK(launcher.rank == std::string("SLURM_PROCID") && !nodes.empty(), UsageError, launcher.name,
                  " started ", found.size, " ranks, ", found.local_size,
                  " of them here, but gives no address of rank 0; use  ", launcher.over_hosts);
    found.host = detail::first_host(nodes);
    // Below the ephemeral ports (32768 and up), and different for the steps of a job.
    found.port = 20000 + (number(variables, "SLURM_JOB_ID", 0) + 97 * number(variables, "SLURM_STEP_ID", 0)) % 12000;
  }
}

}  // namespace

Environment read_environment(const Variables& variables) {
  Environment found;
  const Launcher* launcher = find_launcher(variables);
  if (!launcher) return found;
  found.launcher = launcher->name;
  found.size = number(variables, launcher->size, 1);
  found.rank = number(variables, launcher->rank, found.size == 1 ? 0 : -1);
  TESSERA_CHECK(found.rank >= 0 || !variables(launcher->rank).empty(), UsageError, launcher->size, " is ", found.size,
                " but ", launcher->rank, " is not set; each rank needs its own, 0 to ", found.size - 1);
  TESSERA_CHECK(found.rank >= 0 && found.rank < found.size, UsageError, "rank ", found.rank, " in a world of ",
                found.size, " ranks (", launcher->rank, ", ", launcher->size, ")");
  found.local_rank = number(variables, launcher->local_rank, found.rank);
  found.local_size = local_size(*launcher, variables, found);
  found.one_machine = !variables(launcher->local_size).empty() && found.local_size == found.size;
  if (found.size > 1) find_rendezvous(*launcher, variables, found);
  found.launcher_hosts_store = variables("TORCHELASTIC_USE_AGENT_STORE") == "True";
  found.restarts = number(variables, "TORCHELASTIC_RESTART_COUNT", 0);
  return found;
}

Environment read_environment() {
  return read_environment([](const char* name) { return setting_is_set(name) ? setting(name) : std::string(); });
}

std::ostream& operator<<(std::ostream& out, const Environment& e) {
  if (e.launcher.empty()) return out << "no launcher: a world of one rank";
  out << e.launcher << ": rank " << e.rank << " of " << e.size << ", " << e.local_rank << " of " << e.local_size
      << " here";
  if (!e.host.empty())
    out << "; " << (e.launcher_hosts_store ? "launcher's" : "rank 0's") << " store at " << e.host << ':' << e.port;
  if (!e.job.empty()) out << "; on this machine, job " << e.job;
  return out;
}

std::string detail::first_host(const std::string& nodes) {
  std::string first;
  for (size_t i = 0; i < nodes.size() && nodes[i] != ','; i++) {
    if (nodes[i] != '[') {
      first += nodes[i];
      continue;
    }
    const size_t close = nodes.find(']', i);
    const size_t end = std::min(nodes.find_first_of("-,]", i), close);
    first += nodes.substr(i + 1, end - i - 1);
    if (close == std::string::npos) break;
    i = close;
  }
  return first;
}

int64_t detail::tasks_on(const std::string& tasks, int64_t node) {
  const char* at = tasks.data();
  const char* const end = at + tasks.size();
  int64_t left = node;
  while (at < end) {
    int64_t count = 0, times = 1;
    auto read = std::from_chars(at, end, count);
    if (read.ec != std::errc()) break;
    at = read.ptr;
    if (end - at > 2 && at[0] == '(' && at[1] == 'x') {
      read = std::from_chars(at + 2, end, times);
      at = read.ptr + 1;  // over the ')'
    }
    if (left < times) return count;
    left -= times;
    at++;  // over the ','
  }
  TESSERA_FAIL(UsageError, "SLURM_STEP_TASKS_PER_NODE is '", tasks, "', which gives no number of tasks for machine ",
               node);
}

}  // namespace tessera::comm

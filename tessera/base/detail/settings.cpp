#include "tessera/base/detail/settings.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace tessera {
namespace {

// Sorted by name: first the variables of users and launchers (comm/environment.cpp has the variables of each launcher),
// then those of Tessera.
constexpr Setting kSettings[] = {
    {"CUDA_VISIBLE_DEVICES", "",
     "CUDA devices that this rank may use; ranks with the same list are assigned to them in turn"},
    {"CXX", "", "compiler that builds generated kernels; empty: c++, g++ or clang++, the first in PATH"},
    {"HOME", "", "its .cache/tessera has the built kernels if no cache folder is given"},
    {"LOCAL_RANK", "", "index among the ranks of this machine; set by torchrun and tessera run"},
    {"LOCAL_WORLD_SIZE", "", "number of ranks on this machine"},
    {"MASTER_ADDR", "127.0.0.1", "host of the store of env://, on rank 0 or in the launcher"},
    {"MASTER_PORT", "29500", "port of that store"},
    {"MPI_LOCALNRANKS", "", "set by MPICH's and Intel's mpirun: ranks on this machine"},
    {"MPI_LOCALRANKID", "", "set by MPICH's and Intel's mpirun: index among them"},
    {"NO_COLOR", "", "not empty: no colors, even on a terminal"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "", "set by Open MPI's mpirun, as are the next four"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "", "ranks on this machine"},
    {"OMPI_COMM_WORLD_RANK", "", "this rank"},
    {"OMPI_COMM_WORLD_SIZE", "", "number of ranks"},
    {"OMPI_MCA_ess_base_jobid", "", "id of the job on this machine"},
    {"OMP_NUM_THREADS", "",
     "threads of LibTorch's parallel loops; tessera run sets it to cores / local ranks if it is unset"},
    {"PATH", "/usr/bin:/bin",
     "folders where tessera run finds a program without a slash in its name, and codegen a compiler"},
    {"PMI_RANK", "", "set by PMI launchers: this rank"},
    {"PMI_SIZE", "", "number of ranks"},
    {"RANK", "", "this rank, for env://; set by torchrun and tessera run"},
    {"SLURM_JOB_ID", "", "set by Slurm, as are the next seven: id of the job"},
    {"SLURM_LOCALID", "", "index among the tasks of this machine"},
    {"SLURM_NODEID", "", "index of this machine among those of the job"},
    {"SLURM_PROCID", "", "this task; used as the rank"},
    {"SLURM_STEP_ID", "", "id of the srun of the job"},
    {"SLURM_STEP_NODELIST", "", "machines of the step; the first has rank 0"},
    {"SLURM_STEP_NUM_TASKS", "",
     "tasks of the step; only srun sets it, so a batch script itself has a world of one rank"},
    {"SLURM_STEP_TASKS_PER_NODE", "", "tasks on each machine, as 2(x3),1"},
    {"TMPDIR", "/tmp", "folder where tessera run puts the error files of its ranks"},
    {"TORCHELASTIC_ERROR_FILE", "", "file where a rank writes its error for torchrun and tessera run"},
    {"TORCHELASTIC_RESTART_COUNT", "0", "how many times the launcher has restarted the ranks"},
    {"TORCHELASTIC_USE_AGENT_STORE", "", "True: the launcher runs the store of env://"},
    {"TORCH_SHOW_CPP_STACKTRACES", "", "not empty: an uncaught error is printed with its backtrace"},
    {"WORLD_SIZE", "", "number of ranks, for env://"},
    {"XDG_CACHE_HOME", "", "its folder tessera has the built kernels if TESSERA_CACHE_DIR is not given"},
    {"XDG_STATE_HOME", "",
     "its folder tessera has the key that authenticates built kernels; empty: .local/state of HOME"},
    {"TESSERA_BACKEND", "auto",
     "backend when init() names none: auto, threads, shm, gloo, nccl, fake, or a registered one"},
    {"TESSERA_BENCH_ROWS", "", "set in the child processes of tessera bench: the file for their results"},
    {"TESSERA_CACHE_DIR", "",
     "folder of built kernels, which this user alone can write; ranks can share it, and it can be deleted at any time"},
    {"TESSERA_CACHE_MB", "1024",
     "bound of that folder in megabytes: after a build, the files that were used least are deleted"},
    {"TESSERA_CHECK_COLLECTIVES", "first",
     "gloo: compare the collectives of all ranks before they run; first: always on one host, the first 64 of a group "
     "across hosts; always; never"},
    {"TESSERA_COMPILER_TIMEOUT_S", "120",
     "seconds after which the C++ compiler of generated kernels is killed; the program then runs op by op"},
    {"TESSERA_GLOO_HOST", "",
     "host name or address whose interface gloo uses; empty: loopback on one host, else gloo's own choice"},
    {"TESSERA_JOB_SECRET", "",
     "secret of the job, at least 16 characters, the same on all ranks: who has it may join; tessera run makes one per "
     "job on one host"},
    {"TESSERA_NUMERICS", "fast",
     "compiled programs on the CPU; fast: within the tolerances of torch.testing; strict: the bits of eager mode"},
    {"TESSERA_PEERS", "", "tessera bench: folder of the peer scripts; empty: benchmarks/peers of the source tree"},
    {"TESSERA_PYTHON", "", "tessera bench: the Python that runs peers; empty: .venv/bin/python, then python3"},
    {"TESSERA_RUN", "", "set by tessera run: init() makes standard output line-buffered"},
    {"TESSERA_SLOT_BYTES", "16384",
     "shm, threads: a collective of at most this many bytes per rank is sent in one part"},
    {"TESSERA_SOAK", "", "tests: 1 runs the long versions"},
    {"TESSERA_SOAK_PART", "1/1", "tests: K/N runs part K of N of each long generator, to share it among N processes"},
    {"TESSERA_SPAWN", "", "set in the child processes of spawn_ranks: call, rank, number of ranks and rendezvous file"},
    {"TESSERA_STAGE_BYTES", "262144",
     "shm, threads: chunk size in bytes of a larger collective; a rank has four chunks"},
    {"TESSERA_TIMEOUT_S", "600", "seconds that a collective waits for a peer if init() has no timeout"},
    {"TESSERA_TRACE_DIR", "", "folder for a report of every compiled program: step-0.rank0.html, ..."},
};

const Setting& find_setting(std::string_view name) {
  for (const Setting& s : kSettings)
    if (name == s.name) return s;
  TESSERA_FAIL(InternalError, "setting '", name, "' is not listed in base/detail/settings.cpp");
}

template <class T>
T parse(std::string_view name) {
  std::string text = setting(name);
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TESSERA_CHECK(error == std::errc() && end == text.data() + text.size(), UsageError, "environment variable ", name,
                " is '", text, "', which is not a number");
  return value;
}

}  // namespace

std::span<const Setting> all_settings() { return kSettings; }

std::string setting(std::string_view name) {
  const Setting& s = find_setting(name);
  const char* value = std::getenv(s.name);
  return value && *value ? value : s.fallback;
}

int64_t setting_int(std::string_view name) { return parse<int64_t>(name); }
double setting_number(std::string_view name) { return parse<double>(name); }

bool setting_is_set(std::string_view name) {
  const char* value = std::getenv(find_setting(name).name);
  return value && *value;
}

}  // namespace tessera

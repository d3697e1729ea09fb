#include "tessera/base/detail/settings.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace tessera {
namespace {

// Sorted by name: what users and launchers set first (comm/environment.cpp says which launcher is told by which), then
// our own.
constexpr Setting kSettings[] = {
    {"CUDA_VISIBLE_DEVICES", "", "CUDA devices this rank may use; ranks that see the same ones share them out"},
    {"CXX", "", "compiler that builds generated kernels; empty: c++, g++ or clang++, the first in PATH"},
    {"HOME", "", "whose .cache/tessera keeps built kernels where no cache folder is given"},
    {"LOCAL_RANK", "", "place among the ranks of this machine; set by torchrun and tessera run"},
    {"LOCAL_WORLD_SIZE", "", "number of ranks on this machine"},
    {"MASTER_ADDR", "127.0.0.1", "where rank 0, or the launcher, keeps the store of env://"},
    {"MASTER_PORT", "29500", "the port of it"},
    {"MPI_LOCALNRANKS", "", "set by MPICH's and Intel's mpirun: ranks on this machine"},
    {"MPI_LOCALRANKID", "", "set by MPICH's and Intel's mpirun: place among them"},
    {"NO_COLOR", "", "any text: no colours, even on a terminal"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "", "set by Open MPI's mpirun, as are the next four"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "", "ranks on this machine"},
    {"OMPI_COMM_WORLD_RANK", "", "this rank"},
    {"OMPI_COMM_WORLD_SIZE", "", "number of ranks"},
    {"OMPI_MCA_ess_base_jobid", "", "which of the jobs on this machine"},
    {"OMP_NUM_THREADS", "",
     "threads of LibTorch's loops; tessera run sets it to cores / local ranks if it is not given"},
    {"PATH", "/usr/bin:/bin",
     "where tessera run looks for a program without a slash in its name, and codegen for a compiler"},
    {"PMI_RANK", "", "set by launchers that speak PMI: this rank"},
    {"PMI_SIZE", "", "number of ranks"},
    {"RANK", "", "this rank, for env://; set by torchrun and tessera run"},
    {"SLURM_JOB_ID", "", "set by Slurm, as are the next seven: which job"},
    {"SLURM_LOCALID", "", "place among the tasks of this machine"},
    {"SLURM_NODEID", "", "place of this machine among those of the job"},
    {"SLURM_PROCID", "", "this task; it is our rank"},
    {"SLURM_STEP_ID", "", "which srun of the job"},
    {"SLURM_STEP_NODELIST", "", "machines of the step; the first has rank 0"},
    {"SLURM_STEP_NUM_TASKS", "", "tasks of the step; set by srun only, so a batch script itself is a world of one"},
    {"SLURM_STEP_TASKS_PER_NODE", "", "tasks on each machine, as 2(x3),1"},
    {"TMPDIR", "/tmp", "where tessera run keeps the error files of its ranks"},
    {"TORCHELASTIC_ERROR_FILE", "", "where a rank leaves its last error for torchrun and tessera run"},
    {"TORCHELASTIC_RESTART_COUNT", "0", "how often the launcher has started the ranks anew"},
    {"TORCHELASTIC_USE_AGENT_STORE", "", "True: the launcher keeps the store of env:// itself"},
    {"WORLD_SIZE", "", "number of ranks, for env://"},
    {"XDG_CACHE_HOME", "", "whose folder tessera keeps built kernels where TESSERA_CACHE_DIR is not given"},
    {"TESSERA_BACKEND", "auto",
     "backend when init() names none: auto, threads, shm, gloo, nccl, fake, or a registered one"},
    {"TESSERA_BENCH_ROWS", "", "set in the children of tessera bench: the file for what they measured"},
    {"TESSERA_CACHE_DIR", "", "keeps built kernels; may be shared by ranks and deleted at any time"},
    {"TESSERA_CHECK_COLLECTIVES", "first",
     "gloo: compare what ranks are about to post; first: on one host always, across hosts the first 64 of a group; "
     "always; never"},
    {"TESSERA_GLOO_HOST", "",
     "host name or address whose interface gloo uses; empty: loopback on one host, else gloo's own choice"},
    {"TESSERA_PEERS", "", "tessera bench: folder of the peer scripts; empty: benchmarks/peers of the source tree"},
    {"TESSERA_PYTHON", "", "tessera bench: the Python that runs peers; empty: .venv/bin/python, then python3"},
    {"TESSERA_RUN", "", "set by tessera run: init() sends each line of standard output as it ends"},
    {"TESSERA_SLOT_BYTES", "16384", "shm, threads: a collective of up to so many bytes a rank travels whole"},
    {"TESSERA_SOAK", "", "tests: 1 runs the long forms"},
    {"TESSERA_SPAWN", "", "set in the children of spawn_ranks: which call, rank, ranks and rendezvous file"},
    {"TESSERA_STAGE_BYTES", "262144", "shm, threads: bytes of a chunk of a larger one; a rank has four"},
    {"TESSERA_TIMEOUT_S", "600", "seconds a collective may wait for a peer when init() says nothing"},
    {"TESSERA_TRACE_DIR", "", "folder for a page about every program that is compiled: step-0.rank0.html, ..."},
};

const Setting& row(std::string_view name) {
  for (const Setting& s : kSettings)
    if (name == s.name) return s;
  TESSERA_FAIL(InternalError, "setting '", name, "' has no row in base/settings.cpp");
}

template <class T>
T parse(std::string_view name) {
  std::string text = setting(name);
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TESSERA_CHECK(error == std::errc() && end == text.data() + text.size(), UsageError, "environment variable ", name,
                " is '", text, "', which is no number");
  return value;
}

}  // namespace

std::span<const Setting> all_settings() { return kSettings; }

std::string setting(std::string_view name) {
  const Setting& s = row(name);
  const char* value = std::getenv(s.name);
  return value && *value ? value : s.fallback;
}

int64_t setting_int(std::string_view name) { return parse<int64_t>(name); }
double setting_number(std::string_view name) { return parse<double>(name); }

bool setting_is_set(std::string_view name) {
  const char* value = std::getenv(row(name).name);
  return value && *value;
}

}  // namespace tessera

#include "tessera/comm/environment.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <sstream>

namespace tessera::comm {
namespace {

using Set = std::map<std::string, std::string>;

Environment read(const Set& set) {
  return read_environment([&](const char* name) { return set.contains(name) ? set.at(name) : std::string(); });
}

TEST(Environment, WithoutALauncherTheWorldHasOneRank) {
  EXPECT_EQ(read({}), Environment());
  EXPECT_EQ(read({{"MASTER_PORT", "7"}, {"RANK", "0"}}), Environment());
  // A batch script has SLURM_PROCID and SLURM_NTASKS, but srun has not started it.
  EXPECT_EQ(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "5"}}), Environment());
}

TEST(Environment, ReadsTheVariablesOfEveryLauncher) {
  EXPECT_EQ(read({{"RANK", "3"},
                  {"WORLD_SIZE", "4"},
                  {"LOCAL_RANK", "1"},
                  {"LOCAL_WORLD_SIZE", "2"},
                  {"MASTER_ADDR", "head"},
                  {"MASTER_PORT", "77"},
                  {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                  {"TORCHELASTIC_RESTART_COUNT", "2"}}),
            (Environment{"RANK and WORLD_SIZE", 3, 4, 1, 2, "head", 77, "", true, 2}));
  EXPECT_EQ(read({{"RANK", "1"}, {"WORLD_SIZE", "2"}}),  // a shell loop
            (Environment{"RANK and WORLD_SIZE", 1, 2, 1, 2, "127.0.0.1", 29500, "", false, 0}));
  EXPECT_EQ(read({{"OMPI_COMM_WORLD_RANK", "1"},
                  {"OMPI_COMM_WORLD_SIZE", "2"},
                  {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                  {"OMPI_MCA_ess_base_jobid", "99"}}),
            (Environment{"Open MPI", 1, 2, 1, 2, "", 0, "Open MPI-99", false, 0, true}));
  EXPECT_EQ(read({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}}),
            (Environment{"PMI", 0, 2, 0, 2, "", 0, "PMI-" + std::to_string(getppid()), false, 0, true}));
}

// RANK, WORLD_SIZE and MASTER_ADDR alone do not say where the other ranks are.
TEST(Environment, OneMachineIsNotAssumed) {
  Set set{{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "head"}};
  EXPECT_FALSE(read(set).one_machine);
  set["LOCAL_WORLD_SIZE"] = "2";
  EXPECT_FALSE(read(set).one_machine);
  set["LOCAL_WORLD_SIZE"] = "4";
  EXPECT_TRUE(read(set).one_machine);
}

const Set kSlurm{{"SLURM_PROCID", "5"},     {"SLURM_STEP_NUM_TASKS", "7"},
                 {"SLURM_LOCALID", "1"},    {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                 {"SLURM_NODEID", "2"},     {"SLURM_STEP_NODELIST", "gpu[07-09],login"},
                 {"SLURM_JOB_ID", "24001"}, {"SLURM_STEP_ID", "2"}};

TEST(Environment, SlurmGivesHostAndPort) {
  EXPECT_EQ(read(kSlurm), (Environment{"Slurm", 5, 7, 1, 2, "gpu07", 20000 + 1 + 2 * 97, "", false, 0}));
  auto here = kSlurm;
  here["SLURM_STEP_TASKS_PER_NODE"] = "7", here["SLURM_NODEID"] = "0";
  EXPECT_EQ(read(here), (Environment{"Slurm", 5, 7, 1, 7, "", 0, "Slurm-24001-2", false, 0, true}));
}

TEST(Environment, InnermostLauncherWins) {
  auto both = kSlurm;  // mpirun inside a Slurm job
  both["OMPI_COMM_WORLD_RANK"] = "0", both["OMPI_COMM_WORLD_SIZE"] = "1";
  EXPECT_EQ(read(both).launcher, "Open MPI");
  both["RANK"] = "1", both["WORLD_SIZE"] = "2";  // and tessera run inside that
  EXPECT_EQ(read(both).size, 2);
}

TEST(Environment, MasterAddrAndPortOverrideTheLauncher) {
  auto set = kSlurm;
  set["MASTER_ADDR"] = "10.0.0.1", set["MASTER_PORT"] = "4000";
  EXPECT_EQ(read(set).host, "10.0.0.1");
  EXPECT_EQ(read(set).port, 4000);
}

TEST(Environment, BadVariablesAreRefused) {
  EXPECT_ERROR(UsageError, read({{"RANK", "2"}}), "RANK is 2 but WORLD_SIZE is not set");
  EXPECT_ERROR(UsageError, read({{"WORLD_SIZE", "4"}}), "WORLD_SIZE is 4 but RANK is not set", "0 to 3");
  EXPECT_ERROR(UsageError, read({{"WORLD_SIZE", "4"}, {"RANK", "4"}}), "rank 4 in a world of 4 ranks");
  EXPECT_ERROR(UsageError, read({{"WORLD_SIZE", "4x"}, {"RANK", "1"}}), "WORLD_SIZE is '4x', which is not a number");
  EXPECT_ERROR(
      UsageError,
      read({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
      "Open MPI started 4 ranks, 2 of them here", "mpirun -x MASTER_ADDR=");
}

TEST(Environment, ParsesSlurmLists) {
  EXPECT_EQ(detail::first_host("node[03-05,9],x1"), "node03");
  EXPECT_EQ(detail::first_host("a,b"), "a");
  EXPECT_EQ(detail::first_host("rack[1-2]-n[4,5]"), "rack1-n4");
  EXPECT_EQ(detail::first_host("gpu-1"), "gpu-1");
  EXPECT_EQ(detail::tasks_on("2(x3),1", 2), 2);
  EXPECT_EQ(detail::tasks_on("2(x3),1", 3), 1);
  EXPECT_EQ(detail::tasks_on("8", 0), 8);
  EXPECT_ERROR(UsageError, detail::tasks_on("2(x3),1", 4), "'2(x3),1'", "machine 4");
  EXPECT_ERROR(UsageError, detail::tasks_on("", 0), "machine 0");
}

TEST(Environment, PrintsOneLine) {
  std::ostringstream text;
  text << read({}) << '\n' << read({{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(text.str(),
            "no launcher: a world of one rank\nRANK and WORLD_SIZE: rank 1 of 2, 1 of 2 here; rank 0's store at "
            "127.0.0.1:29500");
}

}  // namespace
}  // namespace tessera::comm

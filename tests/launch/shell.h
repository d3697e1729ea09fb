#pragma once
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <string>

// For tests that run programs. CMake defines TESSERA_PROGRAM, TESSERA_PROBE and TESSERA_LAUNCH_TESTS.
namespace tessera::testing {

struct Shell {
  int exit_code = -1;
  std::string text;  // standard output and error
};

// Runs a shell script for at most a minute. $TESSERA and $PROBE are the programs. No launcher variables are set.
inline Shell shell(const std::string& script) {
  setenv("TESSERA", TESSERA_PROGRAM, 1);
  setenv("PROBE", TESSERA_PROBE, 1);
  setenv("SCRIPT", script.c_str(), 1);
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS"}) unsetenv(name);
  Shell result;
  FILE* out = popen("exec 2>&1 </dev/null; exec timeout 60 sh -c \"$SCRIPT\"", "r");
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, out)) > 0;) result.text.append(buffer, n);
  const int status = pclose(out);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

inline int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) n++;
  return n;
}

}  // namespace tessera::testing

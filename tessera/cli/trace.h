#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// `tessera trace`: compiles a train step of a built-in model and writes an HTML page about the compilation.
namespace tessera::cli {

struct TraceRequest {
  std::string model = "mlp";                            // or a name of models/sizes.h
  std::string parallel = "none";                        // see parallel_modes()
  int64_t ranks = 2;                                    // threads; 1 if parallel is "none"
  std::optional<std::vector<std::string>> passes = {};  // nullopt: the default passes
  int64_t batch = 8, sequence = 16;
};

struct ParallelMode {
  const char* name;
  const char* help;
};
const std::vector<ParallelMode>& parallel_modes();

// Compiles the step on all ranks and returns the page of rank 0. Throws UsageError for unknown names, and errors of the
// ranks.
std::string make_trace_page(const TraceRequest& request);

}  // namespace tessera::cli

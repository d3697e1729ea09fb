#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// `tessera trace`: a built-in train step, compiled, and the page about it.
namespace tessera::cli {

struct TraceRequest {
  std::string model = "mlp";                            // or a name of models/sizes.h
  std::string parallel = "none";                        // see parallel_ways()
  int64_t ranks = 2;                                    // threads; one where nothing is parallel
  std::optional<std::vector<std::string>> passes = {};  // none: the compiler's own
  int64_t batch = 8, sequence = 16;
};

struct ParallelWay {
  const char* name;
  const char* help;
};
const std::vector<ParallelWay>& parallel_ways();

// Compiles the step on as many ranks and gives the page of rank 0. Throws UsageError for names that are not there, and
// what goes wrong on a rank.
std::string make_trace_page(const TraceRequest& request);

}  // namespace tessera::cli

// The program that launcher tests start as ranks.   probe sum | twice | throw RANK | catch RANK
#include "tessera/base/error_file.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/environment.h"
#include "tessera/comm/world.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdlib>
#include <iostream>
#include <stdexcept>

using namespace tessera;

namespace {

void print_sum() {
  at::Tensor x = at::full({1}, static_cast<double>(get_rank() + 1));
  all_reduce(x);
  const auto launched = comm::read_environment();
  std::cout << c10::str("sum ", x.item<double>(), " on rank ", get_rank(), " of ", get_world_size(), ", ",
                        launched.local_rank, " of ", launched.local_size, " here; ", launched.launcher, "\n")
            << std::flush;  // the launcher may kill it before it exits
}

int run(const std::string& mode, int64_t at_rank) {
  init();
  print_sum();
  if (mode == "twice") {
    destroy();
    init();
    print_sum();
  }
  if (get_rank() == at_rank) throw std::runtime_error("it \"broke\"\non rank " + std::to_string(at_rank));
  if (at_rank >= 0) barrier();  // the other ranks wait for the failed one
  destroy();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "sum";
  const int64_t at_rank = argc > 2 ? std::atoll(argv[2]) : -1;
  if (mode != "catch") return run(mode, at_rank);
  try {
    return run(mode, at_rank);
  } catch (const std::exception& error) {
    record_error(error);
    return 3;
  }
}

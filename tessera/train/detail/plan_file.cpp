#include "tessera/train/detail/plan_file.h"

#include "tessera/base/error.h"
#include "tessera/tensor_parallel/detail/plan_text.h"

#include <fstream>
#include <iterator>

namespace tessera::train {

Plan read_plan_file(const std::string& file) {
  std::ifstream in(file);
  TESSERA_CHECK(in, UsageError, "cannot read the plan file '", file, "'");
  return parse_plan(std::string(std::istreambuf_iterator<char>(in), {}));
}

}  // namespace tessera::train

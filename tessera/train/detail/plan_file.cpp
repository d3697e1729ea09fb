#include "tessera/train/detail/plan_file.h"

#include "tessera/base/detail/text_file.h"
#include "tessera/tensor_parallel/detail/plan_text.h"

namespace tessera::train {

Plan read_plan_file(const std::string& file) { return parse_plan(read_text_file(file, "the plan file")); }

}  // namespace tessera::train

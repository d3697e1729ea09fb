#include "tessera/rules/detail/elementwise.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

// Random ops: whole or cut, never Partial. That replicas draw the same numbers and pieces those of their global index
// is the dispatcher's business; a row only says that the values of different elements do not depend on each other.
namespace tessera::rules {

namespace {

Rule drawn(const OpQuery& query) { return elementwise(query); }

Rule like(const OpQuery& query) {
  auto format = memory_format_at(query, static_cast<int>(query.schema.arguments().size()) - 1);
  return like_factory(query, like_strides(query.tensors[0].sizes, query.tensors[0].strides, format));
}

}  // namespace

void register_random(Registry& to) {
  Family family(to, "random");
  for (const auto* op :
       {"uniform_", "normal_", "bernoulli_.float", "bernoulli_.Tensor", "exponential_", "geometric_", "log_normal_",
        "cauchy_", "random_", "random_.from", "random_.to", "bernoulli", "bernoulli.p", "bernoulli.Tensor"})
    family.op(op, drawn);
  for (const auto* op : {"rand_like", "rand_like.generator", "randn_like", "randn_like.generator", "randint_like",
                         "randint_like.low_dtype", "randint_like.generator", "randint_like.low_generator_dtype"})
    family.op(op, like);
  family.op("native_dropout", drawn);
}

}  // namespace tessera::rules

#include "tessera/rules/detail/elementwise.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

// Random ops: replicated or sharded, never partial. The dispatcher makes replicas draw equal numbers, and shards draw
// the numbers of their global indices. A strategy here only states that the elements are independent.
namespace tessera::rules {

namespace {

Rule drawn(const OpQuery& query) { return elementwise(query); }

}  // namespace

void register_random(Registry& to) {
  Family family(to, "random");
  for (const auto* op :
       {"uniform_", "normal_", "bernoulli_.float", "bernoulli_.Tensor", "exponential_", "geometric_", "log_normal_",
        "cauchy_", "random_", "random_.from", "random_.to", "bernoulli", "bernoulli.p", "bernoulli.Tensor"})
    family.op(op, drawn);
  for (const auto* op : {"rand_like", "rand_like.generator", "randn_like", "randn_like.generator", "randint_like",
                         "randint_like.low_dtype", "randint_like.generator", "randint_like.low_generator_dtype"})
    family.op(op, [](const OpQuery& query) { return like_factory(query); });
  family.op("native_dropout", drawn);
}

}  // namespace tessera::rules

#include "tessera/base/error.h"
#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

#include <algorithm>

// cat and stack. All tensors have the same placements. The dim along which they are joined must not be sharded. Every
// partial is kept if all tensors have the same one, because a reduction works element by element.
namespace tessera::rules {
namespace {

// cat skips tensors of sizes [0], for any sizes of the others.
bool skipped(const TensorArg& tensor) { return tensor.sizes.size() == 1 && tensor.sizes[0] == 0; }

Rule joined(const OpQuery& query, int64_t join_dim, const OutInfo& out,
            const std::function<int64_t(int64_t)>& out_dim) {
  Rule rule;
  rule.outs = {out};
  add_replicated_strategy(rule, query);
  auto add = [&](Placement in, Placement result) {
    Placements ins;
    for (const auto& tensor : query.tensors) ins.push_back(skipped(tensor) ? R : in);
    rule.add_strategy(std::move(ins), {result});
  };
  auto ndim = static_cast<int64_t>(out.sizes.size());
  for (int64_t d = 0; d < ndim; d++)
    if (d != join_dim && out_dim(d) >= 0) add(S(out_dim(d)), S(d));
  for (auto p : kAnyPartial) add(p, p);
  return rule;
}

Rule cat(const OpQuery& query) {
  auto first = std::find_if(query.tensors.begin(), query.tensors.end(), [](const TensorArg& t) { return !skipped(t); });
  if (first == query.tensors.end()) {
    Rule rule;
    rule.outs = {contiguous_out({0})};
    add_replicated_strategy(rule, query);
    return rule;
  }
  int64_t dim = query.dim_at(1, static_cast<int64_t>(first->sizes.size()));
  Sizes sizes(first->sizes);
  sizes[dim] = 0;
  bool all_channels_last = true;
  for (const auto& tensor : query.tensors) {
    if (skipped(tensor)) continue;
    TESSERA_CHECK(tensor.sizes.size() == sizes.size(), UsageError, "aten::cat: tensors of sizes ", first->sizes,
                  " and ", tensor.sizes, "; they must have the same number of dims");
    for (size_t d = 0; d < sizes.size(); d++)
      TESSERA_CHECK(static_cast<int64_t>(d) == dim || tensor.sizes[d] == sizes[d], UsageError, "aten::cat along dim ",
                    dim, ": sizes ", first->sizes, " and ", tensor.sizes, " differ in dim ", d);
    sizes[dim] += tensor.sizes[dim];
    all_channels_last &= is_channels_last(tensor.sizes, tensor.strides) && !is_contiguous(tensor.sizes, tensor.strides);
  }
  OutInfo out{sizes, all_channels_last ? channels_last(sizes) : Sizes{}};
  return joined(query, dim, out, [](int64_t d) { return d; });
}

Rule stack(const OpQuery& query) {
  auto element = query.tensors[0].sizes;
  int64_t dim = query.dim_at(1, static_cast<int64_t>(element.size()) + 1);
  for (const auto& tensor : query.tensors)
    TESSERA_CHECK(tensor.sizes == element, UsageError, "aten::stack: tensors of sizes ", element, " and ", tensor.sizes,
                  "; they must be equal");
  Sizes sizes(element);
  sizes.insert(sizes.begin() + dim, static_cast<int64_t>(query.tensors.size()));
  return joined(query, dim, contiguous_out(sizes), [dim](int64_t d) { return d > dim ? d - 1 : d; });
}

}  // namespace

void register_joining(Registry& to) {
  Family family(to, "joining");
  family.op("cat", cat);
  family.op("stack", stack);
}

}  // namespace tessera::rules

#include "tessera/rules/detail/rule.h"

#include "tessera/base/error.h"

#include <c10/core/WrapDimMinimal.h>

#include <algorithm>

namespace tessera::rules {
namespace {

// A strategy is usable if it gives R to every plain tensor (one element, equal on all ranks).
bool usable(const Strategy& strategy, const OpQuery& query) {
  for (size_t i = 0; i < query.tensors.size(); i++)
    if (!query.tensors[i].distributed && !strategy.in[i].is_replicate()) return false;
  return true;
}

void check_strategies(const Rule& rule, const OpQuery& query) {
  for (const auto& strategy : rule.strategies)
    TESSERA_CHECK(strategy.in.size() == query.tensors.size() && strategy.out.size() == rule.outs.size(), InternalError,
                  query.schema.operator_name(), ": a strategy has ", strategy.in.size(), " inputs and ",
                  strategy.out.size(), " outputs, but the call has ", query.tensors.size(),
                  " tensors and the rule has the sizes of ", rule.outs.size(), " outputs");
}

// A rule that reads wrong arguments may throw an error of the standard library. It becomes a UsageError.
Rule without_foreign_errors(const RuleFn& fn, const OpQuery& query) {
  TESSERA_CHECK(!query.tensors.empty(), UsageError, query.schema.operator_name(), ": the call has no tensors");
  try {
    return fn(query);
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& e) {
    TESSERA_FAIL(UsageError, query.schema.operator_name(), ": the sharding rule cannot read these arguments (",
                 e.what(), "); compare them with ", query.schema);
  }
}

}  // namespace

void DimsRef::fail(size_t dim) const {
  TESSERA_FAIL(UsageError, "an op that needs dim ", static_cast<int64_t>(dim), " got a tensor with ", size(),
               " dims, of sizes or strides ", c10::IntArrayRef(*this));
}

const TensorArg* OpQuery::find_tensor(int arg, int element) const {
  int i = index_of(arg, element);
  return i < 0 ? nullptr : &tensors[static_cast<size_t>(i)];
}

const TensorArg& OpQuery::tensor(int arg, int element) const {
  const auto* found = find_tensor(arg, element);
  TESSERA_CHECK(found, UsageError, schema.operator_name(), ": argument ", arg, " '",
                schema.arguments()[static_cast<size_t>(arg)].name(), "' has no tensor",
                element < 0 ? std::string() : c10::str(" at position ", element), " in this call");
  return *found;
}

int OpQuery::index_of(int arg, int element) const {
  for (size_t i = 0; i < tensors.size(); i++)
    if (tensors[i].arg == arg && (element < 0 || tensors[i].element == element)) return static_cast<int>(i);
  return -1;
}

int64_t OpQuery::int_at(int arg) const { return args[static_cast<size_t>(arg)].toInt(); }

int64_t OpQuery::dim_at(int arg, int64_t ndim) const {
  return c10::maybe_wrap_dim(int_at(arg), ndim);  // throws the error of the dense op
}

bool OpQuery::bool_at(int arg) const { return args[static_cast<size_t>(arg)].toBool(); }

double OpQuery::double_at(int arg) const { return args[static_cast<size_t>(arg)].toScalar().toDouble(); }

bool OpQuery::is_none(int arg) const { return args[static_cast<size_t>(arg)].isNone(); }

std::vector<int64_t> OpQuery::ints_at(int arg) const {
  const auto& value = args[static_cast<size_t>(arg)];
  if (value.isNone()) return {};
  if (value.isInt()) return {value.toInt()};
  return value.toIntVector();
}

void Registry::add(std::string_view op, std::string_view family, RuleFn fn, ListMode lists, bool reads_scalars) {
  auto checked = [fn = std::move(fn)](const OpQuery& query) {
    Rule rule = without_foreign_errors(fn, query);
    check_strategies(rule, query);
    std::erase_if(rule.strategies, [&](const Strategy& strategy) { return !usable(strategy, query); });
    return rule;
  };
  put(op, OpRule{std::move(checked), lists, std::string(family), reads_scalars});
}

void Registry::put(std::string_view op, OpRule rule) {
  std::lock_guard lock(mutex_);
  auto& slot = rules_[std::string(op)];
  if (slot) replaced_.push_back(std::move(slot));
  slot = std::make_unique<const OpRule>(std::move(rule));
  version_++;
}

void Registry::same_as(std::string_view op, std::string_view like) {
  const auto* known = find(like);
  TESSERA_CHECK(known, UsageError, "'", op, "' cannot use the rule of '", like, "', because '", like, "' has no rule; ",
                "write names with namespace and overload, as in aten::add.Tensor");
  put(op, OpRule(*known));
}

const OpRule* Registry::find(std::string_view op) const {
  std::lock_guard lock(mutex_);
  auto it = rules_.find(std::string(op));
  return it == rules_.end() ? nullptr : it->second.get();
}

std::vector<std::string> Registry::names() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  names.reserve(rules_.size());
  for (const auto& [name, rule] : rules_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

Registry& registry() {
  static Registry& instance = *[] {
    auto* filled = new Registry;  // never destroyed: kernels use it until the process ends
    register_all(*filled);
    return filled;
  }();
  return instance;
}

}  // namespace tessera::rules

#include "tessera/testing/rule_oracle.h"

#include "tessera/base/error.h"
#include "tessera/rules/detail/geometry.h"
#include "tessera/rules/detail/meta_call.h"
#include "tessera/testing/detail/op_call.h"
#include "tessera/testing/detail/simulated_mesh.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <set>
#include <typeinfo>

namespace tessera::testing {
namespace {

using at::Tensor;
using rules::ArgFix;
using rules::Rule;
using rules::Strategy;

// A copy with the same strides, to which ops may write.
Tensor copy_of(const Tensor& t) {
  return at::empty_strided(t.sizes(), rules::dense_strides(t.sizes(), t.strides()), t.options()).copy_(t);
}

std::vector<Tensor> copies_of(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (const auto& t : tensors) copies.push_back(copy_of(t));
  return copies;
}

// One test case: a mesh, and the placements of every input and output of the call.
struct TestCase {
  std::vector<int64_t> mesh_shape;
  std::vector<Placements> in, out;  // one list per tensor
  bool special = false;

  std::string describe() const {
    std::string text;
    for (size_t i = 0; i < in.size(); i++) text += (i ? ", " : "") + to_string(PlacementsRef(in[i]));
    text += " -> ";
    for (size_t i = 0; i < out.size(); i++) text += (i ? ", " : "") + to_string(PlacementsRef(out[i]));
    return text + c10::str(" on mesh ", c10::IntArrayRef(mesh_shape), special ? " by the special op" : "");
  }
};

// One op, its rule, and its result on the full tensors.
class Oracle {
 public:
  Oracle(const Sample& sample, const rules::OpRule& rule) : call_(sample), states_(sample.states) {
    report_.op = sample.op;
    rule_ = rules::evaluate(rule, find_op(sample.op), call_.query(sample.plain_args));
    written_ = copies_of(call_.tensors());
    bool only_special = !call_.has_kernel();  // ATen has only a schema: the special op replaces it
    dense_ = only_special ? call_.run(written_, rule_.special, rule_.special_args) : call_.run(written_);
  }

  RuleReport verify() {
    verify_arguments();
    if (!rule_.decompose.empty()) {
      verify_decomposition();
      return std::move(report_);
    }
    verify_geometry();
    if (rule_.follow)
      verify_follow();
    else
      verify_strategies();
    return std::move(report_);
  }

 private:
  void wrong(const std::string& what) { report_.wrong.push_back(what); }

  // The op wrote only arguments that its schema or the table of hidden writes has.
  void verify_arguments() {
    for (size_t i = 0; i < written_.size(); i++) {
      const auto& slot = call_.slots()[i];
      const bool changed = !difference(call_.tensors()[i], written_[i]).empty();
      if (changed && !slot.written)
        wrong(c10::str("the op writes argument ", slot.arg, " '", call_.schema().arguments()[slot.arg].name(),
                       "', and its schema does not declare it; add it to tessera/rules/hidden_writes.cpp"));
    }
  }

  // bfloat16 or half, if an operand has that dtype.
  at::ScalarType fewest_digits() const {
    auto found = at::ScalarType::Undefined;
    for (const auto& t : call_.tensors())
      for (const auto dtype : {at::kHalf, at::kBFloat16})
        if (t.defined() && t.scalar_type() == dtype && found != at::kBFloat16) found = dtype;
    return found;
  }

  void verify_decomposition() {
    auto tensors = copies_of(call_.tensors());
    auto got = call_.run(tensors, rule_.decompose);
    report_.cases++;
    for (size_t i = 0; i < dense_.size(); i++)
      if (auto why = difference(dense_[i], got.at(i)); !why.empty())
        wrong(c10::str(rule_.decompose, ": output ", i, ": ", why));
  }

  void verify_geometry() {
    bool in_place_view = rule_.follow && dense_.empty();  // its rule has the new geometry of the argument
    if (in_place_view) return;
    if (rule_.outs.size() != dense_.size()) {
      wrong(c10::str("the rule has ", rule_.outs.size(), " outputs, the op has ", dense_.size()));
      return;
    }
    // The op itself never runs, so the strides of its result do not matter.
    const bool always_special =
        !rule_.strategies.empty() && std::all_of(rule_.strategies.begin(), rule_.strategies.end(),
                                                 [](const Strategy& strategy) { return strategy.special; });
    for (size_t i = 0; i < dense_.size(); i++) {
      if (!dense_[i].defined()) continue;
      const auto& predicted = rule_.outs[i];
      auto strides = predicted.strides.empty() ? rules::contiguous(predicted.sizes) : predicted.strides;
      bool same = dense_[i].sizes() == c10::IntArrayRef(predicted.sizes);
      for (int64_t d = 0; same && !always_special && dense_[i].numel() > 0 && d < dense_[i].dim(); d++)
        same = dense_[i].size(d) == 1 || dense_[i].stride(d) == strides[d];
      if (!same)
        wrong(c10::str("output ", i, " is predicted with sizes ", c10::IntArrayRef(predicted.sizes), " strides ",
                       c10::IntArrayRef(strides), "; it has ", dense_[i].sizes(), " and ", dense_[i].strides()));
    }
  }

  // ---- strategies ----

  bool well_formed(const Strategy& strategy) {
    std::set<int64_t> sizes;
    for (size_t i = 0; i < strategy.in.size(); i++) {
      if (!strategy.in[i].is_sharded()) continue;
      if (strategy.in[i].dim >= call_.tensors()[i].dim()) return false;
      sizes.insert(call_.tensors()[i].size(strategy.in[i].dim));
    }
    for (size_t i = 0; i < strategy.out.size(); i++) {
      if (!strategy.out[i].is_sharded()) continue;
      if (strategy.out[i].dim >= static_cast<int64_t>(rule_.outs[i].sizes.size())) return false;
      sizes.insert(rule_.outs[i].sizes[strategy.out[i].dim]);
    }
    return sizes.size() <= 1;
  }

  static bool shards(const Strategy& strategy) {
    return std::any_of(strategy.in.begin(), strategy.in.end(), [](const Placement& p) { return p.is_sharded(); });
  }

  // The kind of shard `kind` with the dim of `p`.
  static Placement with_kind(const Placement& p, const Placement& kind) {
    return p.is_sharded() ? kind.with_dim(p.dim) : p;
  }

  TestCase make_case(std::vector<int64_t> mesh_shape,
                     const std::vector<std::pair<const Strategy*, Placement>>& strategies) const {
    TestCase test{std::move(mesh_shape), std::vector<Placements>(call_.slots().size()),
                  std::vector<Placements>(rule_.outs.size())};
    for (const auto& [strategy, kind] : strategies) {
      for (size_t i = 0; i < test.in.size(); i++) test.in[i].push_back(with_kind(strategy->in[i], kind));
      for (size_t i = 0; i < test.out.size(); i++) test.out[i].push_back(with_kind(strategy->out[i], kind));
      test.special |= strategy->special;
    }
    return test;
  }

  void verify_strategies() {
    for (const auto& strategy : rule_.strategies) {
      report_.strategies++;
      if (!well_formed(strategy)) {
        wrong(c10::str(to_string(PlacementsRef(strategy.in)), " -> ", to_string(PlacementsRef(strategy.out)),
                       ": dims that are sharded together must exist and have equal size"));
        continue;
      }
      std::vector<Placement> kinds = {Shard(0)};
      if (shards(strategy)) kinds.push_back(Shard(0, 2));
      if (shards(strategy) && !strategy.one_range) kinds.push_back(StridedShard(0, 2));
      bool passed = true;
      for (int64_t n = 1; n <= 4 && passed; n++)
        for (const auto& kind : kinds) {
          auto test = make_case({n}, {{&strategy, kind}});
          passed = passed && run_case(test);
          bool other_axis_may_need_it = !rule_.special.empty() && !test.special;
          if (other_axis_may_need_it) {
            test.special = true;
            passed = passed && run_case(test);
          }
        }
    }
    if (!report_.wrong.empty()) return;  // a wrong strategy is also wrong in pairs
    for (const auto& first : rule_.strategies)
      for (const auto& second : rule_.strategies) {
        auto test = make_case({2, 2}, {{&first, Shard(0)}, {&second, Shard(0)}});
        if (!mixes_reductions(test)) run_case(test);
      }
  }

  // The result of two different reductions depends on their order. Strategies of one axis cannot define it.
  static bool mixes_reductions(const TestCase& test) {
    auto mixed = [](const Placements& ps) { return ps[0].is_partial() && ps[1].is_partial() && ps[0] != ps[1]; };
    return std::any_of(test.in.begin(), test.in.end(), mixed) || std::any_of(test.out.begin(), test.out.end(), mixed);
  }

  // ---- views ----

  static std::vector<Placement> placements_of(const Tensor& t) {
    std::vector<Placement> all = {Replicate(), Partial()};
    for (int64_t d = 0; d < t.dim(); d++)
      for (const auto& p : {Shard(d), Shard(d, 2), Shard(d, 3), StridedShard(d, 2), StridedShard(d, 3)})
        all.push_back(p);
    return all;
  }

  void verify_follow() {
    auto all = placements_of(call_.tensors()[0]);
    for (int64_t n = 1; n <= 4; n++)
      for (const auto& p : all) try_follow({n}, {p});
    const std::vector<std::vector<int64_t>> meshes = {{2, 2}, {2, 3}};
    for (const auto& mesh : meshes)
      for (const auto& p : all)
        for (const auto& q : all) try_follow(mesh, {p, q});
  }

  void try_follow(const std::vector<int64_t>& mesh, Placements in) {
    auto answer = rule_.follow(in, mesh);
    Placements out;
    for (size_t axis = 0; axis < in.size(); axis++) {
      if (!answer[axis]) in[axis] = Replicate();
      out.push_back(answer[axis].value_or(Replicate()));
      report_.kept += in[axis].is_sharded() && mesh[axis] > 1;
    }
    auto again = rule_.follow(in, mesh);
    for (size_t axis = 0; axis < in.size(); axis++)
      if (!again[axis] || *again[axis] != out[axis])
        wrong(c10::str("a second call with the gathered axes R, ", to_string(PlacementsRef(in)), " on mesh ",
                       c10::IntArrayRef(mesh), " has another result"));
    TestCase test{mesh, {in}, std::vector<Placements>(rule_.outs.size(), out), !rule_.special.empty()};
    run_case(test);
  }

  // ---- one test case ----

  // Runs the op on every rank's local tensors and compares. Returns true if it is correct.
  bool run_case(const TestCase& test) {
    report_.cases++;
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    generator.set_current_seed(17);
    std::string why;
    try {
      why = contradiction(test);
    } catch (const c10::Error& e) {
      why = c10::str("threw: ", e.msg());
    }
    if (!why.empty() && report_.wrong.size() < 8) wrong(test.describe() + ": " + why);
    return why.empty();
  }

  std::string contradiction(const TestCase& test) {
    std::vector<std::vector<Tensor>> in;  // by slot, by rank
    for (size_t i = 0; i < test.in.size(); i++) in.push_back(scatter(call_.tensors()[i], test.in[i], test.mesh_shape));
    int64_t ranks = 1;
    for (auto n : test.mesh_shape) ranks *= n;
    std::vector<std::vector<Tensor>> out(dense_.size());  // by output, by rank
    for (int64_t rank = 0; rank < ranks; rank++) {
      std::vector<Tensor> locals;
      for (auto& slot : in) locals.push_back(slot[rank]);
      auto results = run_local(test, rank, locals);
      if (results.size() != dense_.size()) return c10::str("rank ", rank, " has ", results.size(), " outputs");
      for (size_t i = 0; i < results.size(); i++) out[i].push_back(results[i]);
      for (size_t i = 0; i < in.size(); i++) in[i][rank] = locals[i];
    }
    for (size_t i = 0; i < dense_.size(); i++) {
      if (dense_[i].defined() != out[i][0].defined())
        return c10::str("output ", i, " is defined for full tensors or for local ones, but not for both");
      if (!dense_[i].defined() || std::count(states_.begin(), states_.end(), i) > 0) continue;
      auto gathered = gather(out[i], test.out[i], test.mesh_shape, dense_[i].sizes(), fewest_digits());
      auto why = gathered.problem.empty() ? difference(dense_[i], gathered.global, fewest_digits()) : gathered.problem;
      if (!why.empty()) return c10::str("output ", i, ": ", why);
    }
    for (size_t i = 0; i < in.size(); i++) {
      bool geometry_changes = rule_.follow != nullptr;  // t_ and similar ops: t tests them
      if (!call_.slots()[i].written || geometry_changes) continue;
      auto gathered = gather(in[i], test.in[i], test.mesh_shape, written_[i].sizes());
      auto why = gathered.problem.empty() ? difference(written_[i], gathered.global) : gathered.problem;
      if (!why.empty()) return c10::str("written argument ", call_.slots()[i].arg, ": ", why);
    }
    return "";
  }

  std::vector<Tensor> run_local(const TestCase& test, int64_t rank, const std::vector<Tensor>& locals) {
    auto coordinate = coordinate_of(rank, test.mesh_shape);
    OpCall local = call_;
    for (const auto& fix : rule_.fixes) local.args()[fix.arg] = value_of(fix, test, coordinate);
    if (!test.special) return local.run(locals);
    auto more = rule_.special_args;
    for (const auto& fix : rule_.special_fixes) more.push_back(value_of(fix, test, coordinate));
    return local.run(locals, rule_.special, more);
  }

  c10::IValue value_of(const ArgFix& fix, const TestCase& test, const std::vector<int64_t>& coordinate) const {
    auto ints = [](const Sizes& sizes) { return c10::IValue(std::vector<int64_t>(sizes.begin(), sizes.end())); };
    auto out_sizes = [&] {
      return local_sizes(test.out[fix.tensor], test.mesh_shape, coordinate, rule_.outs[fix.tensor].sizes);
    };
    auto in_sizes = [&] {
      return local_sizes(test.in[fix.tensor], test.mesh_shape, coordinate, call_.tensors()[fix.tensor].sizes());
    };
    switch (fix.what) {
      case ArgFix::What::OutSizes:
        return ints(out_sizes());
      case ArgFix::What::OutStrides: {
        const auto& predicted = rule_.outs[fix.tensor];
        const auto strides = predicted.strides.empty() ? rules::contiguous(predicted.sizes) : predicted.strides;
        return ints(rules::dense_strides(out_sizes(), strides));
      }
      case ArgFix::What::InSizes:
        return ints(in_sizes());
      case ArgFix::What::InSize:
        return in_sizes()[fix.dim];
      case ArgFix::What::InOffset: {
        auto ranges = local_ranges(test.in[fix.tensor], test.mesh_shape, coordinate, fix.dim,
                                   call_.tensors()[fix.tensor].size(fix.dim));
        return ranges.empty() ? 0 : ranges[0].begin;
      }
    }
    return {};
  }

  OpCall call_;
  std::vector<size_t> states_;
  Rule rule_;
  std::vector<Tensor> written_;  // the arguments after the op ran on the full tensors
  std::vector<Tensor> dense_;    // the outputs on the full tensors
  RuleReport report_;
};

// foreach ops: one sample per list element, with lists of length one.
std::vector<Sample> split_lists(const Sample& sample) {
  OpCall full(sample);
  const auto& first = full.args()[0].isTensorList() ? full.args()[0] : full.args()[1];
  auto length = first.toTensorVector().size();
  std::vector<Sample> samples;
  for (size_t e = 0; e < length; e++) {
    Sample one{sample.op, full.args(), sample.plain_args};
    for (size_t a = 0; a < one.args.size(); a++) {
      auto& value = one.args[a];
      bool one_per_element = full.schema().arguments()[a].name() == "scalars";
      if (value.isTensorList()) {
        auto list = value.toTensorVector();
        value = c10::List<Tensor>();
        if (e < list.size()) value.toTensorList().push_back(list[e]);
      } else if (value.isTensor() && one_per_element) {
        value = value.toTensor().narrow(0, static_cast<int64_t>(e), 1);
      } else if (value.isList() && !value.isIntList() && !value.isBoolList()) {
        auto list = value.toListRef().vec();
        c10::impl::GenericList single(c10::NumberType::get());
        single.push_back(list[e]);
        value = single;
      }
    }
    samples.push_back(std::move(one));
  }
  return samples;
}

}  // namespace

RuleReport verify_rule(const Sample& sample, const rules::OpRule* rule) {
  if (!rule) rule = rules::registry().find(sample.op);
  TESSERA_CHECK(rule, UsageError, "no rule for '", sample.op, "'");
  if (rule->lists == rules::ListMode::Joint) return Oracle(sample, *rule).verify();
  RuleReport all;
  all.op = sample.op;
  for (const auto& one : split_lists(sample)) {
    auto report = Oracle(one, *rule).verify();
    all.strategies += report.strategies;
    all.cases += report.cases;
    all.wrong.insert(all.wrong.end(), report.wrong.begin(), report.wrong.end());
  }
  return all;
}

std::ostream& operator<<(std::ostream& out, const RuleReport& report) {
  out << report.op << ": " << report.strategies << " strategies, " << report.cases << " cases\n";
  for (const auto& line : report.wrong) out << "  WRONG  " << line << "\n";
  return out;
}

std::vector<std::string> ops_of_family(const std::string& family) {
  std::vector<std::string> ops;
  for (const auto& name : rules::registry().names())
    if (rules::registry().find(name)->family == family) ops.push_back(name);
  return ops;
}

namespace {

// LibTorch's own code stops the process for wrong arguments of these.
constexpr std::string_view kCrashesWhenPlain[] = {"aten::fractional_max_pool2d_backward",
                                                  "aten::fractional_max_pool3d_backward"};

// Calls like the sample in which one argument is changed to a value that often has no meaning for the op.
std::vector<Sample> broken_calls(const Sample& sample) {
  const OpCall valid(sample);
  std::vector<Sample> broken;
  const auto add = [&](size_t arg, c10::IValue value) {
    Sample changed{sample.op, valid.args(), sample.plain_args};
    changed.args[arg] = std::move(value);
    broken.push_back(std::move(changed));
  };
  for (size_t a = 0; a < valid.args().size(); a++) {
    const auto& value = valid.args()[a];
    if (value.isTensor() && value.toTensor().defined()) {
      const auto& t = value.toTensor();
      for (const std::vector<int64_t>& sizes :
           {std::vector<int64_t>{}, {0}, {7}, {2, 7}, {7, 2, 3}, {1, 2, 3, 4, 5, 6}})
        add(a, at::empty(sizes, t.options()));
    } else if (value.isTensorList()) {
      add(a, c10::List<Tensor>());
      auto list = value.toTensorVector();
      for (auto& t : list) t = at::empty({}, t.options());
      add(a, list);
    } else if (value.isInt() && valid.schema().arguments()[a].real_type()->kind() == c10::TypeKind::IntType) {
      for (int64_t i : {0, -1, 1, 5, -9, 100}) add(a, i);
    } else if (value.isIntList()) {
      for (const std::vector<int64_t>& ints : {std::vector<int64_t>{}, {-9}, {0, 0}, {-1, -1}, {3, -5, 9, 100, 2}})
        add(a, ints);
    }
  }
  return broken;
}

// A rule runs before ATen checks the arguments: whatever they are, it returns or throws an error of ours.
void verify_broken_calls(const Sample& sample, std::vector<std::string>& problems) {
  const auto& rule = *rules::registry().find(sample.op);
  for (const auto& broken : broken_calls(sample)) {
    try {
      const OpCall call(broken);
      rules::evaluate(rule, find_op(broken.op), call.query(broken.plain_args));
    } catch (const InternalError& e) {
      problems.push_back(sample.op + "  a call with wrong arguments is an internal error: " + e.msg());
    } catch (const c10::Error&) {
    } catch (const std::exception& e) {
      problems.push_back(
          c10::str(sample.op, "  a call with wrong arguments throws ", typeid(e).name(), ": ", e.what()));
    }
  }
}

}  // namespace

FamilyReport verify_family(const std::string& family, const std::vector<Sample>& samples,
                           const std::vector<std::string>& exempt) {
  FamilyReport all;
  all.family = family;
  all.exempt = static_cast<int64_t>(exempt.size());
  std::set<std::string> tried;
  for (const auto& sample : samples) {
    const bool first = tried.insert(sample.op).second;
    try {
      const bool crashes = std::count(std::begin(kCrashesWhenPlain), std::end(kCrashesWhenPlain), sample.op) > 0;
      if (first && !crashes) verify_broken_calls(sample, all.problems);
      auto report = verify_rule(sample);
      all.strategies += report.strategies;
      all.cases += report.cases;
      for (const auto& line : report.wrong) all.problems.push_back(sample.op + "  WRONG  " + line);
    } catch (const std::exception& e) {
      std::string what = e.what();
      all.problems.push_back(sample.op + "  the sample throws: " + what.substr(0, what.find('\n')));
    }
  }
  for (const auto& op : ops_of_family(family)) {
    all.ops++;
    bool is_exempt = std::find(exempt.begin(), exempt.end(), op) != exempt.end();
    if (tried.count(op) == 0 && !is_exempt) all.problems.push_back(op + "  has a rule but no sample");
    if (tried.count(op) > 0 && is_exempt) all.problems.push_back(op + "  is exempt but has a sample");
  }
  return all;
}

std::ostream& operator<<(std::ostream& out, const FamilyReport& report) {
  out << report.family << ": " << report.ops << " ops (" << report.exempt << " exempt), " << report.strategies
      << " strategies, " << report.cases << " cases, " << report.problems.size() << " problems\n";
  for (const auto& line : report.problems) out << "  " << line << "\n";
  return out;
}

}  // namespace tessera::testing

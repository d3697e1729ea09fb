#include "tessera/testing/rule_oracle.h"

#include "tessera/base/error.h"
#include "tessera/rules/detail/geometry.h"
#include "tessera/testing/detail/op_call.h"
#include "tessera/testing/detail/simulated_mesh.h"

#include <ATen/Context.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <set>

namespace tessera::testing {
namespace {

using at::Tensor;
using rules::ArgFix;
using rules::Row;
using rules::Rule;

// A copy with the same strides: ops may write to it.
Tensor copy_of(const Tensor& t) {
  return at::empty_strided(t.sizes(), rules::dense_strides(t.sizes(), t.strides()), t.options()).copy_(t);
}

std::vector<Tensor> copies_of(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (const auto& t : tensors) copies.push_back(copy_of(t));
  return copies;
}

// How every tensor of a call lies over a mesh: one list of placements for each.
struct Layout {
  std::vector<int64_t> mesh_shape;
  std::vector<Placements> in, out;
  bool special = false;

  std::string describe() const {
    std::string text;
    for (size_t i = 0; i < in.size(); i++) text += (i ? ", " : "") + to_string(PlacementsRef(in[i]));
    text += " -> ";
    for (size_t i = 0; i < out.size(); i++) text += (i ? ", " : "") + to_string(PlacementsRef(out[i]));
    return text + c10::str(" on mesh ", c10::IntArrayRef(mesh_shape), special ? " by the special op" : "");
  }
};

// One op, its rule, and its result on the whole.
class Oracle {
 public:
  Oracle(const Sample& sample, const rules::OpRule& rule) : call_(sample) {
    report_.op = sample.op;
    rule_ = rule.fn(call_.query(sample.plain_args));
    written_ = copies_of(call_.tensors());
    bool only_special = !call_.has_kernel();  // a schema of ATen's without a kernel: the special op is the op
    dense_ = only_special ? call_.run(written_, rule_.special, rule_.special_args) : call_.run(written_);
  }

  RuleReport verify() {
    if (!rule_.decompose.empty()) {
      verify_decomposition();
      return std::move(report_);
    }
    verify_geometry();
    if (rule_.follow)
      verify_follow();
    else
      verify_rows();
    return std::move(report_);
  }

 private:
  void wrong(const std::string& what) { report_.wrong.push_back(what); }

  void verify_decomposition() {
    auto tensors = copies_of(call_.tensors());
    auto got = call_.run(tensors, rule_.decompose);
    report_.cases++;
    for (size_t i = 0; i < dense_.size(); i++)
      if (auto why = difference(dense_[i], got.at(i)); !why.empty())
        wrong(c10::str(rule_.decompose, ": output ", i, ": ", why));
  }

  void verify_geometry() {
    bool in_place_view = rule_.follow && dense_.empty();  // states the new geometry of its argument
    if (in_place_view) return;
    if (rule_.outs.size() != dense_.size()) {
      wrong(c10::str("the rule states ", rule_.outs.size(), " outputs, the op has ", dense_.size()));
      return;
    }
    for (size_t i = 0; i < dense_.size(); i++) {
      if (!dense_[i].defined()) continue;
      const auto& stated = rule_.outs[i];
      auto strides = stated.strides.empty() ? rules::contiguous(stated.sizes) : stated.strides;
      bool same = dense_[i].sizes() == c10::IntArrayRef(stated.sizes);
      for (int64_t d = 0; same && dense_[i].numel() > 0 && d < dense_[i].dim(); d++)
        same = dense_[i].size(d) == 1 || dense_[i].stride(d) == strides[d];
      if (!same)
        wrong(c10::str("output ", i, " is stated as sizes ", c10::IntArrayRef(stated.sizes), " strides ",
                       c10::IntArrayRef(strides), "; it has ", dense_[i].sizes(), " and ", dense_[i].strides()));
    }
  }

  // Rows
  // ---------------------------------------------------------------------------------------------------------------

  bool well_formed(const Row& row) {
    std::set<int64_t> sizes;
    for (size_t i = 0; i < row.in.size(); i++) {
      if (!row.in[i].is_sharded()) continue;
      if (row.in[i].dim >= call_.tensors()[i].dim()) return false;
      sizes.insert(call_.tensors()[i].size(row.in[i].dim));
    }
    for (size_t i = 0; i < row.out.size(); i++) {
      if (!row.out[i].is_sharded()) continue;
      if (row.out[i].dim >= static_cast<int64_t>(rule_.outs[i].sizes.size())) return false;
      sizes.insert(rule_.outs[i].sizes[row.out[i].dim]);
    }
    return sizes.size() <= 1;
  }

  static bool cuts(const Row& row) {
    return std::any_of(row.in.begin(), row.in.end(), [](const Placement& p) { return p.is_sharded(); });
  }

  // `way` with the dims of the row.
  static Placement bound(const Placement& p, const Placement& way) { return p.is_sharded() ? way.with_dim(p.dim) : p; }

  Layout layout_of(std::vector<int64_t> mesh_shape, const std::vector<std::pair<const Row*, Placement>>& rows) const {
    Layout layout{std::move(mesh_shape), std::vector<Placements>(call_.slots().size()),
                  std::vector<Placements>(rule_.outs.size())};
    for (const auto& [row, way] : rows) {
      for (size_t i = 0; i < layout.in.size(); i++) layout.in[i].push_back(bound(row->in[i], way));
      for (size_t i = 0; i < layout.out.size(); i++) layout.out[i].push_back(bound(row->out[i], way));
      layout.special |= row->special;
    }
    return layout;
  }

  void verify_rows() {
    for (const auto& row : rule_.rows) {
      report_.rows++;
      if (!well_formed(row)) {
        wrong(c10::str(to_string(PlacementsRef(row.in)), " -> ", to_string(PlacementsRef(row.out)),
                       ": dims cut together must exist and have equal size"));
        continue;
      }
      std::vector<Placement> ways = {Shard(0)};
      if (cuts(row)) ways.push_back(Shard(0, 2));
      if (cuts(row) && !row.one_run) ways.push_back(StridedShard(0, 2));
      bool held = true;
      for (int64_t n = 1; n <= 4 && held; n++)
        for (const auto& way : ways) {
          auto layout = layout_of({n}, {{&row, way}});
          held = held && try_layout(layout);
          bool other_axis_may_ask = !rule_.special.empty() && !layout.special;
          if (other_axis_may_ask) {
            layout.special = true;
            held = held && try_layout(layout);
          }
        }
    }
    if (!report_.wrong.empty()) return;  // a wrong row is also wrong with others
    for (const auto& first : rule_.rows)
      for (const auto& second : rule_.rows) {
        auto layout = layout_of({2, 2}, {{&first, Shard(0)}, {&second, Shard(0)}});
        if (!mixes_reductions(layout)) try_layout(layout);
      }
  }

  // A maximum over one axis of sums over another depends on which comes first: not a question of rows.
  static bool mixes_reductions(const Layout& layout) {
    auto mixed = [](const Placements& ps) { return ps[0].is_partial() && ps[1].is_partial() && ps[0] != ps[1]; };
    return std::any_of(layout.in.begin(), layout.in.end(), mixed) ||
           std::any_of(layout.out.begin(), layout.out.end(), mixed);
  }

  // Views
  // --------------------------------------------------------------------------------------------------------------

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
        wrong(c10::str("asked again with the gathered axes R, ", to_string(PlacementsRef(in)), " on mesh ",
                       c10::IntArrayRef(mesh), " is answered differently"));
    Layout layout{mesh, {in}, std::vector<Placements>(rule_.outs.size(), out), !rule_.special.empty()};
    try_layout(layout);
  }

  // Both
  // ---------------------------------------------------------------------------------------------------------------

  // Runs the op on every rank's part and compares; true if it held.
  bool try_layout(const Layout& layout) {
    report_.cases++;
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    generator.set_current_seed(17);
    std::string why;
    try {
      why = contradiction(layout);
    } catch (const c10::Error& e) {
      why = c10::str("threw: ", e.msg());
    }
    if (!why.empty() && report_.wrong.size() < 8) wrong(layout.describe() + ": " + why);
    return why.empty();
  }

  std::string contradiction(const Layout& layout) {
    std::vector<std::vector<Tensor>> in;  // by slot, by rank
    for (size_t i = 0; i < layout.in.size(); i++)
      in.push_back(scatter(call_.tensors()[i], layout.in[i], layout.mesh_shape));
    int64_t ranks = 1;
    for (auto n : layout.mesh_shape) ranks *= n;
    std::vector<std::vector<Tensor>> out(dense_.size());  // by output, by rank
    for (int64_t rank = 0; rank < ranks; rank++) {
      std::vector<Tensor> locals;
      for (auto& slot : in) locals.push_back(slot[rank]);
      auto results = run_local(layout, rank, locals);
      if (results.size() != dense_.size()) return c10::str("rank ", rank, " has ", results.size(), " outputs");
      for (size_t i = 0; i < results.size(); i++) out[i].push_back(results[i]);
      for (size_t i = 0; i < in.size(); i++) in[i][rank] = locals[i];
    }
    for (size_t i = 0; i < dense_.size(); i++) {
      if (dense_[i].defined() != out[i][0].defined()) return c10::str("output ", i, " is defined here and not there");
      if (!dense_[i].defined()) continue;
      auto joined = join(out[i], layout.out[i], layout.mesh_shape, dense_[i].sizes());
      auto why = joined.problem.empty() ? difference(dense_[i], joined.whole) : joined.problem;
      if (!why.empty()) return c10::str("output ", i, ": ", why);
    }
    for (size_t i = 0; i < in.size(); i++) {
      bool geometry_changes = rule_.follow != nullptr;  // t_: checked by its output's twin
      if (!call_.slots()[i].written || geometry_changes) continue;
      auto joined = join(in[i], layout.in[i], layout.mesh_shape, written_[i].sizes());
      auto why = joined.problem.empty() ? difference(written_[i], joined.whole) : joined.problem;
      if (!why.empty()) return c10::str("written argument ", call_.slots()[i].arg, ": ", why);
    }
    return "";
  }

  std::vector<Tensor> run_local(const Layout& layout, int64_t rank, const std::vector<Tensor>& locals) {
    auto coordinate = coordinate_of(rank, layout.mesh_shape);
    OpCall local = call_;
    for (const auto& fix : rule_.fixes) local.args()[fix.arg] = value_of(fix, layout, coordinate);
    if (!layout.special) return local.run(locals);
    auto more = rule_.special_args;
    for (const auto& fix : rule_.special_fixes) more.push_back(value_of(fix, layout, coordinate));
    return local.run(locals, rule_.special, more);
  }

  c10::IValue value_of(const ArgFix& fix, const Layout& layout, const std::vector<int64_t>& coordinate) const {
    auto ints = [](const Sizes& sizes) { return c10::IValue(std::vector<int64_t>(sizes.begin(), sizes.end())); };
    auto out_sizes = [&] {
      return local_sizes(layout.out[fix.tensor], layout.mesh_shape, coordinate, rule_.outs[fix.tensor].sizes);
    };
    auto in_sizes = [&] {
      return local_sizes(layout.in[fix.tensor], layout.mesh_shape, coordinate, call_.tensors()[fix.tensor].sizes());
    };
    switch (fix.what) {
      case ArgFix::What::OutSizes:
        return ints(out_sizes());
      case ArgFix::What::OutStrides: {
        const auto& stated = rule_.outs[fix.tensor];
        return ints(rules::dense_strides(out_sizes(),
                                         stated.strides.empty() ? rules::contiguous(stated.sizes) : stated.strides));
      }
      case ArgFix::What::InSizes:
        return ints(in_sizes());
      case ArgFix::What::InSize:
        return in_sizes()[fix.dim];
      case ArgFix::What::InOffset: {
        auto runs = local_runs(layout.in[fix.tensor], layout.mesh_shape, coordinate, fix.dim,
                               call_.tensors()[fix.tensor].size(fix.dim));
        return runs.empty() ? 0 : runs[0].begin;
      }
    }
    return {};
  }

  OpCall call_;
  Rule rule_;
  std::vector<Tensor> written_;  // the arguments after the op ran on the whole
  std::vector<Tensor> dense_;    // its outputs
  RuleReport report_;
};

// foreach: element e of every list as a call of its own with lists of one.
std::vector<Sample> one_by_one(const Sample& sample) {
  OpCall whole(sample);
  const auto& first = whole.args()[0].isTensorList() ? whole.args()[0] : whole.args()[1];
  auto length = first.toTensorVector().size();
  std::vector<Sample> samples;
  for (size_t e = 0; e < length; e++) {
    Sample one{sample.op, whole.args(), sample.plain_args};
    for (size_t a = 0; a < one.args.size(); a++) {
      auto& value = one.args[a];
      bool one_for_each = whole.schema().arguments()[a].name() == "scalars";
      if (value.isTensorList()) {
        auto list = value.toTensorVector();
        value = c10::List<Tensor>();
        if (e < list.size()) value.toTensorList().push_back(list[e]);
      } else if (value.isTensor() && one_for_each) {
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
  for (const auto& one : one_by_one(sample)) {
    auto report = Oracle(one, *rule).verify();
    all.rows += report.rows;
    all.cases += report.cases;
    all.wrong.insert(all.wrong.end(), report.wrong.begin(), report.wrong.end());
  }
  return all;
}

std::ostream& operator<<(std::ostream& out, const RuleReport& report) {
  out << report.op << ": " << report.rows << " rows, " << report.cases << " cases\n";
  for (const auto& line : report.wrong) out << "  WRONG  " << line << "\n";
  return out;
}

std::vector<std::string> ops_of_family(const std::string& family) {
  std::vector<std::string> ops;
  for (const auto& name : rules::registry().names())
    if (rules::registry().find(name)->family == family) ops.push_back(name);
  return ops;
}

FamilyReport verify_family(const std::string& family, const std::vector<Sample>& samples,
                           const std::vector<std::string>& exempt) {
  FamilyReport all;
  all.family = family;
  all.exempt = static_cast<int64_t>(exempt.size());
  std::set<std::string> tried;
  for (const auto& sample : samples) {
    tried.insert(sample.op);
    try {
      auto report = verify_rule(sample);
      all.rows += report.rows;
      all.cases += report.cases;
      for (const auto& line : report.wrong) all.problems.push_back(sample.op + "  WRONG  " + line);
    } catch (const std::exception& e) {
      std::string what = e.what();
      all.problems.push_back(sample.op + "  the sample does not run: " + what.substr(0, what.find('\n')));
    }
  }
  for (const auto& op : ops_of_family(family)) {
    all.ops++;
    bool excused = std::find(exempt.begin(), exempt.end(), op) != exempt.end();
    if (tried.count(op) == 0 && !excused) all.problems.push_back(op + "  has a rule and no sample");
    if (tried.count(op) > 0 && excused) all.problems.push_back(op + "  has a sample and is called exempt");
  }
  return all;
}

std::ostream& operator<<(std::ostream& out, const FamilyReport& report) {
  out << report.family << ": " << report.ops << " ops (" << report.exempt << " exempt), " << report.rows << " rows, "
      << report.cases << " cases, " << report.problems.size() << " problems\n";
  for (const auto& line : report.problems) out << "  " << line << "\n";
  return out;
}

}  // namespace tessera::testing

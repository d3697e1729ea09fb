#include "tessera/base/error.h"
#include "tessera/compile/detail/api/classic_locale.h"
#include "tessera/compile/detail/api/traced_program.h"
#include "tessera/compile/detail/trace/local_tensors.h"
#include "tessera/compile/detail/trace/thread_ranks.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

// Checks of a compiled program in its first calls: the function is traced again, and runs in eager mode from the same
// state.
namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

// The node that writes a buffer last.
std::string writer_of(const Program& program, int32_t buffer) {
  for (size_t n = program.nodes.size(); n-- > 0;) {
    bool writes = false;
    const auto test = [&](ValueId id) { writes |= program.buffer_of(id) == buffer; };
    program.nodes[n].each_write(test);
    program.nodes[n].each_result(test);
    if (writes) return c10::str(", which op ", n, ", ", program.nodes[n].name(), ", computes,");
  }
  return "";
}

// Relative and absolute tolerance of sums in another order, by dtype.
std::pair<double, double> tolerance_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kHalf:
      return {1e-2, 1e-5};
    case c10::kBFloat16:
      return {1e-1, 1e-5};
    case c10::kDouble:
    case c10::kComplexDouble:
      return {1e-7, 1e-7};
    default:
      return {1.3e-5, 1e-5};
  }
}

// bfloat16 or half, if a program computes in it (autocast).
std::optional<c10::ScalarType> narrow_dtype_of(const Program& program) {
  const auto rounds_operands = [](const Node& node) {  // as passes/widen_bfloat16.cpp arranges it
    return node.name() == "tessera.cpu_kernel" && std::get<c10::IValue>(node.args[3]).toStringRef().ends_with("_bf16");
  };
  if (std::any_of(program.nodes.begin(), program.nodes.end(), rounds_operands)) return c10::kBFloat16;
  for (const auto dtype : {c10::kBFloat16, c10::kHalf})
    if (std::any_of(program.values.begin(), program.values.end(),
                    [&](const Value& value) { return value.type.dtype == dtype; }))
      return dtype;
  return {};
}

// The largest difference; 0 if they cannot be compared.
double distance(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined() || a.numel() == 0 || a.sizes() != b.sizes() || !a.is_floating_point()) return 0;
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().nan_to_num(0, 0, 0).max().item<double>();
}

// The first element that differs, in the order of memory: "element 3 is 0.5, in eager mode 0.25". "": equal.
// `exact`: equal values, where NaN equals NaN. Otherwise within the tolerance, relative to the largest element.
// `narrow`: the dtype with the fewest bits that the program computes in, whose rounding is in wider results, too.
// `noise`: the error of eager mode by such rounding, if it is known.
std::string difference_of_values(const at::Tensor& compiled, const at::Tensor& eager, bool exact,
                                 std::optional<c10::ScalarType> narrow, std::optional<double> noise) {
  const at::NoGradGuard no_grad;
  const OpModesOff off;
  const auto describe = [](const at::Tensor& t) { return t.defined() ? TensorGuard::describe(t) : "undefined"; };
  if (!compiled.defined() || !eager.defined())
    return compiled.defined() == eager.defined() ? ""
                                                 : "is " + describe(compiled) + ", in eager mode " + describe(eager);
  if (compiled.sizes() != eager.sizes() || compiled.scalar_type() != eager.scalar_type())
    return "is " + describe(compiled) + ", in eager mode " + describe(eager);
  if (compiled.numel() == 0) return "";
  const auto a = compiled.detach().resolve_conj().resolve_neg().flatten();
  const auto b = eager.detach().resolve_conj().resolve_neg().flatten();
  auto differs = a != b;
  if (b.is_floating_point() || b.is_complex()) {
    differs = differs & ~(a.isnan() & b.isnan());
    if (!exact) {
      constexpr double kRoundings = 1.6e-2, kTimesNoise = 4;  // four roundings to bfloat16
      auto [relative, absolute] = tolerance_of(narrow.value_or(b.scalar_type()));
      if (noise) relative = kRoundings, absolute += kTimesNoise * *noise;
      const auto magnitude = b.abs().nan_to_num(0, 0, 0).max();
      differs = differs & ~((a - b).abs() <= absolute + relative * magnitude);
    }
  }
  if (!differs.any().item<bool>()) return "";
  const auto at = differs.to(at::kByte).argmax().item<int64_t>();
  const auto text = [&](const at::Tensor& t) {
    const auto number = t[at].item();
    if (number.isComplex()) return c10::str(number.toComplexDouble());
    return number.isFloatingPoint() ? c10::str(number.toDouble()) : c10::str(number.toLong());
  };
  return c10::str("differs: element ", at, " is ", text(a), ", in eager mode ", text(b));
}

}  // namespace

std::function<void()> TracedProgram::keep_collected() {
  auto collected = [this] {
    return std::tie(stream_, guards_, on_replay_, captured_, returned_, gradient_placeholders_, live_, reached_modules_,
                    leaves_);
  };
  auto kept = std::apply([](const auto&... each) { return std::tuple(each...); }, collected());
  return [collected, kept = std::move(kept)] { collected() = kept; };
}

// Traces the function once more, and compares with the trace of the program. "": equal.
std::string TracedProgram::difference_of_trace(const CallArguments& arguments, const TracedFunction& function,
                                               const Settings& settings) {
  const auto restore = keep_collected();
  TraceText now;
  traces_ = {};
  const std::function<Tensors()> run = [&] { return call_and_keep_numbers(function, nullptr); };
  TraceRequest request{run, settings};
  request.text_only = &now;
  try {
    trace_until_settled(arguments, request);
  } catch (...) {
    restore();
    traces_ = {};
    throw;
  }
  restore();
  traces_ = {};
  return difference(now, traced_text_, number_uses_, numbers_of(arguments));
}

std::optional<Returned> TracedProgram::check_if_due(const CallArguments& arguments, const TracedFunction& function,
                                                    const Settings& settings) {
  const auto call = ++calls_;
  if (is_loaded_ && call == 1) return {};
  const bool asked = call <= settings.check, again = check_again_ && (call & (call - 1)) == 0;
  if (!asked && !again) return {};
  const ClassicLocaleScope numbers_in_text;
  const auto text = call == 1 ? "" : difference_of_trace(arguments, function, settings);
  TESSERA_CHECK(text.empty(), UsageError,
                "compile: something that the step reads and that is not among its arguments, for example a captured "
                "variable, has changed since the step was traced: ",
                text,
                ". Results since the last check may be wrong. Pass it as an argument, or declare it with ts::live(x)");
  if (!(asked || check_values_) || !can_run_beside_eager(settings)) return {};
  auto returned = run_beside_eager(arguments, function, is_exact(settings));
  exclude_changed_members();
  return returned;
}

// Not of a function that communicates: every collective would be posted twice, and FSDP keeps gradients that are not
// reduced yet elsewhere than a program does. Not if ranks are threads that draw from one generator: the two runs would
// get other numbers.
bool TracedProgram::can_run_beside_eager(const Settings& settings) const {
  return confirmed_ && !settings.parallel_mode && executable_->program().groups.empty() &&
         !(ranks_are_threads() && !generators_.empty());
}

// Equal bits, unless the program is not made by built-in passes alone, or has an op that depends on uninitialised
// memory: LibTorch's gelsy, the default of linalg_lstsq, pivots by an array that nobody has filled.
bool TracedProgram::is_exact(const Settings& settings) const {
  for (const auto& node : executable_->program().nodes)
    if (node.op.operator_name().name == "aten::linalg_lstsq") return false;
  const auto& all = known_passes();
  const auto is_known = [&](const Pass& pass) {
    return std::any_of(all.begin(), all.end(), [&](const PassInfo& info) { return pass.name.starts_with(info.name); });
  };
  const auto changes_rounding = [&](const PassReport& pass) {
    return pass.matched.times > 0 && std::any_of(all.begin(), all.end(), [&](const PassInfo& info) {
             return info.is_fast_only && pass.name == info.name;
           });
  };
  if (std::any_of(report_.begin(), report_.end(), changes_rounding)) return false;
  return !settings.run_with && std::all_of(settings.passes.begin(), settings.passes.end(), is_known);
}

void TracedProgram::find_written_buffers(const Program& program) {
  const auto external = program.external_buffers();
  std::set<int32_t> written;
  for (const auto& node : program.nodes)
    node.each_write([&](ValueId id) {
      if (external[static_cast<size_t>(program.buffer_of(id))]) written.insert(program.buffer_of(id));
    });
  written_buffers_.assign(written.begin(), written.end());
}

SavedState TracedProgram::save_before_run(const CallArguments& arguments) const {
  SavedState state(generators_);
  for (const auto buffer : written_buffers_) state.add_memory(bindings_.tensor_of(buffer, arguments));
  return state;
}

TracedProgram::CheckedTensors TracedProgram::written_memory(const CallArguments& arguments) const {
  CheckedTensors all;
  const auto& program = executable_->program();
  for (const auto buffer : written_buffers_) {
    const auto input = std::find_if(program.inputs.begin(), program.inputs.end(),
                                    [&](const Input& each) { return program.buffer_of(each.value) == buffer; });
    const auto owner = bindings_.tensor_of(buffer, arguments);
    if (input == program.inputs.end() || input->role == Role::Gradient || !owner.defined()) continue;
    std::ostringstream name;
    name << input->role << " " << input->name;
    all.push_back({name.str(), storage_as_tensor(local_or_self(owner)).clone(), buffer});
  }
  for (auto generator : generators_) {
    const std::lock_guard lock(generator.mutex());
    all.push_back({"the state of a random generator", generator.get_state()});
  }
  return all;
}

void TracedProgram::compare_with_eager(const CheckedTensors& compiled, const CheckedTensors& eager, bool exact,
                                       const char* state, const Tensors& in_float32) const {
  // An optimizer can amplify another order of sums: what it updates is compared only if equal bits are expected.
  const auto is_updated_by_optimizer = [&](int32_t buffer) {
    const auto& inputs = executable_->program().inputs;
    return std::any_of(inputs.begin(), inputs.end(), [&](const Input& input) {
      return executable_->program().buffer_of(input.value) == buffer &&
             (input.role == Role::Parameter || input.role == Role::State);
    });
  };
  // bfloat16 rounds what is summed, so an error is relative to that, not to the sum, which can be far smaller: the
  // gradient of the bias of keys in attention is exactly 0. So the error of eager mode is measured, for all tensors of
  // a module together, because that of a few elements can be small by chance.
  const auto narrow = narrow_dtype_of(executable_->program());
  const auto module_of = [](const std::string& name) { return name.substr(0, name.rfind('.')); };
  std::map<std::string, double> noise;
  {
    const at::NoGradGuard no_grad;
    const OpModesOff off;
    for (size_t i = 0; i < std::min(in_float32.size(), eager.size()); i++) {
      auto& of_module = noise[module_of(eager[i].name)];
      of_module = std::max(of_module, distance(eager[i].value, in_float32[i]));
    }
  }
  for (size_t i = 0; i < compiled.size(); i++) {
    const auto& [name, value, buffer] = compiled[i];
    if (!exact && is_updated_by_optimizer(buffer)) continue;
    const bool on_cpu = !value.defined() || value.is_cpu();  // kernels on other devices add in any order
    const auto text =
        difference_of_values(value, i < eager.size() ? eager[i].value : at::Tensor(), exact && on_cpu, narrow,
                             i < in_float32.size() ? std::optional(noise[module_of(name)]) : std::nullopt);
    TESSERA_CHECK(text.empty(), UsageError,
                  "compile: a compiled program differs from eager mode, from the same state: ", name,
                  writer_of(executable_->program(), buffer), " ", text, ". ", state,
                  " Results since the last check may be wrong. Please report it, with the program (listing()); "
                  "{.passes = PassList{}, .codegen = false} shows whether a pass is the cause");
  }
}

}  // namespace tessera::compiler

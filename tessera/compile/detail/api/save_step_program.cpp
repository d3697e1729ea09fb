#include "tessera/base/error.h"
#include "tessera/compile/detail/api/build_executable.h"
#include "tessera/compile/detail/api/call_description.h"
#include "tessera/compile/detail/api/saved_step.h"
#include "tessera/compile/detail/api/step_program.h"
#include "tessera/compile/detail/ir/constant_text.h"
#include "tessera/compile/detail/trace/local_tensors.h"
#include "tessera/optim/optimizer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

// StepProgram::save and load: a compiled step as a file, and a file as a program of this process.
namespace tessera::compiler {
namespace {

using SourceKind = SavedStep::NumberSource::Kind;

bool is_captured_constant(const Input& input) {
  return input.role == Role::Captured && input.name.starts_with("constant ");
}

// The optimizer and group whose learning rate a number is: it is changed, the number read, and restored.
std::optional<SavedStep::NumberSource> learning_rate_of(const Number& number, const CallArguments& arguments) {
  for (size_t i = 0; i < arguments.optimizers.size(); i++) {
    auto* optimizer = dynamic_cast<optim::Optimizer*>(arguments.optimizers[i]);
    for (size_t g = 0; optimizer && g < optimizer->group_count(); g++) {
      const double before = optimizer->lr(g), other = before + 1;
      optimizer->set_lr(g, other);
      const auto read = number.read();
      optimizer->set_lr(g, before);
      if (read.isDouble() && read.toDouble() == other)
        return SavedStep::NumberSource{SourceKind::LearningRate, static_cast<int64_t>(i), static_cast<int64_t>(g)};
    }
  }
  return {};
}

SavedStep::NumberSource source_of(const Number& number, const CallArguments& arguments) {
  constexpr std::string_view kOfCall = "number";
  if (number.name == "seed") return {SourceKind::Seed};
  if (number.name == "draws") return {SourceKind::Draws};
  if (number.name.starts_with(kOfCall))
    return {SourceKind::NumberOfCall, std::stoll(number.name.substr(kOfCall.size()))};
  const auto rate = learning_rate_of(number, arguments);
  TESSERA_CHECK(rate, UsageError, "save: the program reads $", number.name,
                " in each run, which is not the learning rate of an optimizer among the arguments; a saved step cannot "
                "read it");
  return *rate;
}

// Moves the values of a buffer by some bytes.
void shift_buffer(Program& program, int32_t buffer, int64_t bytes) {
  for (auto& value : program.values) {
    if (value.buffer != buffer) continue;
    TESSERA_CHECK(bytes % value.type.itemsize() == 0, UsageError, "a saved step has a ", value.type,
                  " in memory that begins at a byte that is not a multiple of its element size");
    value.offset += bytes / value.type.itemsize();
  }
}

// Text has no offset for the first value of a buffer: inputs begin at 0.
Program with_inputs_at_0(Program program) {
  renumber(program);
  std::vector<char> seen(static_cast<size_t>(program.buffers), 0);
  for (const auto& input : program.inputs) {
    const auto value = program[input.value];
    if (std::exchange(seen[static_cast<size_t>(value.buffer)], 1)) continue;
    shift_buffer(program, value.buffer, -value.offset * value.type.itemsize());
  }
  return program;
}

// The text of a program. UsageError if reading it gives another one.
std::string checked_text_of(const Program& program) {
  auto text = text_of(program);
  std::string why;
  try {
    const auto read = parse(text);
    verify(read);
    const auto now = text_of(read);
    const auto at =
        static_cast<size_t>(std::mismatch(now.begin(), now.end(), text.begin(), text.end()).second - text.begin());
    if (now != text) why = "it changes at \"" + text.substr(text.rfind('\n', at) + 1, 80) + "\"";
    for (size_t v = 0; v < program.values.size() && why.empty(); v++)
      if (v >= read.values.size() || read.values[v].type != program.values[v].type ||
          read.values[v].offset != program.values[v].offset)
        why = c10::str("%", v, " is another value when it is read");
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  }
  TESSERA_CHECK(why.empty(), UsageError, "save: the program cannot be written as text: ", why);
  return text;
}

// From the first element to the last, gaps included.
std::string bytes_of(const at::Tensor& t) {
  return {static_cast<const char*>(t.const_data_ptr()), static_cast<size_t>(Type::of(t).span()) * t.itemsize()};
}

}  // namespace

// ---- save

SavedStep StepProgram::save(const CallArguments& arguments, const Settings& settings) const {
  const auto& program = executable_->program();
  const auto refuse = [](bool is_so, const char* what) { TESSERA_CHECK(!is_so, UsageError, "save: ", what); };
  refuse(!program.groups.empty() || settings.parallel_mode, "the step communicates; a saved step runs on one rank");
  refuse(settings.run_with != nullptr, "the step has a runner of its own (CompileOptions::run_with)");
  refuse(std::any_of(program.values.begin(), program.values.end(),
                     [](const Value& value) { return !value.type.device.is_cpu(); }),
         "the step uses another device than the CPU");
  refuse(!on_replay_.empty(),
         "the step changes host state in each run (a scheduler, a gradient scaler, a flag of an optimizer); step the "
         "scheduler outside of the compiled step");
  refuse(!external_gradients_.empty(), "the step writes gradients into memory of a reducer");
  refuse(bindings_.read_by_offset(), "the step reads a tensor by an offset in its storage (as_strided)");
  refuse(std::any_of(program.outputs.begin(), program.outputs.end(),
                     [](const Output& output) { return output.kind == Output::Kind::Kept; }),
         "the step keeps a tensor that it has made; return it, or copy it into a buffer");
  SavedStep saved = save_trace(arguments);
  saved.settings = describe_settings(settings);
  saved.program = checked_text_of(with_inputs_at_0(program));
  if (const auto* library = executable_->library()) saved.library = library->built_bytes();
  for (const auto& number : program.numbers) saved.numbers.push_back(source_of(number, arguments));
  for (const auto& input : program.inputs) {
    const auto buffer = program.buffer_of(input.value);
    if (is_captured_constant(input)) {
      const auto owner = bindings_.tensor_of(buffer, arguments);
      saved.constants.push_back(owner.defined() ? bytes_of(owner) : "");
    }
    refuse(input.role == Role::Constant && !elements_of(input.constant), "the program has a large constant");
  }
  saved.results = returned_.saved();
  std::map<const void*, std::string> names;
  for (const auto& [tensor, role, name] : lift(arguments))
    if (role == Role::Parameter) names.emplace(tensor.unsafeGetTensorImpl(), name);
  for (const auto& parameter : without_gradient_)
    saved.without_gradient.push_back(names.at(parameter.unsafeGetTensorImpl()));
  for (const auto& [parameter, gradient] : gradient_guards_)
    saved.gradient_guards.push_back({names.at(parameter.unsafeGetTensorImpl()), gradient.text()});
  return saved;
}

// What TracedProgram keeps of the traces.
SavedStep TracedProgram::save_trace(const CallArguments& arguments) const {
  TESSERA_CHECK(captured_.empty() && captured_tensors_.empty() && captured_modules_.empty() && live_.empty(),
                UsageError,
                "save: the step uses tensors, modules or ts::live() values that are not among its arguments; another "
                "process cannot find them: pass them as arguments");
  for (const auto& guard : guards_) {
    const auto& optimizers = arguments.optimizers;
    const bool is_generation = std::any_of(optimizers.begin(), optimizers.end(), [&](const auto* optimizer) {
      return static_cast<int64_t>(optimizer->generation()) == guard.traced;  // no other guard has such a number
    });
    TESSERA_CHECK(is_generation, UsageError,
                  "save: the step reads host state of an object that is not an optimizer among its arguments");
  }
  for (const auto& generator : generators_)
    TESSERA_CHECK(generator == at::detail::getDefaultCPUGenerator(), UsageError,
                  "save: the step draws from a random generator of its own");
  SavedStep saved;
  saved.number_is_key = number_is_key_;
  saved.call = describe_call(arguments, number_is_key_);
  saved.thread = ThreadState::now();
  saved.trace = traced_text_;
  saved.number_uses = number_uses_;
  saved.returned_number_uses = returned_number_uses_;
  saved.returned_numbers = returned_numbers_;
  saved.gradient_placeholders = gradient_placeholders_;
  saved.draws_from_generators = !generators_.empty();
  saved.sets_seed = stream_.seed.has_value();
  saved.seed = stream_.seed.value_or(0);
  saved.draws = stream_.draws;
  saved.report = report_;
  saved.result_leaves = leaves_.others;
  const auto wanted = describe_result(returned_.size(), leaves_);
  TESSERA_CHECK(arguments.describe_result && arguments.describe_result() == wanted, UsageError,
                "save: the step returns ", wanted,
                ", and a new object of its result type does not have the same lengths and values; return a tensor, "
                "or a tuple or struct of tensors and doubles");
  return saved;
}

// ---- load

namespace {

// Tensors of a call by role and name; the tensors that own the buffers of a saved program.
class BufferOwners {
 public:
  BufferOwners(Program& program, const CallArguments& arguments, const std::vector<std::string>& constants)
      : program_(program), constants_(constants), used_(static_cast<size_t>(program.buffers), 0) {
    for (auto& each : lift(arguments)) tensors_[{each.role, each.name}] = each.tensor;
    const auto use = [&](ValueId id) { used_[static_cast<size_t>(program.buffer_of(id))] = 1; };
    for (const auto& node : program.nodes) node.each_read(use), node.each_result(use);
    for (const auto& output : program.outputs)
      if (output.value != kNone) use(output.value);
    owners_.resize(used_.size());
    storages_.resize(used_.size());
  }

  // "", or why the tensors of the call cannot be those of the program.
  std::string find() {
    size_t constant = 0;
    for (const auto& input : program_.inputs) {
      auto t = is_captured_constant(input) ? constant_at(constant++, program_[input.value].type)
                                           : tensors_[{input.role, input.name}];
      if (const auto why = add(input, t); !why.empty()) return c10::str(input.role, " ", input.name, " ", why);
    }
    return "";
  }
  const at::Tensor& named(Role role, const std::string& name) { return tensors_[{role, name}]; }
  Tracer::Result result() { return {program_, std::move(owners_), std::move(storages_), {}, {}}; }

 private:
  at::Tensor constant_at(size_t i, const Type& type) const {
    auto t = at::empty_strided(type.sizes, type.strides, type.dtype);
    const auto& bytes = constants_.at(i);
    TESSERA_CHECK(bytes.size() == static_cast<size_t>(type.span() * type.itemsize()), InternalError,
                  "a saved step has a constant of ", bytes.size(), " bytes for ", type);
    std::memcpy(t.storage().mutable_data(), bytes.data(), bytes.size());
    return t;
  }
  std::string add(const Input& input, const at::Tensor& t) {
    const auto& value = program_[input.value];
    const auto b = static_cast<size_t>(value.buffer);
    if (input.role == Role::Constant) return "";
    if (!t.defined()) return used_[b] ? "is undefined" : "";
    if (Type::of(t) != value.type) return c10::str("is ", Type::of(t), ", in the saved program it is ", value.type);
    const auto shift = (t.storage_offset() - value.offset) * value.type.itemsize();
    const auto storage = t.storage();
    const bool is_first = !owners_[b].defined();
    const auto same = [&](const c10::Storage& other) {
      return other.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    };
    if (is_first ? std::any_of(storages_.begin(), storages_.end(), same) : !same(storages_[b]) || shift != 0)
      return "shares other memory than in the saved program";
    if (!is_first) return "";
    owners_[b] = t;
    storages_[b] = storage;
    shift_buffer(program_, value.buffer, shift);
    return "";
  }

  Program& program_;
  const std::vector<std::string>& constants_;
  std::vector<char> used_;
  std::map<std::pair<Role, std::string>, at::Tensor> tensors_;
  Tensors owners_;
  std::vector<c10::Storage> storages_;
};

// Optimizer state that the saved program reads, and that this process does not have yet.
void make_missing_state(const Program& program, const CallArguments& arguments) {
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [tensor, role, name] : lift(arguments))
    if (role == Role::Parameter) parameters.emplace(name, tensor);
  for (auto* each : arguments.optimizers) {
    auto* optimizer = dynamic_cast<optim::Optimizer*>(each);
    Tensors without_state;
    for (const auto& input : program.inputs) {
      if (input.role != Role::State) continue;
      const auto found = parameters.find(input.name.substr(0, input.name.rfind('.')));
      if (found != parameters.end()) without_state.push_back(found->second);
    }
    if (optimizer) optimizer->make_state(without_state);
  }
}

}  // namespace

std::shared_ptr<StepProgram> StepProgram::load(const SavedStep& saved, const CallArguments& arguments,
                                               const Settings& settings, std::string& why) {
  const auto now = ThreadState::now();
  why = now == saved.thread ? difference_of_calls(describe_call(arguments, saved.number_is_key), saved.call)
                            : now.difference(saved.thread);
  if (!why.empty()) return nullptr;
  auto program = parse(saved.program);
  make_missing_state(program, arguments);
  BufferOwners owners(program, arguments, saved.constants);
  why = owners.find();
  for (const auto& [parameter, type] : saved.gradient_guards)
    if (TensorGuard::describe(owners.named(Role::Parameter, parameter).grad()) != type && why.empty())
      why = "the gradient of " + parameter + " was " + type + " in the saved program";
  if (!why.empty()) return nullptr;
  std::shared_ptr<StepProgram> loaded(new StepProgram());
  for (const auto& each : saved.gradient_guards) {
    const auto& parameter = owners.named(Role::Parameter, each.parameter);
    loaded->gradient_guards_.push_back({parameter, TensorGuard(parameter.grad())});
  }
  for (const auto& name : saved.without_gradient)
    loaded->without_gradient_.push_back(owners.named(Role::Parameter, name));
  loaded->load_trace(saved, program, arguments);
  auto traced = owners.result();
  traced.program = program;
  std::vector<InputBindings::OldGradient> old_gradients;
  for (const auto& [tensor, role, name] : lift(arguments))
    if (role == Role::Parameter && tensor.grad().defined()) old_gradients.push_back({tensor, tensor.grad()});
  loaded->bindings_ = InputBindings(program, traced, arguments, old_gradients);
  loaded->returned_ = ReturnedTensors(saved.results);
  const auto library =
      saved.library.empty() ? nullptr : codegen::KernelLibrary::load_built(saved.library, program.kernels);
  const auto storages = shared_storages(program, std::move(traced.storages));
  loaded->executable_ = std::make_unique<Executable>(std::move(program), storages, MakeRunner(), library);
  const auto& built = loaded->executable_->program();
  for (const auto& output : built.outputs)
    if (output.kind == Output::Kind::Gradient)
      loaded->gradients_.push_back({owners.named(Role::Parameter, output.name), loaded->executable_->output(output)});
  loaded->find_written_buffers(built);
  loaded->finish_loading(arguments, settings);
  return loaded;
}

void TracedProgram::load_trace(const SavedStep& saved, Program& program, const CallArguments& arguments) {
  region_ = CompilingScope::Region::Step;
  number_is_key_ = saved.number_is_key;
  traced_text_ = saved.trace;
  number_uses_ = saved.number_uses;
  returned_number_uses_ = saved.returned_number_uses;
  returned_numbers_ = saved.returned_numbers;
  gradient_placeholders_ = saved.gradient_placeholders;
  if (saved.draws_from_generators) generators_ = {at::detail::getDefaultCPUGenerator()};
  stream_ = {saved.sets_seed ? std::optional(saved.seed) : std::nullopt, saved.draws};
  report_ = saved.report;
  leaves_ = {saved.returned_numbers, saved.result_leaves};
  for (size_t i = 0; i < program.numbers.size(); i++) {
    const auto& [kind, index, group] = saved.numbers.at(i);
    auto& read = program.numbers[i].read;
    switch (kind) {
      case SourceKind::Seed:
        read = [] { return c10::IValue(static_cast<int64_t>(random::state().seed)); };
        break;
      case SourceKind::Draws:
        read = [] { return c10::IValue(static_cast<int64_t>(random::state().offset)); };
        break;
      case SourceKind::NumberOfCall:
        read = [values = number_values_, i = static_cast<size_t>(index)] { return c10::IValue(values->at(i)); };
        break;
      case SourceKind::LearningRate:
        read = [optimizer = dynamic_cast<optim::Optimizer*>(arguments.optimizers.at(static_cast<size_t>(index))),
                g = static_cast<size_t>(group)] { return c10::IValue(optimizer->lr(g)); };
        break;
    }
  }
}

void TracedProgram::finish_loading(const CallArguments& arguments, const Settings& settings) {
  signature_ = Signature(arguments, number_is_key_);
  check_again_ = !settings.captures_none;
  check_values_ = settings.has_captures || !signature_.is_complete();
  is_loaded_ = true;
}

}  // namespace tessera::compiler

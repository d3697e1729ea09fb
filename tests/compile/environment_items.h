#pragma once
// The items of an environment: what can change around a compiled step between two calls.
#include "environment.h"

namespace tessera::environment {

#define READ(expression)            \
  [](const View& e) -> at::Tensor { \
    (void)e;                        \
    return expression;              \
  }
#define CHANGE(statements)             \
  [](Environment& e, Random& random) { \
    (void)random;                      \
    const at::NoGradGuard no_grad;     \
    statements;                        \
  }

inline const EnvironmentItem kItems[] = {
    // Parameters and buffers.
    {"parameter dtype", READ(e.model->fc(e.batch.x.to(e.model->fc->weight.scalar_type())).sum().to(at::kFloat)),
     CHANGE(const auto dtype = e.model->fc->weight.scalar_type() == at::kFloat ? at::kDouble : at::kFloat;
            e.model->fc->to(dtype); for (auto& p
                                         : e.model->fc->parameters()) p.mutable_grad()
                                        .reset();
            e.renew_optimizer())},
    {"parameter sizes", READ(e.model->row.pow(2).sum()),
     CHANGE(e.model->row.mutable_grad().reset(); e.model->row.set_data(torch::randn({3 + below(random, 3)}));
            e.renew_optimizer())},
    {"parameter strides", READ(e.model->matrix.pow(2)[1].sum()),
     CHANGE(e.model->matrix.mutable_grad().reset();
            e.model->matrix.set_data(e.model->matrix.is_contiguous() ? torch::randn({3, 2}).t() : torch::randn({2, 3}));
            e.renew_optimizer())},
    {"requires_grad of a parameter", READ(e.model->row.pow(2).sum() + e.model->matrix.sum()),
     CHANGE(e.model->row.mutable_grad().reset(); e.model->row.requires_grad_(!e.model->row.requires_grad());
            e.renew_optimizer())},
    {"placement of a parameter", READ(e.model->placed * 2),
     CHANGE(const bool sharded = DTensor(e.model->placed).placements()[0] == Placement(Shard(0));
            e.model->placed.set_data(distribute_tensor(torch::randn({4}), e.mesh,
                                                       {sharded ? Placement(Replicate()) : Placement(Shard(0))})))},
    {"buffer replaced", READ(e.model->state.mul(3).sum()),
     CHANGE(e.model->named_buffers()["state"].set_data(
         torch::randn({3}).to(below(random, 2) ? at::kDouble : at::kFloat)))},
    {"neg bit of a buffer", READ(e.model->state.mul(2).sum()),
     CHANGE(e.model->state.unsafeGetTensorImpl()->_set_neg(!e.model->state.is_neg()))},
    {"new model and optimizer at the same address", READ(e.model->body(e.batch.x).sum()), CHANGE(e.renew())},
    {"new optimizer at the same address", READ(e.model->body(e.batch.x).pow(2).sum()), CHANGE(e.renew_optimizer())},
    {"parameters of a module", READ([&] {
       auto sum = torch::zeros({});
       for (const auto& p : e.model->bag->parameters()) sum = sum + p.sum();
       return sum;
     }()),
     CHANGE(
         e.model->bag->register_parameter("p" + std::to_string(e.model->bag->parameters().size()), torch::randn({2})))},
    {"parameters of an optimizer group", READ(e.model->row.sum() + e.captured.group_tensor.sum()),
     CHANGE(e.group_tensor = new_leaf(torch::randn({3}));
            e.optimizer->add_param_group({{e.group_tensor}, {.lr = 0.2, .momentum = 0.5}}))},
    {"submodule replaced", READ(e.model->body(e.batch.x).sum()),
     CHANGE(e.model->body = e.model->replace_module("body", nn::Linear(3, 3)); e.renew_optimizer())},
    {"submodule of another class", READ([&] {
       auto sum = torch::zeros({});
       for (const auto& child : e.model->bag->children())
         sum = sum + (child->as<torch::nn::ReLU>() ? e.batch.x.relu() : e.batch.x.tanh()).sum();
       return sum;
     }()),
     CHANGE(const auto name = "c" + std::to_string(e.model->bag->children().size());
            if (below(random, 2)) e.model->bag->register_module(name, torch::nn::ReLU());
            else e.model->bag->register_module(name, torch::nn::Tanh()))},
    {"hook added or removed", READ(e.model->fc(e.batch.x.to(e.model->fc->weight.scalar_type())).sum().to(at::kFloat)),
     CHANGE(register_forward_hook(*e.model->fc,
                                  [by = other_number(random, 0)](Module&, const Tensors&, const Tensors& out) {
                                    return Tensors{out[0] * by};
                                  }))},
    {"training mode", READ(e.model->drop(e.batch.x).sum()),
     CHANGE(e.model->drop->train(!e.model->drop->is_training()))},
    {"dropout p", READ(e.model->drop(e.batch.x).sum()), CHANGE(e.model->drop->options.p(other_number(random, 0) / 4))},
    {"eps of a layer norm", READ(e.model->norm(e.batch.x).pow(2).sum()),
     CHANGE(e.model->norm->options.eps(other_number(random, 0)))},
    {"number in a module", READ((e.batch.x * e.model->scale).sum()),
     CHANGE(e.model->scale = other_number(random, e.model->scale))},
    {"bool in a submodule", READ(e.model->part(e.batch.x)), CHANGE(e.model->part->halved = !e.model->part->halved)},
    {"integer in a submodule", READ(e.model->part(e.batch.x)),
     CHANGE(e.model->part->times = 1 + (e.model->part->times + below(random, 2)) % 4)},
    {"string in a submodule", READ(e.model->part(e.batch.x)),
     CHANGE(e.model->part->reduction = e.model->part->reduction == "sum" ? "mean" : "sum")},
    {"submodule of an own class replaced", READ(e.model->part(e.batch.x)),
     CHANGE(e.model->part = e.model->replace_module("part", EnvironmentPart());
            e.model->part->times = 3 + below(random, 3))},
    {"memory of a parameter", READ(e.model->row.pow(2).sum()),
     CHANGE(e.model->row.set_data(torch::randn(e.model->row.sizes())))},
    {"hook on a gradient", READ(e.model->row.pow(2).sum()),
     CHANGE(if (!e.model->row.requires_grad()) return; if (e.hook) e.model->row.remove_hook(*e.hook);
            const double by = other_number(random, 0);
            e.hook = e.model->row.register_hook([by](const at::Tensor& g) { return g * by; }))},
    {"gradient set outside", READ(e.model->matrix.pow(2).sum()),
     CHANGE(auto& g = e.model->matrix.mutable_grad(); if (below(random, 2)) g.reset();
            else g = below(random, 2) ? torch::randn(e.model->matrix.sizes()) : torch::randn({3, 2}).t())},
    {"gradient scaled in place", READ(e.model->matrix.pow(2).sum()),
     CHANGE(if (e.model->matrix.grad().defined()) e.model->matrix.mutable_grad().mul_(other_number(random, 0)))},
    {"gradient kept", READ(e.model->row.pow(2).sum()),
     CHANGE(if (e.model->row.grad().defined()) e.kept.push_back(e.model->row.grad()))},
    {"gradient stored with a neg bit", READ(e.model->matrix.pow(2).sum()),
     CHANGE(const auto g = torch::randn(e.model->matrix.sizes());
            e.model->matrix.mutable_grad() = below(random, 2) ? at::_neg_view(g) : g)},
    {"gradient stored as zeros without memory", READ(e.model->matrix.pow(2).sum()),
     CHANGE(const auto sizes = e.model->matrix.sizes();
            e.model->matrix.mutable_grad() =
                below(random, 8) == 0 ? at::_efficientzerotensor(sizes) : torch::randn(sizes))},
    {"gradient shared by two parameters", READ(e.model->row.pow(2).sum() + e.model->twin.pow(2).sum()),
     CHANGE(if (!e.model->row.requires_grad() || e.model->row.sizes() != e.model->twin.sizes()) return;
            auto& g = e.model->row.mutable_grad(); g = torch::randn({4});
            e.model->twin.mutable_grad() = below(random, 2) ? g : g.clone())},
    {"gradient stored in the memory of its parameter", READ(e.model->matrix.pow(2).sum()),
     CHANGE(e.model->matrix.mutable_grad() = below(random, 2) ? e.model->matrix.detach()
                                                              : torch::randn(e.model->matrix.sizes()))},
    {"gradient accumulator with a hook", READ(e.model->row.pow(2).sum()), [](Environment& e, Random& random) {
       if (!e.model->row.requires_grad()) return;
       const at::AutoGradMode on(true);
       auto accumulator = torch::autograd::impl::grad_accumulator(e.model->row);
       struct Scale : torch::autograd::FunctionPostHook {
         double by;
         at::Tensor row;
         Scale(double factor, at::Tensor parameter) : by(factor), row(std::move(parameter)) {}
         torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                                   const torch::autograd::variable_list&) override {
           const at::NoGradGuard no_grad;
           row.mutable_grad().mul_(by);
           return outputs;
         }
       };
       accumulator->add_post_hook(std::make_unique<Scale>(other_number(random, 0), e.model->row));
       e.accumulators.push_back(std::move(accumulator));
     }},
    {"hook after accumulation", READ(e.model->row.pow(2).sum()), CHANGE(
       struct Scale : torch::autograd::PostAccumulateGradHook {
         double by;
         explicit Scale(double factor) : by(factor) {}
         void operator()(const at::Tensor& parameter) override {
           const at::NoGradGuard off;
           parameter.mutable_grad().mul_(by);
         }
       };
       torch::autograd::impl::set_post_acc_grad_hooks(e.model->row, nullptr);
       torch::autograd::impl::set_post_acc_grad_hooks(e.model->row, std::make_unique<Scale>(other_number(random, 0))))},
    {"parameter that shares memory with another", READ([&] {
       const auto first = e.model->row.sum().detach();
       const at::NoGradGuard no_grad;
       e.model->twin.mul_(0.5);
       return first + e.model->row.sum();
     }()),
     CHANGE(e.model->twin.mutable_grad().reset();
            const bool shared = e.model->twin.is_alias_of(e.model->row);
            e.model->twin.set_data(shared ? torch::randn({4}) : e.model->row.detach()); e.renew_optimizer())},
    {"buffer that shares memory with another", READ([&] {
       const auto first = e.model->state.sum();
       e.model->shared_buffer.mul_(0.5);
       return first + e.model->state.sum();
     }()),
     CHANGE(const bool shared = e.model->shared_buffer.is_alias_of(e.model->state);
            e.model->named_buffers()["shared_buffer"].set_data(shared ? torch::randn({3}) : e.model->state.detach()))},
    {"weight of a LibTorch module assigned", READ(e.model->norm(e.batch.x).pow(2).sum()),
     CHANGE(e.model->norm->weight = new_leaf(torch::randn({3})))},
    {"list in the options of a module", READ(e.model->unflatten(e.model->row).select(1, 0).sum()),
     CHANGE(const bool square = e.model->unflatten->options.sizes()[0] == 2;
            const auto sizes = square ? std::vector<int64_t>({4, 1}) : std::vector<int64_t>({2, 2});
            e.model->unflatten->options.sizes(sizes))},
    {"member of the model assigned", READ(e.model->matrix.pow(2).sum()),
     CHANGE(e.model->matrix = new_leaf(torch::randn({2, 3})))},
    {"submodule of another class at the same address", READ([&] {
       auto y = e.batch.x.mul(1);
       for (const auto& child : e.model->places->children()) y = child->as<torch::nn::ReLU>() ? y.relu() : y.tanh();
       return y.sum();
     }()),
     CHANGE(const bool relu = e.model->places->children()[0]->as<torch::nn::ReLU>() != nullptr;
            e.model->places->unregister_module("it");
            if (relu) e.model->places->register_module("it", torch::nn::Tanh());
            else e.model->places->register_module("it", torch::nn::ReLU()))},
    {"values of a parameter", READ(e.model->row.pow(2).sum()), CHANGE(e.model->row.mul_(other_number(random, 0)))},
    {"values of a buffer", READ(e.model->state.mul(2).sum()), CHANGE(e.model->state.mul_(other_number(random, 0)))},
    // Optimizers.
    {"learning rate", READ(e.model->row.pow(2).sum()), CHANGE(e.optimizer->set_lr(0, other_number(random, 0)))},
    {"momentum", READ(e.model->row.pow(2).sum()),
     CHANGE(auto o = e.optimizer->group_options(0); o.momentum = other_number(random, o.momentum) / 4;
            e.optimizer->set_group_options(0, o))},
    {"dampening", READ(e.model->row.pow(2).sum()),
     CHANGE(auto o = e.optimizer->group_options(0); o.dampening = other_number(random, o.dampening) / 4;
            e.optimizer->set_group_options(0, o))},
    {"state of an optimizer in place", READ(e.model->row.pow(2).sum()),
     CHANGE(for (const auto& [name, value] : e.optimizer->state(e.model->row)) value.mul_(other_number(random, 0)))},
    {"state of an optimizer loaded", READ(e.model->row.pow(2).sum()),
     CHANGE(StateDict copies;
            for (const auto& [name, value] : e.optimizer->state(e.model->row))
                copies.insert(name, value* other_number(random, 0));
            if (!copies.empty()) e.optimizer->set_state(e.model->row, copies))},
    {"eager step between", READ(e.model->row.pow(2).sum()), CHANGE(e.optimizer->step())},
    // Arguments.
    {"argument expanded", READ(e.other.pow(2).sum()),
     CHANGE(e.other = below(random, 2) ? torch::randn({1, 3}).expand({2, 3}) : torch::randn({2, 3}))},
    {"storage offset of an argument", READ(e.other.pow(2).sum()),
     CHANGE(e.other = torch::randn({4, 3}).narrow(0, below(random, 3), 2))},
    {"offset of an argument in its storage", READ(e.other.as_strided({2}, {1}, 1).sum()),
     CHANGE(e.other = torch::randn({4, 3}).narrow(0, below(random, 3), 2))},
    {"base of an argument", READ(e.other.is_view() ? at::Tensor(e.other._base()).sum() : e.other.mean()),
     CHANGE(e.other = below(random, 3) ? torch::randn({4 + below(random, 2), 3}).narrow(0, below(random, 3), 2)
                                       : torch::randn({2, 3}))},
    {"gradient of a frozen argument",
     READ(e.other.is_leaf() && e.other.grad().defined() ? e.other.grad().sum() : e.other.sum()),
     CHANGE(e.other = torch::randn({2, 3}); if (below(random, 2)) e.other.mutable_grad() = torch::randn({2, 3}))},
    {"argument of no elements", READ(e.other.sum() + 1), CHANGE(e.other = torch::randn({below(random, 2), 3}))},
    {"undefined argument", READ(e.z.defined() ? at::real(e.z).sum() : e.batch.x.sum()),
     CHANGE(e.z = e.z.defined() ? at::Tensor() : torch::randn({3}, at::kComplexFloat))},
    {"values of an argument", READ(e.other.pow(2).sum()), CHANGE(e.other = e.other.detach().mul(2))},
    {"argument of inference mode", READ(e.other.mul(2).sum()),
     CHANGE(const c10::InferenceMode on(below(random, 2) == 1); e.other = torch::randn({2, 3}))},
    {"argument that is a wrapped number", READ(torch::ones({2}, at::kInt).mul(e.number_tensor)),
     CHANGE(e.number_tensor = torch::full({}, other_number(random, 0), at::kDouble);
            e.number_tensor.unsafeGetTensorImpl()->set_wrapped_number(below(random, 8) == 0))},
    {"argument of zeros without memory", READ(e.other.mul(2).sum()),
     CHANGE(e.other = below(random, 8) == 0 ? at::_efficientzerotensor({2, 3}) : torch::randn({2, 3}))},
    {"layout of an argument", READ(e.other.sum()),
     CHANGE(e.other = below(random, 8) == 0 ? torch::randn({2, 3}).to_sparse() : torch::randn({2, 3}))},
    {"tangent of an argument", READ([&] {
       const auto y = e.other.mul(2);
       return y._fw_grad(0).defined() ? y + y._fw_grad(0) : y;
     }()),
     CHANGE(e.other = torch::randn({2, 3});
            if (below(random, 8) == 0) {
              static const auto level = torch::autograd::ForwardADLevel::get_next_idx();
              TORCH_CHECK(level == 0);
              e.other = at::_make_dual(e.other, torch::randn({2, 3}), 0);
            })},
    {"history of an argument", READ(e.other.pow(2).sum() + e.model->row.sum()),
     CHANGE(const at::AutoGradMode on(true);
            e.other = (e.captured_model->weight * (1 + below(random, 3))).narrow(0, 0, 2))},
    {"argument sizes", READ(e.other.pow(2).sum()), CHANGE(e.other = torch::randn({2 + below(random, 3), 3}))},
    {"argument strides", READ(e.other.pow(2)[1].sum()), CHANGE(e.other = torch::randn({3, 2}).t())},
    {"argument dtype", READ(e.other.mul(2)),
     CHANGE(e.other = torch::randn({2, 3}, below(random, 2) ? at::kDouble : at::kFloat))},
    {"requires_grad of an argument", READ(e.other.pow(2).sum() + e.model->row.sum()),
     CHANGE(e.other = torch::randn({2, 3}); e.other.requires_grad_(below(random, 2) == 1))},
    {"alias of an argument", READ(e.batch.x.add_(1); e.other.pow(2).sum()),
     CHANGE(e.other = below(random, 2) ? e.batch.x.detach() : torch::randn({2, 3}))},
    {"alias of a parameter", READ([&] {
       const at::NoGradGuard no_grad;
       e.model->matrix.mul_(0.5);
       return e.other.sum();
     }()),
     CHANGE(e.other = below(random, 2) ? e.model->matrix.detach() : torch::randn({2, 3}))},
    {"neg bit of an argument", READ(e.other.mul(2).sum()), CHANGE(e.other = at::_neg_view(torch::randn({2, 3})))},
    {"conj bit of an argument", READ(at::imag(e.z.mul(2)).sum()),
     CHANGE(e.z =
                below(random, 2) ? torch::randn({3}, at::kComplexFloat).conj() : torch::randn({3}, at::kComplexFloat))},
    {"optional tensor", READ(e.batch.mask ? (e.batch.x** e.batch.mask).sum() : e.batch.x.sum()),
     CHANGE(if (e.batch.mask) e.batch.mask.reset(); else e.batch.mask = torch::randn({2, 3}))},
    {"number in a struct", READ((e.batch.x * e.batch.gain).sum()),
     CHANGE(e.batch.gain = other_number(random, e.batch.gain))},
    {"integer in a struct", READ(e.batch.x.repeat({1, e.batch.repeats}).sum(1)),
     CHANGE(e.batch.repeats = 1 + (e.batch.repeats + below(random, 2)) % 4)},
    {"enum in a struct", READ(e.batch.mode == EnvironmentMode::Sum ? e.batch.x.sum() : e.batch.x.mean()),
     CHANGE(e.batch.mode = e.batch.mode == EnvironmentMode::Sum ? EnvironmentMode::Mean : EnvironmentMode::Sum)},
    {"number in a tuple", READ((e.batch.x * std::get<0>(e.pair)).sum()),
     CHANGE(std::get<0>(e.pair) = other_number(random, std::get<0>(e.pair)))},
    {"integer in a tuple", READ(e.batch.x.unsqueeze(0).expand({std::get<1>(e.pair), 2, 3}).sum()),
     CHANGE(std::get<1>(e.pair) = 1 + (std::get<1>(e.pair) + below(random, 2)) % 4)},
    {"number in a vector", READ((e.batch.x * e.numbers.back()).sum()),
     CHANGE(e.numbers.back() = other_number(random, e.numbers.back()))},
    {"length of a vector", READ(e.batch.x.sum() * static_cast<double>(e.numbers.size())),
     CHANGE(e.numbers.push_back(1))},
    {"optional number", READ(e.maybe ? e.batch.x.sum() * *e.maybe : e.batch.x.mean()),
     CHANGE(if (e.maybe && below(random, 2)) e.maybe.reset();
            else e.maybe = other_number(random, e.maybe.value_or(0)))},
    {"number in a map", READ(e.batch.x.sum() * e.coefficients.begin()->second),
     CHANGE(auto& number = e.coefficients.begin()->second; number = other_number(random, number))},
    {"key of a map", READ(e.batch.x.sum() * (e.coefficients.count("c") ? 2 : 3)),
     CHANGE(if (e.coefficients.erase("c") == 0) {
       e.coefficients.erase("b");
       e.coefficients["c"] = 0.25;
     } else e.coefficients["b"] = 0.25)},
    {"Scalar", READ((e.batch.x * e.scalar).sum()),
     CHANGE(e.scalar = below(random, 2) ? c10::Scalar(other_number(random, e.scalar.toDouble()))
                                        : c10::Scalar(3 + below(random, 4)))},
    {"TensorOptions", READ(torch::ones({3}, e.options).sum()),
     CHANGE(e.options = c10::typeMetaToScalarType(e.options.dtype()) == at::kFloat ? at::kDouble : at::kFloat)},
    {"string", READ(e.reduction == "sum" ? e.batch.x.sum() : e.batch.x.mean()),
     CHANGE(e.reduction = e.reduction == "sum" ? "mean" : "sum")},
    {"grouping of tensors", READ((torch::stack(e.first).sum(0) - torch::stack(e.second).sum(0)).sum()),
     CHANGE(
         if (e.first.size() == 2) {
           e.second.insert(e.second.begin(), e.first.back());
           e.first.pop_back();
         } else {
           e.first.push_back(e.second.front());
           e.second.erase(e.second.begin());
         })},
    {"keys of a map of tensors",
     READ(e.by_name.begin()->first == "a" ? e.by_name.begin()->second.sum() : e.by_name.begin()->second.mean()),
     CHANGE(auto node = e.by_name.extract(e.by_name.begin()); node.key() = node.key() == "a" ? "aa" : "a";
            e.by_name.insert(std::move(node)))},
    {"number", READ((e.batch.x * e.beta).sum()), CHANGE(e.beta = other_number(random, e.beta))},
    {"number in arithmetic", READ((e.batch.x * (1 - e.beta)).sum()), CHANGE(e.beta = other_number(random, e.beta))},
    {"number in a comparison", READ(e.beta > 1 ? e.batch.x.sum() : e.batch.x.mean()),
     CHANGE(e.beta = other_number(random, e.beta))},
    {"number in a size", READ(torch::ones({static_cast<int64_t>(e.beta * 4)}).sum()),
     CHANGE(e.beta = other_number(random, e.beta))},
    {"absolute value of a number", READ((e.batch.x * std::abs(e.beta)).sum() + e.batch.x.sum() * -e.beta),
     CHANGE(e.beta = -other_number(random, -e.beta))},
    {"number in a tensor", READ(torch::tensor(e.beta, at::kDouble).mul(2)), CHANGE(e.beta = other_number(random, e.beta))},
    {"number in a float tensor", READ(torch::tensor(e.beta).mul(2)), CHANGE(e.beta = other_number(random, e.beta))},
    {"number in a list", READ(torch::tensor({1.0, e.beta}).mul(2)), CHANGE(e.beta = other_number(random, e.beta))},
    {"number as an exponent", READ(e.model->row.abs().add(1).pow(e.beta).sum()),
     CHANGE(e.beta = other_number(random, e.beta))},
    {"number as the value of an element", READ([&] {
       auto y = e.batch.x.clone();
       y[0][0] = e.beta;
       return y.sum();
     }()),
     CHANGE(e.beta = other_number(random, e.beta))},
    {"number in where", READ(at::where(e.batch.x > 0, e.batch.x, e.beta).sum()),
     CHANGE(e.beta = other_number(random, e.beta))},
    {"number as a bound", READ(e.batch.x.clamp_max(e.beta).sum()), CHANGE(e.beta = other_number(random, e.beta))},
    {"number in full", READ(torch::full({3}, e.beta).sum()), CHANGE(e.beta = other_number(random, e.beta))},
    {"number in an optional of an op", READ(e.batch.x.clamp(std::nullopt, c10::Scalar(e.beta)).sum()),
     CHANGE(e.beta = other_number(random, e.beta))},
    {"number as a probability", READ(torch::dropout(e.batch.x, e.beta / 8, true)),
     CHANGE(e.beta = other_number(random, e.beta))},
    {"sign of a number", READ(std::signbit(e.beta) ? e.batch.x.sum() : e.batch.x.mean()), CHANGE(e.beta = -e.beta)},
    {"integer", READ(e.batch.x.sum() * e.count), CHANGE(e.count = 1 + (e.count + below(random, 3)) % 5)},
    {"bool", READ(e.flag ? e.batch.x.sum() : e.batch.x.mean()), CHANGE(e.flag = !e.flag)},
    // Thread state.
    {"grad mode", READ(e.model->row.pow(2).sum()), CHANGE(e.grad_mode = !e.grad_mode)},
    {"inference mode", READ(e.batch.x.mul(c10::InferenceMode::is_enabled() ? 2 : 3).sum()),
     CHANGE(e.grad_mode = false; e.inference = !e.inference)},
    {"autocast", READ(torch::mm(e.batch.x.to(at::kFloat), e.first[0].expand({3, 3}).to(at::kFloat)).sum()),
     CHANGE(e.autocast = !e.autocast)},
    {"autocast dtype", READ(torch::mm(e.batch.x.to(at::kFloat), e.first[0].expand({3, 3}).to(at::kFloat))),
     CHANGE(e.autocast = true; e.autocast_dtype = e.autocast_dtype == at::kBFloat16 ? at::kHalf : at::kBFloat16)},
    {"autocast cache", READ(e.batch.x.mul(at::autocast::is_autocast_cache_enabled() ? 2 : 3).sum()),
     CHANGE(e.autocast_cache = !e.autocast_cache)},
    {"default dtype", READ(torch::ones({3}) * 0.1),
     CHANGE(e.default_dtype = e.default_dtype == at::kFloat ? at::kDouble : at::kFloat)},
    {"deterministic algorithms", READ(e.batch.x.mul(at::globalContext().deterministicAlgorithms() ? 2 : 3).sum()),
     CHANGE(e.deterministic = !e.deterministic)},
    {"anomaly mode", READ(e.batch.x.mul(torch::autograd::AnomalyMode::is_enabled() ? 2 : 3).sum()),
     CHANGE(e.anomaly = below(random, 8) == 0)},
    {"dispatch keys excluded", READ(e.model->row.pow(2).sum()), CHANGE(e.below_autograd = !e.below_autograd)},
    {"oneDNN", READ(e.batch.x.mul(at::globalContext().userEnabledMkldnn() ? 2 : 3).sum()), CHANGE(e.mkldnn = !e.mkldnn)},
    {"number of threads", READ(e.batch.x.mul(at::get_num_threads()).sum()), CHANGE(e.threads = 3 - e.threads)},
    {"precision of float32 products",
     READ(e.batch.x.mul(at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST ? 2 : 3)),
     CHANGE(e.precision = std::string_view(e.precision) == "highest" ? "high" : "highest")},
    // Captured variables.
    {"captured number", READ((e.batch.x * live(e.captured.captured_number).value()).sum()),
     CHANGE(e.captured_number = other_number(random, e.captured_number))},
    {"captured tensor replaced", READ((e.batch.x * e.captured.captured_tensor).sum()),
     CHANGE(e.captured_tensor = torch::randn({3}))},
    {"vector in a submodule (captured)", READ(e.model->part->weighted(e.batch.x)),
     CHANGE(e.model->part->weights[0] = other_number(random, e.model->part->weights[0]))},
    {"captured list", READ((e.batch.x * live(e.captured.captured_list[0]).value()).sum()),
     CHANGE(e.captured_list[0] = other_number(random, e.captured_list[0]))},
    {"training mode of a captured module", READ(e.captured.captured_drop(e.batch.x).sum()),
     CHANGE(e.captured_drop->train(!e.captured_drop->is_training()))},
    {"captured module replaced", READ(e.captured.captured_model(e.batch.x).sum()),
     CHANGE(e.captured_model = nn::Linear(3, 3))},
    {"captured parameter frozen", READ(e.captured.captured_model(e.batch.x).pow(2).sum()),
     CHANGE(auto& w = e.captured_model->weight; w.mutable_grad().reset(); w.requires_grad_(!w.requires_grad()))},
    {"captured tensor that shares memory with a buffer", READ([&] {
       const auto first = e.captured.captured_tensor.sum();
       e.model->state.mul_(0.5);
       return first + e.captured.captured_tensor.sum();
     }()),
     CHANGE(e.captured_tensor = below(random, 2) ? e.model->state.detach() : torch::randn({3}))},
    {"variable that a hook has captured",
     READ(e.model->fc(e.batch.x.to(e.model->fc->weight.scalar_type())).sum().to(at::kFloat)),
     CHANGE(if (!std::exchange(e.has_hook, true))
                register_forward_hook(*e.model->fc, [&e](Module&, const Tensors&, const Tensors& out) {
                  return Tensors{out[0] * e.hook_number};
                });
            e.hook_number = other_number(random, e.hook_number))},
};
#undef READ
#undef CHANGE

}  // namespace tessera::environment

#pragma once
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

// The fields of LibTorch's optimizers, listed once: visit_fields(options, f) calls f(name, value) for each option, and
// visit_fields(state, f) calls f(name, value) or f(name, value, required) for each entry of a parameter's state.
namespace tessera::torch_fields {

namespace optim = torch::optim;
constexpr bool kOptional = false;  // exists only with some options: amsgrad, momentum, centered

template <class F>
void visit_fields(optim::SGDOptions& o, F f) {
  f("lr", o.lr());
  f("momentum", o.momentum());
  f("dampening", o.dampening());
  f("weight_decay", o.weight_decay());
  f("nesterov", o.nesterov());
}
template <class F>
void visit_fields(optim::SGDParamState& s, F f) {
  f("momentum_buffer", s.momentum_buffer());
}

template <class Options, class F>
void visit_adam_options(Options& o, F f) {
  f("lr", o.lr());
  f("betas", o.betas());
  f("eps", o.eps());
  f("weight_decay", o.weight_decay());
  f("amsgrad", o.amsgrad());
}
template <class State, class F>
void visit_adam_state(State& s, F f) {
  f("step", s.step());
  f("exp_avg", s.exp_avg());
  f("exp_avg_sq", s.exp_avg_sq());
  f("max_exp_avg_sq", s.max_exp_avg_sq(), kOptional);
}
template <class F>
void visit_fields(optim::AdamOptions& o, F f) {
  visit_adam_options(o, f);
}
template <class F>
void visit_fields(optim::AdamWOptions& o, F f) {
  visit_adam_options(o, f);
}
template <class F>
void visit_fields(optim::AdamParamState& s, F f) {
  visit_adam_state(s, f);
}
template <class F>
void visit_fields(optim::AdamWParamState& s, F f) {
  visit_adam_state(s, f);
}

template <class F>
void visit_fields(optim::RMSpropOptions& o, F f) {
  f("lr", o.lr());
  f("alpha", o.alpha());
  f("eps", o.eps());
  f("weight_decay", o.weight_decay());
  f("momentum", o.momentum());
  f("centered", o.centered());
}
template <class F>
void visit_fields(optim::RMSpropParamState& s, F f) {
  f("step", s.step());
  f("square_avg", s.square_avg());
  f("momentum_buffer", s.momentum_buffer(), kOptional);
  f("grad_avg", s.grad_avg(), kOptional);
}

template <class F>
void visit_fields(optim::AdagradOptions& o, F f) {
  f("lr", o.lr());
  f("lr_decay", o.lr_decay());
  f("weight_decay", o.weight_decay());
  f("initial_accumulator_value", o.initial_accumulator_value());
  f("eps", o.eps());
}
template <class F>
void visit_fields(optim::AdagradParamState& s, F f) {
  f("step", s.step());
  f("sum", s.sum());
}

}  // namespace tessera::torch_fields

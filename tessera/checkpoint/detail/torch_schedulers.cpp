#include "tessera/checkpoint/detail/torch_schedulers.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

namespace tessera::dcp {
namespace {

using Plateau = torch::optim::ReduceLROnPlateauScheduler;

// A protected member of a base class can be named as a member of a derived class.
struct StepCount : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) { return scheduler.*(&StepCount::step_count_); }
};

// An explicit instantiation may name private members (C++20, [temp.spec]): the friend function returns what it names.
template <class Name, typename Name::Member member>
struct NamedMember {
  friend typename Name::Member member_of(Name) { return member; }
};
#define TESSERA_PLATEAU_MEMBER(NAME, TYPE, FIELD) \
  struct NAME {                                   \
    using Member = TYPE Plateau::*;               \
    friend Member member_of(NAME);                \
  };                                              \
  template struct NamedMember<NAME, &Plateau::FIELD>
TESSERA_PLATEAU_MEMBER(Best, float, best);
TESSERA_PLATEAU_MEMBER(BadEpochs, int, num_bad_epochs);
TESSERA_PLATEAU_MEMBER(Cooldown, int, cooldown_counter);
TESSERA_PLATEAU_MEMBER(LastEpoch, int, last_epoch);
#undef TESSERA_PLATEAU_MEMBER

// Calls f(name, field) for each counter.
template <class F>
void visit_counters(Plateau& s, F f) {
  f("best", s.*member_of(Best()));
  f("num_bad_epochs", s.*member_of(BadEpochs()));
  f("cooldown_counter", s.*member_of(Cooldown()));
  f("last_epoch", s.*member_of(LastEpoch()));
}
template <class F>
void visit_counters(torch::optim::LRScheduler& s, F f) {
  f("step_count", StepCount::of(s));
}

template <class Scheduler>
StateDict read_counters(Scheduler& scheduler) {
  StateDict dict;
  visit_counters(scheduler, [&](const char* name, auto field) {
    dict.insert(name, at::scalar_tensor(static_cast<double>(field), at::kDouble));
  });
  return dict;
}
template <class Scheduler>
void write_counters(Scheduler& scheduler, const StateDict& dict) {
  visit_counters(scheduler, [&](const char* name, auto&) { dict.at(name); });
  visit_counters(scheduler, [&](const char* name, auto& field) {
    field = static_cast<std::remove_reference_t<decltype(field)>>(dict.at(name).template item<double>());
  });
}

}  // namespace

StateDict scheduler_state(torch::optim::LRScheduler& scheduler) { return read_counters(scheduler); }
StateDict scheduler_state(Plateau& scheduler) { return read_counters(scheduler); }
void set_scheduler_state(torch::optim::LRScheduler& scheduler, const StateDict& dict) {
  write_counters(scheduler, dict);
}
void set_scheduler_state(Plateau& scheduler, const StateDict& dict) { write_counters(scheduler, dict); }

}  // namespace tessera::dcp

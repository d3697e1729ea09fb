#pragma once
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace tessera::optim {
struct AdagradOptions;
struct AdamOptions;
struct AdamWOptions;
struct RMSpropOptions;
struct SGDOptions;

namespace detail {

// The options of a parameter group, in the object that LibTorch's group owns. That object is also LibTorch's options of
// the same name, such as torch::optim::AdamOptions, so that this works on a tessera::optim::Adam:
//   static_cast<torch::optim::AdamOptions&>(optimizer.param_groups()[0].options()).lr(1e-4);
// A write to LibTorch's fields is taken over by the next get().
template <class Options>
class GroupOptions {
 public:
  virtual ~GroupOptions() = default;

  const Options& get() const {
    take_over();
    return value_;
  }
  void set(Options options) {
    value_ = std::move(options);
    show();
  }
  void set_lr_number(double lr) {
    take_over();
    value_.lr.set(lr);
    show();
  }
  // The number of writes to LibTorch's fields so far, without those to the learning rate.
  uint64_t writes() const {
    take_over();
    return writes_;
  }

 protected:
  explicit GroupOptions(Options options) : value_(std::move(options)) {}
  GroupOptions(const GroupOptions&) = default;

  virtual void take_over() const = 0;  // from LibTorch's fields
  virtual void show() = 0;             // in LibTorch's fields

  mutable Options value_;
  mutable uint64_t writes_ = 0;
};

std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const AdagradOptions& options);
std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const AdamOptions& options);
std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const AdamWOptions& options);
std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const RMSpropOptions& options);
std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const SGDOptions& options);

}  // namespace detail
}  // namespace tessera::optim

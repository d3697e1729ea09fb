#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/api/call_with_numbers.h"

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::compiler {

// The result of a traced call without its tensors. Programs return tensors and numbers; this puts them into a copy of
// the result of the user's function, a struct or a list of some length for example. One per program.
class ResultPrototype {
 public:
  // `traced`: the result of the function if this call has traced it; none if a cached program ran.
  template <class Result>
  Result with_values(std::optional<Result> traced, const Tensors& tensors, const std::vector<double>& numbers) {
    if (traced) {
      assign_tensors(*traced, Tensors(tensors_of(*traced).size()));
      stored_ = std::make_shared<Result>(std::move(*traced));
    }
    if constexpr (std::is_default_constructible_v<Result>)
      if (!stored_) stored_ = std::make_shared<Result>();  // of a loaded program, which no call has traced
    Result returned = *std::static_pointer_cast<Result>(stored_);
    assign_tensors(returned, tensors);
    const double* next = numbers.data();
    detail::assign_numbers(returned, next);
    return returned;
  }

 private:
  std::shared_ptr<void> stored_;
};

}  // namespace tessera::compiler

#pragma once
#include "tessera/base/visit.h"

#include <memory>
#include <optional>
#include <utility>

namespace tessera::compiler {

// The result of a traced call without its tensors. Programs return tensors only; this puts them into a copy of the
// result type of the user's function, a struct or tuple for example.
class ResultPrototype {
 public:
  // `traced`: the result of the function if this call has run it; none if a cached program ran.
  template <class Result>
  Result with_tensors(std::optional<Result> traced, const Tensors& tensors) {
    if (!stored_) stored_ = std::make_shared<std::optional<Result>>();
    auto& prototype = *std::static_pointer_cast<std::optional<Result>>(stored_);
    if (traced) {
      assign_tensors(*traced, Tensors(tensors_of(*traced).size()));
      prototype = std::move(traced);
    }
    Result returned = *prototype;
    assign_tensors(returned, tensors);
    return returned;
  }

 private:
  std::shared_ptr<void> stored_;
};

}  // namespace tessera::compiler

#pragma once
#include "tessera/dtensor/dtensor.h"

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

// The placements of one argument or result of local_map; std::nullopt for a plain value.
using MaybePlacements = std::optional<Placements>;

// Options of local_map.
struct LocalMapOptions {
  // Redistribute an input whose placements differ from in_placements. Without it such an input is an error.
  bool redistribute_inputs = false;
  // The placements of each input's gradient. std::nullopt, or an empty list: those of the input. Needed for a
  // replicated input next to a sharded one: each rank then computes a part of its gradient, so the gradient is Partial.
  std::vector<MaybePlacements> in_grad_placements = {};
  // The sizes of the results depend on the data: exchange them between ranks even if all inputs have equal shards.
  bool uneven_results = false;
};

namespace detail {

// One call of a mapped function: converts its arguments to local tensors and its results to DTensors.
class LocalMapCall {
 public:
  LocalMapCall(const std::vector<MaybePlacements>& in, const LocalMapOptions& options, size_t num_args);

  // The local tensor of the next argument, differentiable.
  at::Tensor take(const at::Tensor& arg);
  // The same for an argument of any type. A value that is not a tensor is returned as it is.
  template <class T>
  decltype(auto) take_any(T&& arg) {
    if constexpr (std::is_convertible_v<T&&, const at::Tensor&>) {
      return take(static_cast<const at::Tensor&>(arg));
    } else {
      next_arg_++;
      return std::forward<T>(arg);
    }
  }

  // Replaces the results, which are local tensors, by DTensors. If no argument was a DTensor, results stay plain.
  void wrap(c10::ArrayRef<at::Tensor*> results, const std::vector<MaybePlacements>& out);

 private:
  Sizes global_sizes(const at::Tensor& local, PlacementsRef placements) const;
  std::vector<Sizes> exchange_sizes(c10::ArrayRef<at::Tensor*> results, const std::vector<MaybePlacements>& out) const;

  const std::vector<MaybePlacements>& in_;
  const LocalMapOptions& options_;
  size_t next_arg_ = 0;
  DeviceMesh mesh_;  // of the DTensor arguments; empty until the first one
  bool uneven_;
};

// Appends pointers to the tensors of a result.
inline void each_tensor(at::Tensor& t, std::vector<at::Tensor*>& to) { to.push_back(&t); }
inline void each_tensor(std::vector<at::Tensor>& list, std::vector<at::Tensor*>& to) {
  for (auto& t : list) to.push_back(&t);
}
template <class... T>
void each_tensor(std::tuple<T...>& results, std::vector<at::Tensor*>& to) {
  std::apply([&](auto&... r) { (each_tensor(r, to), ...); }, results);
}

}  // namespace detail

// Makes a function on plain tensors a function on DTensors (PyTorch: local_map). It runs on the local tensors, and its
// results are the local tensors of DTensors.
//
//   in_placements   one entry per argument, std::nullopt for an argument that is not a DTensor; empty: any placements
//   out_placements  one entry per returned tensor (a tensor, a tuple or a vector of tensors); std::nullopt: stays plain
//
// Differentiable if the function is. Communicates only to redistribute inputs, and to exchange the sizes of the results
// if an input has shards of different sizes.
// Requires: the function computes correct local results for these placements. The library cannot check this.
//
// Example:  auto mm = local_map([](at::Tensor a, at::Tensor b) { return torch::mm(a, b); },
//                               {Placements{Partial()}}, {Placements{Shard(1)}, Placements{Shard(0)}});
//           at::Tensor y = mm(x, w);
template <class Fn>
auto local_map(Fn fn, std::vector<MaybePlacements> out_placements, std::vector<MaybePlacements> in_placements = {},
               LocalMapOptions options = {}) {
  return [fn = std::move(fn), out = std::move(out_placements), in = std::move(in_placements),
          options = std::move(options)]<class... Args>(Args&&... args) {
    detail::LocalMapCall call(in, options, sizeof...(Args));
    // Braces evaluate the arguments from left to right, so that every rank communicates in the same order.
    auto locals =
        std::tuple<decltype(call.take_any(std::forward<Args>(args)))...>{call.take_any(std::forward<Args>(args))...};
    auto results = std::apply(fn, std::move(locals));
    std::vector<at::Tensor*> tensors;
    detail::each_tensor(results, tensors);
    call.wrap(tensors, out);
    return results;
  };
}

}  // namespace tessera

#pragma once
#include "tessera/dtensor/dtensor.h"

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

using MaybePlacements = std::optional<Placements>;

struct LocalMapOptions {
  // Move inputs that lie otherwise than in_placements say; without it they are refused.
  bool redistribute_inputs = false;
  // How the gradient of each input lies; none for one, or an empty list: as the input does. To be given for an input
  // that is whole while another one is cut: then each rank has a term of its gradient, which is Partial.
  std::vector<MaybePlacements> in_grad_placements = {};
  // The function gives results whose sizes depend on the data: ask the ranks even where all inputs are cut evenly.
  bool uneven_results = false;
};

namespace detail {

// One call of a mapped function: what its arguments become, and its results.
class LocalMapCall {
 public:
  LocalMapCall(const std::vector<MaybePlacements>& in, const LocalMapOptions& options, size_t num_args);

  // The piece of the next argument, differentiable. Anything but a tensor passes through.
  at::Tensor take(const at::Tensor& arg);
  template <class T>
  decltype(auto) take_any(T&& arg) {
    if constexpr (std::is_convertible_v<T&&, const at::Tensor&>) {
      return take(static_cast<const at::Tensor&>(arg));
    } else {
      next_arg_++;
      return std::forward<T>(arg);
    }
  }

  // The distributed tensors of which the results are pieces. Without a distributed argument results stay plain.
  void wrap(c10::ArrayRef<at::Tensor*> results, const std::vector<MaybePlacements>& out);

 private:
  Sizes global_sizes(const at::Tensor& piece, PlacementsRef placements) const;
  std::vector<Sizes> exchange_sizes(c10::ArrayRef<at::Tensor*> results, const std::vector<MaybePlacements>& out) const;

  const std::vector<MaybePlacements>& in_;
  const LocalMapOptions& options_;
  size_t next_arg_ = 0;
  DeviceMesh mesh_;  // of the distributed arguments; empty: there was none
  bool uneven_;
};

inline void each_tensor(at::Tensor& t, std::vector<at::Tensor*>& to) { to.push_back(&t); }
inline void each_tensor(std::vector<at::Tensor>& list, std::vector<at::Tensor*>& to) {
  for (auto& t : list) to.push_back(&t);
}
template <class... T>
void each_tensor(std::tuple<T...>& results, std::vector<at::Tensor*>& to) {
  std::apply([&](auto&... r) { (each_tensor(r, to), ...); }, results);
}

}  // namespace detail

// A function on plain tensors as one on distributed tensors: it is run on the pieces, and what it gives are pieces.
//
//   in_placements   one an argument, none for those that are no distributed tensors; an empty list: any placements
//   out_placements  one a tensor that the function returns (a tensor, a tuple or a vector of them); none: stays plain
//
// Differentiable if the function is. Communicates only where inputs are redistributed, or where an input is cut in
// pieces of different sizes: then the ranks tell each other the sizes of their results.
// Requires: the function treats pieces independently, as the placements claim; nobody can check that.
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
    // Braces: arguments are taken from left to right, so that every rank communicates in the same order.
    auto locals = std::tuple<decltype(call.take_any(std::forward<Args>(args)))...>{call.take_any(std::forward<Args>(args))...};
    auto results = std::apply(fn, std::move(locals));
    std::vector<at::Tensor*> tensors;
    detail::each_tensor(results, tensors);
    call.wrap(tensors, out);
    return results;
  };
}

}  // namespace tessera

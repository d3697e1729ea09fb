#pragma once
#include <ATen/core/Tensor.h>

#include <iosfwd>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera {

// Names to tensors, in the order in which they were inserted. Tensors are handles: copying the dict copies no values.
// Distributed tensors are kept as they are; each rank's dict holds its own pieces of them.
//
// Example:  StateDict dict = state_dict(*model);
//           for (const auto& [name, tensor] : dict) ...
//           if (const at::Tensor* w = dict.find("layers.0.attn.wq.weight")) ...
class StateDict {
 public:
  using Item = std::pair<std::string, at::Tensor>;

  StateDict() = default;
  StateDict(std::initializer_list<Item> items);

  // Throws UsageError if the name is there already, or the tensor undefined.
  void insert(std::string name, at::Tensor tensor);
  void insert_all(const std::string& prefix, const StateDict& other);  // each name behind the prefix
  bool erase(const std::string& name);                                 // whether it was there

  const at::Tensor* find(const std::string& name) const;  // nullptr if there is none
  const at::Tensor& at(const std::string& name) const;    // UsageError with the nearest names if there is none
  bool contains(const std::string& name) const { return find(name) != nullptr; }
  StateDict under(const std::string& prefix) const;  // those that begin with it, without it
  std::vector<std::string> names() const;

  size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  std::vector<Item>::const_iterator begin() const { return items_.begin(); }
  std::vector<Item>::const_iterator end() const { return items_.end(); }

 private:
  std::vector<Item> items_;
  std::unordered_map<std::string, size_t> index_;
};

// One line for each: "layers.0.weight  Float[16, 10] [S(0)] on mesh(tp=2)". No values.
std::ostream& operator<<(std::ostream& out, const StateDict& dict);

// Parameters and buffers of a module under PyTorch's names, in PyTorch's order: its own parameters, its own buffers,
// then its children. A parameter that several modules share appears under each of its names. All buffers are in it:
// LibTorch's modules do not say which are persistent. No communication.
// Gives: detached aliases, so the values follow the module as it trains; clone() them to keep what they are now.
StateDict state_dict(const torch::nn::Module& module);

}  // namespace tessera

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

// State dicts of modules: Module.state_dict() of PyTorch, also for modules with distributed parameters. For modules
// under FSDP use the functions of data_parallel/fsdp/state_dict.h (torch.distributed.checkpoint.state_dict).
namespace tessera {

// An ordered map from names to tensors. A copy of the dict shares its tensors. Distributed tensors stay distributed:
// each rank's dict has its local shards.
//
// Example:  StateDict dict = state_dict(*model);
//           for (const auto& [name, tensor] : dict) ...
//           if (const at::Tensor* w = dict.find("layers.0.attn.wq.weight")) ...
class StateDict {
 public:
  using Item = std::pair<std::string, at::Tensor>;  // name and value

  // An empty dict, or one with these items.
  StateDict() = default;
  StateDict(std::initializer_list<Item> items);

  // Throws UsageError if the name exists already or the tensor is undefined.
  void insert(std::string name, at::Tensor tensor);
  void insert_all(const std::string& prefix, const StateDict& other);  // inserts each item as prefix + name
  bool erase(const std::string& name);                                 // returns whether the name existed

  // Lookup.
  const at::Tensor* find(const std::string& name) const;  // nullptr if the name does not exist
  const at::Tensor& at(const std::string& name) const;    // UsageError with similar names if it does not exist
  bool contains(const std::string& name) const { return find(name) != nullptr; }
  StateDict under(const std::string& prefix) const;  // the items with this prefix, under their names without it
  std::vector<std::string> names() const;            // in the order of insertion

  // The number of items.
  size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  // Iterates in the order of insertion.
  std::vector<Item>::const_iterator begin() const { return items_.begin(); }
  std::vector<Item>::const_iterator end() const { return items_.end(); }

 private:
  std::vector<Item> items_;
  std::unordered_map<std::string, size_t> index_;
};

// Prints one line per tensor, without values: "layers.0.weight  Float[16, 10] [S(0)] on mesh(tp=2)".
std::ostream& operator<<(std::ostream& out, const StateDict& dict);

// The parameters and buffers of a module with PyTorch's names, in PyTorch's order: first its own parameters, then its
// own buffers, then its children. A shared parameter appears under each of its names. All buffers appear, because
// LibTorch does not distinguish non-persistent ones. No communication.
// Returns detached aliases: the values change as the module trains. clone() a tensor to preserve its values.
StateDict state_dict(const torch::nn::Module& module);

}  // namespace tessera

#pragma once
#include "tessera/nn/holder.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

// Containers of modules of one type, so each child can be called:
//
//   for (auto& block : blocks) x = block(x);        // torch::nn::ModuleList has Modules, which cannot be called
namespace tessera::nn {

// PyTorch's ModuleList for holders of type Block.
template <class Block>
class ModuleListImpl : public torch::nn::Cloneable<ModuleListImpl<Block>> {
 public:
  ModuleListImpl() = default;
  explicit ModuleListImpl(std::vector<Block> blocks) {
    for (auto& block : blocks) push_back(std::move(block));
  }

  void reset() override {}
  std::shared_ptr<Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<ModuleListImpl>();
    for (const auto& block : blocks_) {
      auto own = std::dynamic_pointer_cast<typename Block::ContainedType>(block->clone(device));
      TESSERA_CHECK(own, InternalError, "clone() of ", class_name(*block), " returned another type");
      copy->push_back(Block(std::move(own)));
    }
    return copy;
  }

  Block& push_back(Block block) {
    this->register_module(std::to_string(blocks_.size()), block.ptr());
    return blocks_.emplace_back(std::move(block));
  }
  Block& at(size_t index) { return blocks_.at(index); }
  Block& operator[](size_t index) { return blocks_.at(index); }
  size_t size() const { return blocks_.size(); }
  bool is_empty() const { return blocks_.empty(); }
  auto begin() { return blocks_.begin(); }
  auto end() { return blocks_.end(); }

 private:
  std::vector<Block> blocks_;
};

// The holder of ModuleListImpl.
// Example:  blocks = register_module("blocks", nn::ModuleList<Block>());   blocks->push_back(Block(config));
template <class Block>
class ModuleList : public Holder<ModuleListImpl<Block>> {
 public:
  using Holder<ModuleListImpl<Block>>::Holder;
  using Impl = ModuleListImpl<Block>;
  Block& operator[](size_t index) { return (*this)->at(index); }
  auto begin() { return (*this)->begin(); }
  auto end() { return (*this)->end(); }
};

// PyTorch's ModuleDict for holders of type Block. Iterates in the order of insertion.
template <class Block>
class ModuleDictImpl : public torch::nn::Cloneable<ModuleDictImpl<Block>> {
 public:
  using Item = std::pair<std::string, Block>;
  ModuleDictImpl() = default;
  explicit ModuleDictImpl(std::vector<Item> items) {
    for (auto& [name, block] : items) insert(name, std::move(block));
  }

  void reset() override {}
  std::shared_ptr<Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<ModuleDictImpl>();
    for (const auto& [name, block] : items_) {
      auto own = std::dynamic_pointer_cast<typename Block::ContainedType>(block->clone(device));
      TESSERA_CHECK(own, InternalError, "clone() of ", class_name(*block), " returned another type");
      copy->insert(name, Block(std::move(own)));
    }
    return copy;
  }

  Block& insert(const std::string& name, Block block) {
    this->register_module(name, block.ptr());
    return items_.emplace_back(name, std::move(block)).second;
  }
  bool contains(const std::string& name) const {
    for (const auto& item : items_)
      if (item.first == name) return true;
    return false;
  }
  Block& at(const std::string& name) {
    std::string known;
    for (auto& item : items_) {
      if (item.first == name) return item.second;
      known += (known.empty() ? "" : ", ") + item.first;
    }
    TESSERA_FAIL(UsageError, "ModuleDict has no '", name, "'; it has ", known.empty() ? "nothing" : known);
  }
  Block& operator[](const std::string& name) { return at(name); }
  size_t size() const { return items_.size(); }
  bool is_empty() const { return items_.empty(); }
  auto begin() { return items_.begin(); }
  auto end() { return items_.end(); }

 private:
  std::vector<Item> items_;
};

// The holder of ModuleDictImpl.
template <class Block>
class ModuleDict : public Holder<ModuleDictImpl<Block>> {
 public:
  using Holder<ModuleDictImpl<Block>>::Holder;
  using Impl = ModuleDictImpl<Block>;
  Block& operator[](const std::string& name) { return (*this)->at(name); }
  auto begin() { return (*this)->begin(); }
  auto end() { return (*this)->end(); }
};

}  // namespace tessera::nn

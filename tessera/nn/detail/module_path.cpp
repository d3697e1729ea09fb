#include "tessera/nn/detail/module_path.h"

#include "tessera/nn/module_tree.h"

#include <algorithm>

namespace tessera::detail {
namespace {
std::string stored_name(const ModuleFrame& frame) { return *static_cast<const std::string*>(frame.module); }
}  // namespace

ModulePath ModulePath::now() {
  ModulePath path;
  for (const auto* frame = innermost_module(); frame; frame = frame->outer) {
    if (frame->name == &path_of)
      path.frames_.push_back({static_cast<const torch::nn::Module*>(frame->module)->weak_from_this(), {}});
    else
      path.frames_.push_back({{}, frame->name(*frame)});
  }
  std::reverse(path.frames_.begin(), path.frames_.end());
  return path;
}

std::string ModulePath::name() const {
  const Scope scope(*this);
  return running_module();
}

// Frames point to each other and to names, so the vectors must not reallocate.
ModulePath::Scope::Scope(const ModulePath& path) : before_(innermost_module()) {
  names_.reserve(path.frames_.size());
  frames_.reserve(path.frames_.size());
  const ModuleFrame* outer = nullptr;
  for (const auto& each : path.frames_) {
    if (each.name) {
      frames_.push_back({&names_.emplace_back(*each.name), &stored_name, outer});
    } else {
      auto module = each.module.lock();
      if (!module) continue;
      frames_.push_back({module.get(), &path_of, outer});
      alive_.push_back(std::move(module));
    }
    outer = &frames_.back();
  }
  innermost_module() = outer;
}
ModulePath::Scope::~Scope() { innermost_module() = before_; }

}  // namespace tessera::detail

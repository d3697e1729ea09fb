#pragma once
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/trace/call_arguments.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace tessera::compiler {

// The tensors that a compiled function returns. A program computes the elements; this class adds what else the caller
// sees, as it was in the trace:
//   DTensor or plain, inference tensor or not
//   the argument itself    if the function has returned it, and it does not require a gradient
//   version counter        that of the argument, parameter or other result whose memory the result shares, so autograd
//                          sees later writes through either
//   base                   an in-place op that autograd records, on a view of such a tensor, changes its history too
// A result that has a graph in eager mode is detached in a compiled step, and gets another graph in a compiled module:
// there such an in-place op is an error.
class ReturnedTensors {
 public:
  // What a file has of one result. UsageError of saved() for a DTensor, and for a view of a parameter.
  struct Saved {
    bool defined = false, inference = false, requires_grad = false, is_view = false, is_base = false;
    torch::autograd::CreationMeta creation = torch::autograd::CreationMeta::DEFAULT;
    int argument = -1, result = -1;  // the base
  };
  ReturnedTensors() = default;
  explicit ReturnedTensors(const std::vector<Saved>& saved);
  std::vector<Saved> saved() const;

  void clear() { items_.clear(); }
  size_t size() const { return items_.size(); }
  const SpecRef& spec(size_t i) const { return items_[i].spec; }  // null: a plain tensor
  bool requires_grad(size_t i) const { return items_[i].requires_grad; }
  // Call it for each result of the traced function, when it has returned.
  void add(const at::Tensor& t);
  // After the trace, of which they are the first results: finds the tensors whose memory results share.
  void find_bases(const CallArguments& arguments, const Tracer::Result& traced);
  // The next result after `earlier`. `has_graph`: results get a graph.
  at::Tensor next(const Executable& executable, const Output& output, const CallArguments& arguments,
                  const Tensors& earlier, bool has_graph) const;

 private:
  struct Base {
    int argument = -1, result = -1;  // index among the tensors of the call, or among the results; or
    at::Tensor fixed = {};           // a parameter, state, or a captured tensor; undefined: none
  };
  struct Item {
    SpecRef spec;
    bool defined = false, inference = false, requires_grad = false, is_view = false;
    torch::autograd::CreationMeta creation = torch::autograd::CreationMeta::DEFAULT;  // of a view
    // Addresses in the trace. A later tensor may have got one of them, so the memory is compared too.
    const void *tensor = nullptr, *version = nullptr, *local_version = nullptr;
    Base base = {}, local_base = {};
    bool is_base = false;
  };
  template <class Matches>
  static Base find(const Tensors& fixed, const Tensors& arguments, const Matches& matches);
  static bool is_found(const Base& base) { return base.argument >= 0 || base.result >= 0 || base.fixed.defined(); }
  static at::Tensor tensor_of(const Base& base, const CallArguments& arguments, const Tensors& earlier);

  std::vector<Item> items_;
};

}  // namespace tessera::compiler

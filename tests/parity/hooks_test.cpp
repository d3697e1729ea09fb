// Compares every kind of hook with PyTorch's on the same model: the order of calls, the behavior when a function
// throws, and the gradients. hooks.py has the same cases with the same function names.
#include "run_python.h"
#include "tessera/nn/grad_hooks.h"
#include "tessera/nn/modules.h"

#include <torch/torch.h>

#include <cstdio>

namespace tessera::parity {
namespace {

std::vector<std::string> log;
void record(const std::string& line) { log.push_back(line); }

struct NetImpl : torch::nn::Module {
  NetImpl() {
    up = register_module("up", nn::Linear(3, 4));
    down = register_module("down", nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    record("forward");
    auto hidden = up(x);
    if (fails) throw std::runtime_error("forward fails");
    return down(torch::relu(hidden));
  }
  nn::Linear up{nullptr}, down{nullptr};
  bool fails = false;
};
TESSERA_MODULE(Net);

std::string describe(const Tensors& tensors) {
  std::string text;
  for (const auto& t : tensors) {
    char number[32];
    std::snprintf(number, sizeof number, "%.4f", t.defined() ? t.sum().item<double>() : 0.0);
    text += (text.empty() ? "" : " ") + std::string(t.defined() ? number : "-");
  }
  return text;
}

Replacement scaled(const Tensors& tensors, std::optional<double> scale) {
  if (!scale) return std::nullopt;
  return Tensors{tensors[0] * *scale};
}
using Scale = std::optional<double>;
auto pre(const std::string& name, Scale scale = {}) {
  return [=](Module&, const Tensors& seen) {
    record(name + " " + describe(seen));
    return scaled(seen, scale);
  };
}
auto post(const std::string& name, Scale scale = {}) {
  return [=](Module&, const Tensors& inputs, const Tensors& outputs) {
    record(name + " " + describe(inputs) + " | " + describe(outputs));
    return outputs.empty() ? std::nullopt : scaled(outputs, scale);
  };
}
auto back(const std::string& name, Scale scale = {}) {
  return [=](Module&, const Tensors& grad_inputs, const Tensors& grad_outputs) {
    record(name + " " + describe(grad_inputs) + " | " + describe(grad_outputs));
    return scaled(grad_inputs, scale);
  };
}
auto raising(const std::string& name) {
  return [=](auto&...) {
    record(name);
    throw std::runtime_error(name);
  };
}

torch::Tensor run(Net& net, const torch::Tensor& x) {
  try {
    return net(x);
  } catch (const std::exception& error) {
    record(std::string("caught ") + error.what());
    return {};
  }
}

const HookOptions kPrepend{.prepend = true}, kAlways{.always_call = true};

void order(Net& net, torch::Tensor& x) {
  net.register_forward_pre_hook(pre("pre 1"));
  net.register_forward_pre_hook(pre("pre 2", 2.0));
  net.register_forward_pre_hook(pre("pre 3"), kPrepend);
  net.register_forward_hook(post("post 1"));
  net.register_forward_hook(post("post 2", 3.0));
  net.register_forward_hook(post("post 3"), kPrepend);
  net->up.register_forward_pre_hook(pre("up pre"));
  net->up.register_forward_hook(post("up post", 0.5));
  net.register_full_backward_pre_hook(pre("back pre 1"));
  net.register_full_backward_pre_hook(pre("back pre 2", 2.0), kPrepend);
  net.register_full_backward_hook(back("back 1"));
  net.register_full_backward_hook(back("back 2", 10.0));
  net.register_full_backward_hook(back("back 3"), kPrepend);
  net->up.register_full_backward_hook(back("up back", 0.1));
  net->down.register_full_backward_hook(back("down back"));
  net->down.register_full_backward_pre_hook(pre("down back pre"));
  x.requires_grad_();
  run(net, x).sum().backward();
}

void no_input_grad(Net& net, torch::Tensor& x) {
  net.register_full_backward_pre_hook(pre("back pre"));
  net.register_full_backward_hook(back("back"));
  net->down.register_full_backward_hook(back("down back"));
  run(net, x).sum().backward();
}

void no_grad_at_all(Net& net, torch::Tensor& x) {
  net.register_full_backward_hook(back("back"));
  net.register_forward_hook(post("post"));
  torch::NoGradGuard no_grad;
  run(net, x);
}

void removal(Net& net, torch::Tensor& x) {
  auto handle = net.register_forward_pre_hook(pre("pre 1"));
  net.register_forward_pre_hook(pre("pre 2"));
  run(net, x);
  handle.remove();
  handle.remove();
  run(net, x);
  auto own = std::make_shared<HookHandle>();
  *own = net.register_forward_pre_hook([own](Module&, const Tensors&) {
    record("once");
    own->remove();
  });
  net.register_forward_pre_hook(pre("pre 3"));
  run(net, x);
  run(net, x);
}

void always(Net& net) {
  net.register_forward_hook(post("plain"));
  net.register_forward_hook(post("always 1"), kAlways);
  net.register_forward_hook(post("always 2", 2.0), kAlways);
}

void forward_raises(Net& net, torch::Tensor& x) {
  always(net);
  net->fails = true;
  run(net, x);
}

void pre_raises(Net& net, torch::Tensor& x) {
  always(net);
  net.register_forward_pre_hook(pre("pre 1", 2.0));
  net.register_forward_pre_hook(raising("pre fails"));
  net.register_forward_pre_hook(pre("pre 3"));
  run(net, x);
}

void post_raises(Net& net, torch::Tensor& x) {
  always(net);
  net.register_forward_hook(raising("post fails"));
  net.register_forward_hook(post("always 3"), kAlways);
  net.register_forward_hook(post("plain 2"));
  run(net, x);
}

void always_raises(Net& net, torch::Tensor& x) {
  net.register_forward_hook(raising("always fails"), kAlways);
  always(net);
  net->fails = true;
  run(net, x);
}

void inner_raises(Net& net, torch::Tensor& x) {
  always(net);
  net->up.register_forward_hook(post("up always"), kAlways);
  net->up.register_forward_pre_hook(raising("up pre fails"));
  run(net, x);
}

void multi_grad(Net& net, torch::Tensor& x) {
  const Tensors weights{net->up->weight, net->down->weight, net->down->bias};
  register_multi_grad_hook(weights, [](const Tensors& grads) { record("all " + describe(grads)); });
  register_multi_grad_hook(
      weights, [](const Tensors& grads) { record("any " + describe(grads)); }, MultiGradMode::Any);
  run(net, x).sum().backward();
  run(net, x).sum().backward();
  net->down(torch::ones({1, 4})).sum().backward();
}

void post_accumulate(Net& net, torch::Tensor& x) {
  const auto hook = [](const std::string& name) {
    return [name](const torch::Tensor& p) { record(name + " " + describe({p.grad()})); };
  };
  register_post_accumulate_grad_hook(net->up->bias, hook("bias"));
  auto first = register_post_accumulate_grad_hook(net->down->weight, hook("weight 1"));
  register_post_accumulate_grad_hook(net->down->weight, hook("weight 2"));
  run(net, x).sum().backward();
  first.remove();
  run(net, x).sum().backward();
}

struct HookCase {
  const char* name;
  void (*run)(Net&, torch::Tensor&);
};
const HookCase kHookCases[] = {
    {"order", order},
    {"no_input_grad", no_input_grad},
    {"no_grad_at_all", no_grad_at_all},
    {"removal", removal},
    {"forward_raises", forward_raises},
    {"pre_raises", pre_raises},
    {"post_raises", post_raises},
    {"always_raises", always_raises},
    {"inner_raises", inner_raises},
    {"multi_grad", multi_grad},
    {"post_accumulate", post_accumulate},
};

TEST(HooksParity, SameCallsAndGradientsAsPyTorch) {
  torch::manual_seed(0);
  const Net weights;
  Message request;
  for (const auto& item : weights->named_parameters()) request.tensors[item.key()] = item.value();
  request.tensors["x"] = torch::randn({5, 3});
  const auto response = run_python("hooks.py", request);
  SKIP_WITHOUT_PYTHON(response);
  ASSERT_EQ(response.texts.size(), std::size(kHookCases));
  size_t gradients = 0;
  for (const auto& each : kHookCases) {
    SCOPED_TRACE(each.name);
    log.clear();
    Net net;
    {
      torch::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) item->copy_(request.tensors.at(item.key()));
    }
    auto x = request.tensors.at("x").clone();
    each.run(net, x);
    std::string ours;
    for (const auto& line : log) ours += (ours.empty() ? "" : "\n") + line;
    EXPECT_EQ(ours, response.texts.at(each.name));
    const auto compare = [&](const std::string& name, const torch::Tensor& grad) {
      if (!grad.defined()) return;
      gradients++;
      const auto theirs = response.tensors.find(std::string(each.name) + "." + name);
      ASSERT_NE(theirs, response.tensors.end()) << name;
      EXPECT_TRUE(torch::allclose(grad, theirs->second)) << name;
    };
    for (const auto& item : net->named_parameters()) compare(item.key(), item->grad());
    compare("x", x.grad());
  }
  EXPECT_EQ(gradients, response.tensors.size());
}

}  // namespace
}  // namespace tessera::parity

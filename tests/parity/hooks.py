"""For hooks_test.cpp: the same model and hooks. Returns the sequence of calls as text, and the gradients."""
import torch
from harness import respond
from torch import nn

log = []


class Net(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 2)
        self.fails = False
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(tensors[name])

    def forward(self, x):
        log.append("forward")
        hidden = self.up(x)
        if self.fails:
            raise ValueError("forward fails")
        return self.down(torch.relu(hidden))


def describe(tensors):
    return " ".join(f"{t.sum().item():.4f}" if t is not None else "-" for t in tensors)


def pre(name, scale=None):
    def hook(module, inputs):
        log.append(f"{name} {describe(inputs)}")
        return inputs[0] * scale if scale is not None else None

    return hook


def post(name, scale=None):
    def hook(module, inputs, output):
        log.append(f"{name} {describe(inputs)} | {describe([output] if output is not None else [])}")
        return output * scale if scale is not None else None

    return hook


def back_pre(name, scale=None):
    def hook(module, grad_output):
        log.append(f"{name} {describe(grad_output)}")
        return (grad_output[0] * scale,) if scale is not None else None

    return hook


def back(name, scale=None):
    def hook(module, grad_input, grad_output):
        log.append(f"{name} {describe(grad_input)} | {describe(grad_output)}")
        return (grad_input[0] * scale,) if scale is not None else None

    return hook


def raising(name):
    def hook(*args):
        log.append(name)
        raise RuntimeError(name)

    return hook


def run(net, x):
    try:
        return net(x)
    except Exception as error:
        log.append(f"caught {error}")


def order(net, x):
    net.register_forward_pre_hook(pre("pre 1"))
    net.register_forward_pre_hook(pre("pre 2", 2.0))
    net.register_forward_pre_hook(pre("pre 3"), prepend=True)
    net.register_forward_hook(post("post 1"))
    net.register_forward_hook(post("post 2", 3.0))
    net.register_forward_hook(post("post 3"), prepend=True)
    net.up.register_forward_pre_hook(pre("up pre"))
    net.up.register_forward_hook(post("up post", 0.5))
    net.register_full_backward_pre_hook(back_pre("back pre 1"))
    net.register_full_backward_pre_hook(back_pre("back pre 2", 2.0), prepend=True)
    net.register_full_backward_hook(back("back 1"))
    net.register_full_backward_hook(back("back 2", 10.0))
    net.register_full_backward_hook(back("back 3"), prepend=True)
    net.up.register_full_backward_hook(back("up back", 0.1))
    net.down.register_full_backward_hook(back("down back"))
    net.down.register_full_backward_pre_hook(back_pre("down back pre"))
    x.requires_grad_()
    run(net, x).sum().backward()


def no_input_grad(net, x):
    net.register_full_backward_pre_hook(back_pre("back pre"))
    net.register_full_backward_hook(back("back"))
    net.down.register_full_backward_hook(back("down back"))
    run(net, x).sum().backward()


def no_grad_at_all(net, x):
    net.register_full_backward_hook(back("back"))
    net.register_forward_hook(post("post"))
    with torch.no_grad():
        run(net, x)


def removal(net, x):
    handle = net.register_forward_pre_hook(pre("pre 1"))
    net.register_forward_pre_hook(pre("pre 2"))
    run(net, x)
    handle.remove()
    handle.remove()
    run(net, x)
    own = None

    def once(module, inputs):
        log.append("once")
        own.remove()

    own = net.register_forward_pre_hook(once)
    net.register_forward_pre_hook(pre("pre 3"))
    run(net, x)
    run(net, x)


def always(net):
    net.register_forward_hook(post("plain"))
    net.register_forward_hook(post("always 1"), always_call=True)
    net.register_forward_hook(post("always 2", 2.0), always_call=True)


def forward_raises(net, x):
    always(net)
    net.fails = True
    run(net, x)


def pre_raises(net, x):
    always(net)
    net.register_forward_pre_hook(pre("pre 1", 2.0))
    net.register_forward_pre_hook(raising("pre fails"))
    net.register_forward_pre_hook(pre("pre 3"))
    run(net, x)


def post_raises(net, x):
    always(net)
    net.register_forward_hook(raising("post fails"))
    net.register_forward_hook(post("always 3"), always_call=True)
    net.register_forward_hook(post("plain 2"))
    run(net, x)


def always_raises(net, x):
    net.register_forward_hook(raising("always fails"), always_call=True)
    always(net)
    net.fails = True
    run(net, x)


def inner_raises(net, x):
    always(net)
    net.up.register_forward_hook(post("up always"), always_call=True)
    net.up.register_forward_pre_hook(raising("up pre fails"))
    run(net, x)


def multi_grad(net, x):
    weights = [net.up.weight, net.down.weight, net.down.bias]
    torch.autograd.graph.register_multi_grad_hook(weights, lambda grads: log.append(f"all {describe(grads)}"))
    torch.autograd.graph.register_multi_grad_hook(
        weights, lambda grad: log.append(f"any {describe([grad])}"), mode="any"
    )
    run(net, x).sum().backward()
    run(net, x).sum().backward()
    net.down(torch.ones(1, 4)).sum().backward()


def post_accumulate(net, x):
    def hook(name):
        return lambda p: log.append(f"{name} {describe([p.grad])}")

    net.up.bias.register_post_accumulate_grad_hook(hook("bias"))
    first = net.down.weight.register_post_accumulate_grad_hook(hook("weight 1"))
    net.down.weight.register_post_accumulate_grad_hook(hook("weight 2"))
    run(net, x).sum().backward()
    first.remove()
    run(net, x).sum().backward()


CASES = [order, no_input_grad, no_grad_at_all, removal, forward_raises, pre_raises, post_raises, always_raises,
         inner_raises, multi_grad, post_accumulate]


def hooks(tensors, texts):
    logs, grads = {}, {}
    for case in CASES:
        log.clear()
        net, x = Net(tensors), tensors["x"].clone()
        case(net, x)
        logs[case.__name__] = "\n".join(log)
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                grads[f"{case.__name__}.{name}"] = parameter.grad
        if x.grad is not None:
            grads[f"{case.__name__}.x"] = x.grad
    return grads, logs


respond(hooks)

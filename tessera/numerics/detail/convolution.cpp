#include "tessera/base/error.h"
#include "tessera/numerics/detail/rewrite_arguments.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/col2im.h>
#include <ATen/ops/im2col.h>

// Convolutions as matrix products of windows: a row is what one output position sees of one image. Windows are moved,
// not added, and the gradient of the input adds windows in the order of their positions, image by image.
namespace tessera::numerics {
namespace {

using at::Tensor;
using torch::jit::Stack;

// The arguments that convolution and its backward share. `first`: the position of stride.
struct ConvolutionCall {
  Tensor input, weight;  // of images, (N, C, H, W) and (O, C / groups, KH, KW)
  std::vector<int64_t> stride, padding, dilation, kernel;
  int64_t groups;
  bool is_1d;

  ConvolutionCall(const Arguments& args, size_t first, Tensor input_, Tensor weight_)
      : input(std::move(input_)),
        weight(std::move(weight_)),
        stride(args[first].toIntVector()),
        padding(args[first + 1].toIntVector()),
        dilation(args[first + 2].toIntVector()),
        groups(args[first + 5].toInt()),
        is_1d(input.dim() == 3) {
    TESSERA_CHECK(input.dim() == 3 || input.dim() == 4, UsageError, "Numerics::Invariant: convolution of sizes ",
                  input.sizes(), "; 1-D and 2-D convolutions are covered");
    TESSERA_CHECK(!args[first + 3].toBool(), UsageError,
                  "Numerics::Invariant: a transposed convolution; upsample, and use a convolution");
    const size_t dims = is_1d ? 1 : 2;
    for (auto* list : {&stride, &padding, &dilation})
      if (list->size() < dims) list->resize(dims, list->at(0));
    if (is_1d) {
      input = input.unsqueeze(2);
      weight = weight.unsqueeze(2);
      stride.insert(stride.begin(), 1);
      padding.insert(padding.begin(), 0);
      dilation.insert(dilation.begin(), 1);
    }
    kernel = {weight.size(2), weight.size(3)};
  }
  int64_t images() const { return input.size(0); }
  int64_t out_channels() const { return weight.size(0); }
  int64_t window() const { return weight.size(1) * kernel[0] * kernel[1]; }  // of one group
  int64_t out_size(size_t i) const {
    return (input.size(static_cast<int64_t>(i) + 2) + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) / stride[i] +
           1;
  }
  // The windows of a group: (N * positions, window).
  Tensor windows(const Tensor& all, int64_t group) const {
    return all.narrow(1, group * window(), window()).transpose(1, 2).reshape({-1, window()});
  }
  Tensor all_windows() const { return at::im2col(input, kernel, dilation, padding, stride); }
  // (N, O, positions) -> of a group (N * positions, O / groups)
  Tensor rows_of(const Tensor& image, int64_t group) const {
    const int64_t channels = out_channels() / groups;
    return image.narrow(1, group * channels, channels).transpose(1, 2).reshape({-1, channels});
  }
  // The weight of a group: (O / groups, window).
  Tensor matrix(int64_t group) const {
    const int64_t channels = out_channels() / groups;
    return weight.narrow(0, group * channels, channels).reshape({channels, window()});
  }
};

Tensor joined(const std::vector<Tensor>& parts, int64_t dim) {
  return parts.size() == 1 ? parts[0] : at::cat(parts, dim);
}

}  // namespace

// input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
void run_convolution(Stack* stack, size_t count) {
  Arguments args(stack, count);
  const ConvolutionCall call(args, 3, args.tensor(0), args.tensor(1));
  const auto windows = call.all_windows();
  std::vector<Tensor> parts;
  for (int64_t g = 0; g < call.groups; g++) {
    const auto y = product(call.windows(windows, g), call.matrix(g).transpose(0, 1));
    parts.push_back(y.reshape({call.images(), -1, y.size(1)}).transpose(1, 2));
  }
  auto y = joined(parts, 1).reshape({call.images(), call.out_channels(), call.out_size(0), call.out_size(1)});
  if (const auto bias = args.optional_tensor(2)) y = y + bias->reshape({1, call.out_channels(), 1, 1});
  args.reply(call.is_1d ? y.squeeze(2) : y);
}

// grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
void run_convolution_backward(Stack* stack, size_t count) {
  Arguments args(stack, count);
  const ConvolutionCall call(args, 4, args.tensor(1), args.tensor(2));
  const auto mask = args[10].toBoolList();
  const auto grad = args.tensor(0).reshape({call.images(), call.out_channels(), -1});
  const auto windows = mask[1] ? call.all_windows() : Tensor();
  std::vector<Tensor> of_windows, of_weights, of_bias;
  for (int64_t g = 0; g < call.groups; g++) {
    const auto rows = call.rows_of(grad, g);
    if (mask[0])
      of_windows.push_back(product(rows, call.matrix(g)).reshape({call.images(), -1, call.window()}).transpose(1, 2));
    if (mask[1]) of_weights.push_back(product(rows.transpose(0, 1), call.windows(windows, g)));
    if (mask[2]) of_bias.push_back(sum_dims(rows, {0}, false));
  }
  Tensor dx, dweight, dbias;
  if (mask[0]) {
    const std::vector<int64_t> sizes = {call.input.size(2), call.input.size(3)};
    dx = at::col2im(joined(of_windows, 1), sizes, call.kernel, call.dilation, call.padding, call.stride);
    if (call.is_1d) dx = dx.squeeze(2);
  }
  if (mask[1]) dweight = joined(of_weights, 0).reshape(args.tensor(2).sizes());
  if (mask[2]) dbias = joined(of_bias, 0);
  args.reply(dx, dweight, dbias);
}

}  // namespace tessera::numerics

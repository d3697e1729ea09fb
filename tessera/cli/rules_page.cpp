#include "tessera/cli/rules_report.h"

#include <algorithm>
#include <map>
#include <ostream>

// The page docs/ops.md.
namespace tessera::cli {
namespace {

struct ExampleCall {
  const char* op;
  std::vector<std::string> call;
};

// One or two calls of each family of rules.
const std::vector<ExampleCall>& example_calls() {
  static const std::vector<ExampleCall> calls = {
      {"aten::add.Tensor", {"8x6", "8x6"}},
      {"aten::mul.Tensor", {"8x6", "6"}},
      {"aten::relu", {"8x6"}},
      {"aten::sum.dim_IntList", {"8x6", "dim=[1]"}},
      {"aten::mean.dim", {"8x6", "dim=[0]"}},
      {"aten::amax", {"8x6", "dim=[1]"}},
      {"aten::argmax", {"8x6", "dim=1"}},
      {"aten::linalg_vector_norm", {"8x6"}},
      {"aten::cumsum", {"8x6", "dim=1"}},
      {"aten::sort", {"8x6", "dim=1"}},
      {"aten::topk", {"8x6", "k=2"}},
      {"aten::_softmax", {"8x6", "dim=1", "half_to_float=false"}},
      {"aten::mm", {"8x6", "6x4"}},
      {"aten::addmm", {"4", "8x6", "6x4"}},
      {"aten::bmm", {"2x8x6", "2x6x4"}},
      {"aten::linear", {"2x8x6", "4x6", "4"}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", {"2x4x8x6", "2x4x8x6", "2x4x8x6"}},
      {"aten::_scaled_dot_product_flash_attention", {"2x4x8x6", "2x4x8x6", "2x4x8x6"}},
      {"aten::embedding", {"10x6", "i8"}},
      {"aten::native_layer_norm", {"2x8x6", "6", "6", "normalized_shape=[6]", "eps=1e-5"}},
      {"aten::native_group_norm", {"4x6x5", "6", "6", "N=4", "C=6", "HxW=5", "group=2", "eps=1e-5"}},
      {"aten::convolution",
       {"4x6x8x8", "5x6x3x3", "5", "stride=[1,1]", "padding=[1,1]", "dilation=[1,1]", "transposed=false",
        "output_padding=[0,0]", "groups=1"}},
      {"aten::max_pool2d_with_indices", {"4x6x8x8", "kernel_size=[2,2]"}},
      {"aten::mse_loss", {"8x6", "8x6"}},
      {"aten::gather", {"8x6", "i8x6", "dim=1"}},
      {"aten::index_select", {"8x6", "i5", "dim=0"}},
      {"aten::cat", {"8x6", "8x6", "dim=0"}},
      {"aten::stack", {"8x6", "8x6"}},
      {"aten::roll", {"8x6", "shifts=[1]", "dims=[1]"}},
      {"aten::tril", {"8x6"}},
      {"aten::linalg_inv_ex", {"4x6x6"}},
      {"aten::_fft_c2c", {"c8x6", "dim=[1]", "normalization=0", "forward=true"}},
      {"aten::upsample_nearest2d", {"4x6x8x8", "output_size=[16,16]"}},
  };
  return calls;
}

std::string code_list(const std::vector<std::string>& ops) {
  std::string text;
  for (const auto& op : ops) text += (text.empty() ? "`" : ", `") + op.substr(op.find("::") + 2) + "`";
  return text;
}

// Ops by what is written beside them, in order.
using Groups = std::map<std::string, std::vector<std::string>>;

void print_groups(const Groups& groups, const char* column, std::ostream& out) {
  out << "| " << column << " | ops |\n|---|---|\n";
  for (const auto& [name, ops] : groups) out << "| " << name << " | " << code_list(ops) << " |\n";
  out << '\n';
}

std::string call_text(const ExampleCall& example) {
  std::string text = "`" + std::string(example.op).substr(6);
  for (const auto& word : example.call) text += " " + word;
  return text + "`";
}

}  // namespace

void print_coverage_markdown(const std::vector<OpCoverage>& ops, std::ostream& out) {
  using How = OpCoverage::How;
  Groups by_family, gathered, others;
  std::vector<std::string> forms;
  for (const auto& op : ops) {
    if (op.gathered)
      gathered[op.detail].push_back(op.op);
    else if (op.how == How::Rule)
      by_family[op.detail].push_back(op.op);
    else if (op.how == How::Functional)
      forms.push_back(op.op);
    else
      others[std::string(to_string(op.how))].push_back(op.op);
  }
  out << "# Ops\n\n"
         "`tessera rules coverage --markdown` prints this page from the rules (`tessera/rules`). It has the "
      << ops.size()
      << "\noverloads for which PyTorch's DTensor has a strategy. Every other op of LibTorch runs too: by its "
         "functional "
         "form, by\nits composite code, or gathered. [design/dtensor.md](design/dtensor.md) describes the routes.\n\n"
         "## Ops with a sharding rule\n\nThe oracle proves every strategy by brute force, on uneven and empty "
         "shards.\n\n";
  print_groups(by_family, "family", out);
  out << "## Example calls\n\nThe strategies of a call over one mesh axis: placements of the tensors -> placements of "
         "the results. `tessera rules\nshow OP CALL` prints those of any call.\n\n| call | strategies |\n|---|---|\n";
  for (const auto& example : example_calls()) {
    out << "| " << call_text(example) << " |";
    const char* between = " ";
    for (const auto& line : strategies_of(example.op, example.call)) {
      out << between << line;
      between = "<br>";
    }
    out << " |\n";
  }
  out << "\n## Gathered ops\n\nThe only strategy is all-Replicate. CommPolicy counts the redistributions, and can "
         "forbid them.\n\n";
  print_groups(gathered, "reason", out);
  out << "## Own kernels, composite and decomposed ops\n\n";
  print_groups(others, "route", out);
  out << "## In-place and out= forms\n\nThe functional form runs, and its results are copied into the arguments.\n\n"
      << code_list(forms) << '\n';
}

}  // namespace tessera::cli

#include "tessera/compile/detail/passes/pass.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/passes/pass_observer.h"
#include "tessera/compile/detail/passes/passes.h"

#include <charconv>
#include <chrono>
#include <ostream>
#include <string_view>

namespace tessera::compiler {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::string settings_of(const PassInfo& info) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : info.settings) keys.push_back(c10::str(key, "=", value));
  return keys.empty() ? "it has no settings" : "it has " + c10::Join(", ", keys);
}

// "bytes=1024, dim=0"
PassSettings read_settings(const PassInfo& info, std::string_view text) {
  auto settings = info.settings;
  while (!trimmed(text).empty()) {
    const auto comma = std::min(text.find(','), text.size());
    const auto one = trimmed(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
    const auto equals = one.find('=');
    const auto key = std::string(trimmed(one.substr(0, std::min(equals, one.size()))));
    const auto found = settings.find(key);
    TESSERA_CHECK(found != settings.end(), UsageError, "pass ", info.name, ": unknown setting \"", key, "\"; ",
                  settings_of(info));
    const auto value = equals == std::string_view::npos ? std::string_view() : trimmed(one.substr(equals + 1));
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), found->second);
    TESSERA_CHECK(!value.empty() && error == std::errc() && end == value.data() + value.size(), UsageError, "pass ",
                  info.name, ": ", key, " is \"", value, "\"; write an integer, for example ", key, "=",
                  info.settings.at(key));
  }
  return settings;
}

}  // namespace

const std::vector<PassInfo>& known_passes() {
  static const std::vector<PassInfo> passes = {
      {"functionalise", "replaces in-place ops on the program's own memory by functional ones", functionalise},
      {"fold_views", "removes views that alias exactly the memory of an earlier value", fold_views},
      {"fold_casts", "copies from the value that was cast, without the cast", fold_casts},
      {"constant_folding", "runs ops on constants at compile time", constant_folding, {{"bytes", 65536}}},
      {"common_subexpressions", "computes equal expressions once", common_subexpressions},
      {"dead_code", "removes ops whose results are not used", dead_code},
      {"batch_dims", "annotates each value with its batch dim", batch_dims, {{"dim", 0}}},
      {"cancel_collectives", "removes collectives whose result is already on this rank", cancel_collectives},
      {"place_redistributes", "moves collectives to where they send fewer bytes; changes rounding",
       place_redistributes},
      {"hoist_communication", "posts collectives as soon as their inputs are ready", hoist_communication, {}, true},
      {"fuse_ddp_with_concat_op", "all-reduces DDP gradients in buckets, each one concatenated",
       fuse_ddp_with_concat_op},
      {"fuse_ddp_with_coalesced_op", "all-reduces DDP gradients in buckets, each one coalesced collective",
       fuse_ddp_with_coalesced_op},
      {"bucket_all_gathers", "buckets consecutive all-gathers", bucket_all_gathers},
      {"prefetch_all_gathers",
       "posts each all-gather before the computation that uses the previous one",
       prefetch_all_gathers,
       {},
       true},
      {"bucket_reduce_scatters", "buckets consecutive reduce-scatters", bucket_reduce_scatters},
      {"merge_collectives",
       "merges consecutive collectives of one kind into coalesced ones",
       merge_collectives,
       {{"bytes", 25 * 1024 * 1024}}},
      {"schedule_comm_wait", "delays waits to the first use of the result", schedule_comm_wait, {}, true},
      {"overlap_communication",
       "posts earlier and waits later while peak memory stays below bytes (or below the present peak)",
       overlap_communication,
       {{"bytes", 0}},
       true},
      {"cublas_epilogues", "on CUDA, computes gelu and its derivative inside of the matrix products", cublas_epilogues},
      {"cuda_kernels", "on CUDA, replaces layer norm and sums over rows by fused kernels", cuda_kernels},
      {"fuse_bias", "on CUDA, adds a bias inside of the matrix product", fuse_bias},
      {"fuse_cpu_bias",
       "on the CPU, adds a bias inside of the matrix product; changes rounding",
       fuse_cpu_bias,
       {},
       false,
       true},
      {"in_place_collectives", "makes all-reduces in-place if their input is not used again", in_place_collectives},
      {"fast_products",
       "on the CPU, computes large matrix products by a kernel of Tessera where that is faster; changes rounding",
       fast_products,
       {},
       false,
       true},
      {"widen_bfloat16",
       "on a CPU with instructions for bfloat16, rounds to it in matrix products alone; changes rounding",
       widen_bfloat16,
       {},
       false,
       true},
      {"recompute", "on the CPU, computes cheap values again in backward if that lowers the peak of memory", recompute},
      {"recompute_products",
       "on the CPU, computes some matrix products again in backward if that lowers the peak of memory",
       recompute_products,
       {{"percent", 5}}},
      {"fuse_small_ops",
       "fuses consecutive small ops into one generated function; changes rounding",
       fuse_small_ops,
       {},
       false,
       true},
      {"fuse_pointwise", "fuses consecutive pointwise ops into one generated function", fuse_pointwise},
      {"in_place_ops",
       "makes pointwise ops in-place if their operand is not used again and has at least so many bytes",
       in_place_ops,
       {{"bytes", 0}}},
      {"cpu_kernels",
       "on the CPU, replaces attention, norms, gelu and losses by kernels of Tessera; changes rounding",
       cpu_kernels,
       {},
       false,
       true},
  };
  return passes;
}

Pass find_pass(const std::string& text) {
  const auto open = text.find('(');
  const auto name = trimmed(std::string_view(text).substr(0, open));
  std::string_view settings;
  if (open != std::string::npos) {
    settings = trimmed(std::string_view(text).substr(open + 1));
    TESSERA_CHECK(settings.ends_with(")"), UsageError, "pass \"", text, "\" has no closing bracket; write ", name,
                  "(key=value)");
    settings.remove_suffix(1);
  }
  std::vector<std::string> names;
  for (const auto& info : known_passes()) {
    if (name == info.name)
      return {text, [&info, given = read_settings(info, settings)](Program& p) { return info.run(p, given); },
              info.reorders};
    names.emplace_back(info.name);
  }
  TESSERA_FAIL(UsageError, "no pass is called ", name, "; there are ", c10::Join(", ", names));
}

std::ostream& operator<<(std::ostream& out, const PassReport& report) {
  out << report.name << ": " << report.matched.times << " in " << report.milliseconds << " ms";
  return report.matched.note.empty() ? out : out << " (" << report.matched.note << ")";
}
std::ostream& operator<<(std::ostream& out, const std::vector<PassReport>& report) {
  for (const auto& each : report) out << each << "\n";
  return out;
}

std::vector<PassReport> run_passes(Program& program, const std::vector<Pass>& passes, bool verified) {
  std::vector<PassReport> report;
  if (verified) verify(program);
  for (const auto& pass : passes) {
    const auto begin = std::chrono::steady_clock::now();
    auto matched = pass.run(program);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    report.push_back({pass.name, std::move(matched), took.count()});
    if (auto* observer = PassObserverScope::current()) observer->after_pass(program, report.back());
    if (!verified) continue;
    try {
      verify(program);
    } catch (const InternalError& error) {
      TESSERA_FAIL(InternalError, "after pass ", pass.name, ": ", error.what_without_backtrace());
    }
  }
  return report;
}

}  // namespace tessera::compiler

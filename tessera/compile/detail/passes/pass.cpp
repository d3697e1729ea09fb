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

std::string keys_of(const PassRow& row) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : row.settings) keys.push_back(c10::str(key, "=", value));
  return keys.empty() ? "it has no settings" : "it has " + c10::Join(", ", keys);
}

// "bytes=1024, dim=0"
PassSettings read_settings(const PassRow& row, std::string_view text) {
  auto settings = row.settings;
  while (!trimmed(text).empty()) {
    const auto comma = std::min(text.find(','), text.size());
    const auto one = trimmed(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
    const auto equals = one.find('=');
    const auto key = std::string(trimmed(one.substr(0, std::min(equals, one.size()))));
    const auto found = settings.find(key);
    TESSERA_CHECK(found != settings.end(), UsageError, "pass ", row.name, ": there is no setting \"", key, "\"; ",
                  keys_of(row));
    const auto value = equals == std::string_view::npos ? std::string_view() : trimmed(one.substr(equals + 1));
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), found->second);
    TESSERA_CHECK(!value.empty() && error == std::errc() && end == value.data() + value.size(), UsageError, "pass ",
                  row.name, ": ", key, " is \"", value, "\"; write a whole number, ", key, "=", row.settings.at(key));
  }
  return settings;
}

}  // namespace

const std::vector<PassRow>& known_passes() {
  static const std::vector<PassRow> rows = {
      {"functionalise", "what writes into memory of the program's own gives memory of its own", functionalise},
      {"fold_views", "a view that shows what another value shows already is that value", fold_views},
      {"constant_folding", "what depends on nothing is computed at compile time", constant_folding, {{"bytes", 65536}}},
      {"common_subexpressions", "what is computed twice is computed once", common_subexpressions},
      {"dead_code", "what nobody reads is not computed", dead_code},
      {"batch_dims", "says which dim of each value is the batch", batch_dims, {{"dim", 0}}},
      {"cancel_collectives", "collectives whose result is here already are not done", cancel_collectives},
      {"place_redistributes", "collectives move to where they carry less; rounds otherwise", place_redistributes},
      {"hoist_communication",
       "collectives are posted as soon as what they send is there",
       hoist_communication,
       {},
       true},
      {"fuse_ddp_with_concat_op", "gradients are reduced in buckets, each concatenated", fuse_ddp_with_concat_op},
      {"fuse_ddp_with_coalesced_op", "gradients are reduced in buckets, each one coalesced collective",
       fuse_ddp_with_coalesced_op},
      {"bucket_all_gathers", "all-gathers that follow one another are one collective with several parts",
       bucket_all_gathers},
      {"prefetch_all_gathers",
       "an all-gather is posted before what the one before it gave is computed with",
       prefetch_all_gathers,
       {},
       true},
      {"bucket_reduce_scatters", "reduce-scatters that follow one another are one collective with several parts",
       bucket_reduce_scatters},
      {"merge_collectives",
       "collectives of one kind that follow one another are one",
       merge_collectives,
       {{"bytes", 25 * 1024 * 1024}}},
      {"schedule_comm_wait",
       "collectives are waited for where their results are first read",
       schedule_comm_wait,
       {},
       true},
      {"overlap_communication",
       "collectives are under way for as long as memory in use stays below bytes, or its peak without this",
       overlap_communication,
       {{"bytes", 0}},
       true},
      {"in_place_collectives", "what is reduced and not read again is reduced where it lies", in_place_collectives},
      {"fuse_pointwise", "pointwise ops that follow one another are one generated function", fuse_pointwise},
      {"in_place_ops", "a pointwise op writes into an operand that nobody needs any more", in_place_ops},
  };
  return rows;
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
  for (const auto& row : known_passes()) {
    if (name == row.name)
      return {text, [&row, given = read_settings(row, settings)](Program& p) { return row.run(p, given); },
              row.reorders};
    names.emplace_back(row.name);
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

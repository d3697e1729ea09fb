#include "tessera/cli/ckpt_report.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/distcp.h"
#include "tessera/checkpoint/detail/hugging_face.h"
#include "tessera/checkpoint/detail/safetensors.h"
#include "tessera/checkpoint/detail/shard_reader.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/save.h"
#include "tessera/comm/world.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isnan.h>

#include <cstdio>
#include <filesystem>
#include <iomanip>
#include <map>
#include <ostream>
#include <set>
#include <sstream>

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using dcp::NamedTensors;
using dcp::SavedTensor;

std::string value_text(const dcp::Value& value) {
  std::ostringstream text;
  std::visit([&](const auto& v) { text << v; }, value);
  return text.str();
}

int64_t bytes_of(const SavedTensor& tensor) {
  return c10::multiply_integers(tensor.sizes) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

std::string size_text(int64_t bytes) {
  std::ostringstream text;
  const char* unit = "B";
  auto value = static_cast<double>(bytes);
  for (const char* next : {"KB", "MB", "GB", "TB"}) {
    if (value < 1000) break;
    value /= 1000, unit = next;
  }
  text << std::setprecision(3) << value << " " << unit;
  return text.str();
}

// A step of the newest checkpoint, if `path` is a folder of them.
std::string checkpoint_at(const std::string& path) {
  const auto latest = dcp::latest(path);
  return latest && !fs::exists(fs::path(path) / dcp::kManifestName) ? *latest : path;
}

struct CheckpointTotals {
  int64_t bytes = 0, shards = 0, with_checksum = 0;
  std::set<std::string> files;
};
CheckpointTotals totals_of(const dcp::Manifest& manifest) {
  CheckpointTotals totals;
  for (const auto& tensor : manifest.tensors) {
    totals.bytes += bytes_of(tensor);
    for (const auto& shard : tensor.shards) {
      totals.shards++;
      totals.with_checksum += shard.checksum.has_value();
      totals.files.insert(shard.file);
    }
  }
  return totals;
}

std::string count_text(size_t count, const char* what) { return c10::str(count, " ", what, count == 1 ? "" : "s"); }

Json::Object json_of(const SavedTensor& tensor) {
  Json::Array shards;
  for (const auto& shard : tensor.shards)
    shards.emplace_back(Json::Object{{"file", shard.file},
                                     {"offsets", Json::Array(shard.box.offsets.begin(), shard.box.offsets.end())},
                                     {"sizes", Json::Array(shard.box.sizes.begin(), shard.box.sizes.end())}});
  return {{"dtype", dcp::dtype_name(tensor.dtype)},
          {"shape", Json::Array(tensor.sizes.begin(), tensor.sizes.end())},
          {"shards", std::move(shards)}};
}

// How two tensors differ; "": not at all.
std::string difference_of(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes())
    return c10::str("is ", a.scalar_type(), a.sizes(), " and ", b.scalar_type(), b.sizes());
  if (a.equal(b)) return "";
  const auto x = a.to(at::kDouble), y = b.to(at::kDouble);
  const auto both_nan = at::isnan(x).logical_and(at::isnan(y));
  const auto distance = x.sub(y).abs().masked_fill(both_nan.logical_or(x.eq(y)), 0);
  const auto differs = distance.le(tolerance).logical_not();  // NaN differs
  const int64_t count = differs.sum().item<int64_t>();
  if (count == 0) return "";
  return c10::str(count, " of ", a.numel(), " elements differ, by at most ", distance.max().item<double>());
}

NamedTensors read_tensors(const dcp::CheckpointSource& source, const std::string& prefix) {
  NamedTensors tensors;
  dcp::ShardReader reader(source.folder);
  for (const auto& tensor : source.manifest.tensors)
    if (tensor.name.starts_with(prefix))
      tensors.emplace_back(tensor.name.substr(prefix.size()), reader.read_all(tensor, /*verify=*/true));
  TESSERA_CHECK(!tensors.empty(), UsageError, "no tensor has the prefix '", prefix,
                "'; tessera ckpt show lists the names");
  return tensors;
}

// As Hugging Face names them: model.safetensors, or model-00001-of-00002.safetensors and an index.
void write_hugging_face_files(const NamedTensors& tensors, const std::string& folder, int64_t max_bytes) {
  std::vector<NamedTensors> files(1);
  int64_t in_file = 0, total = 0;
  for (const auto& item : tensors) {
    const auto bytes = static_cast<int64_t>(item.second.nbytes());
    if (in_file > 0 && in_file + bytes > max_bytes) files.emplace_back(), in_file = 0;
    files.back().push_back(item);
    in_file += bytes, total += bytes;
  }
  Json::Object weight_map;
  for (size_t i = 0; i < files.size(); i++) {
    char name[64] = "model.safetensors";
    if (files.size() > 1) std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, files.size());
    dcp::write_safetensors((fs::path(folder) / name).string(), files[i], {.metadata = {{"format", "pt"}}});
    for (const auto& [tensor, value] : files[i]) weight_map.emplace_back(tensor, std::string(name));
  }
  if (files.size() == 1) return;
  const Json index(
      Json::Object{{"metadata", Json::Object{{"total_size", total}}}, {"weight_map", std::move(weight_map)}});
  write_text_file((fs::path(folder) / "model.safetensors.index.json").string(), index.dump() + "\n");
}

// A manifest for tensors that are in memory.
dcp::Manifest manifest_of(const NamedTensors& tensors, const dcp::Values& values) {
  dcp::Manifest manifest{values, {}};
  for (const auto& [name, tensor] : tensors) {
    const Sizes sizes(tensor.sizes().begin(), tensor.sizes().end());
    manifest.tensors.push_back({name, tensor.scalar_type(), sizes, {{"", dcp::Box::full(tensor.sizes()), {}}}});
  }
  return manifest;
}

dcp::HuggingFaceModel hugging_face_model(const ConvertOptions& options, const std::string& from) {
  dcp::HuggingFaceModel model{options.from_hf.empty() ? options.to_hf : options.from_hf, options.heads,
                              options.kv_heads};
  const auto folder = fs::is_directory(from) ? fs::path(from) : fs::path(dcp::parent_folder(from));
  const auto config = folder / "config.json";
  if (!options.from_hf.empty() && fs::exists(config) && (model.family == "auto" || model.heads == 0))
    model = dcp::read_hugging_face_config(config.string());
  TESSERA_CHECK(model.family != "auto", UsageError, "'", folder.string(),
                "' has no config.json; write --from-hf gpt2, llama or mixtral");
  if (model.kv_heads == 0) model.kv_heads = model.heads;
  return model;
}

}  // namespace

void show_checkpoint(const std::string& given, bool json, std::ostream& out) {
  const auto path = checkpoint_at(given);
  const auto manifest = dcp::open_source(path).manifest;
  if (json) {
    Json::Object values, tensors;
    for (const auto& [name, value] : manifest.values)
      values.emplace_back(name, std::visit([](const auto& v) { return Json(v); }, value));
    for (const auto& tensor : manifest.tensors) tensors.emplace_back(tensor.name, json_of(tensor));
    out << Json(Json::Object{{"path", path}, {"values", std::move(values)}, {"tensors", std::move(tensors)}}).dump()
        << '\n';
    return;
  }
  const auto totals = totals_of(manifest);
  out << path << ": " << count_text(manifest.tensors.size(), "tensor") << ", " << size_text(totals.bytes) << " in "
      << count_text(totals.files.size(), "file") << '\n';
  for (const auto& [name, value] : manifest.values) {
    auto text = value_text(value);
    for (size_t at = 0; (at = text.find('\n', at)) != text.npos;) text.replace(at, 1, "; ");
    out << "  " << name << " = " << text << '\n';
  }
  size_t widest = 4;
  for (const auto& tensor : manifest.tensors) widest = std::max(widest, tensor.name.size());
  for (const auto& tensor : manifest.tensors)
    out << std::left << std::setw(static_cast<int>(widest) + 2) << tensor.name << std::setw(8)
        << dcp::dtype_name(tensor.dtype) << std::setw(18) << c10::str(c10::IntArrayRef(tensor.sizes)) << std::setw(12)
        << count_text(tensor.shards.size(), "shard") << size_text(bytes_of(tensor)) << '\n';
}

bool verify_checkpoint(const std::string& given, std::ostream& out) {
  const auto path = checkpoint_at(given);
  dcp::CheckpointSource source;
  try {
    source = dcp::open_source(path);
  } catch (const UsageError& error) {
    if (!fs::exists(path)) throw;
    out << error.what_without_backtrace() << '\n' << path << ": damaged\n";
    return false;
  }
  dcp::ShardReader reader(source.folder);
  int64_t problems = 0, not_finite = 0;
  for (const auto& tensor : source.manifest.tensors)
    for (const auto& shard : tensor.shards) try {
        const auto values = reader.read(tensor, shard, /*verify=*/true);
        if (values.is_floating_point() && c10::elementSize(values.scalar_type()) >= 2 &&
            !values.isfinite().all().item<bool>()) {
          out << "note: '" << tensor.name << "' " << shard.box << " has values that are not finite\n";
          not_finite++;
        }
      } catch (const UsageError& error) {
        out << error.what_without_backtrace() << '\n';
        problems++;
      }
  const auto totals = totals_of(source.manifest);
  out << path << ": " << (problems ? count_text(static_cast<size_t>(problems), "damaged shard") : std::string("ok"))
      << ", " << count_text(source.manifest.tensors.size(), "tensor") << ", "
      << count_text(static_cast<size_t>(totals.shards), "shard") << ", " << totals.with_checksum << " with checksums, "
      << size_text(totals.bytes) << '\n';
  return problems == 0;
}

bool diff_checkpoints(const std::string& given_a, const std::string& given_b, double tolerance, std::ostream& out) {
  const at::NoGradGuard no_grad;
  const auto a = checkpoint_at(given_a), b = checkpoint_at(given_b);
  const auto source_a = dcp::open_source(a), source_b = dcp::open_source(b);
  dcp::ShardReader reader_a(source_a.folder), reader_b(source_b.folder);
  int64_t differences = 0;
  const auto differs = [&](const auto&... text) {
    out << c10::str(text...) << '\n';
    differences++;
  };
  for (const auto& [name, value] : source_a.manifest.values) {
    const auto other = source_b.manifest.values.find(name);
    if (other == source_b.manifest.values.end())
      differs("value ", name, ": only in ", a);
    else if (other->second != value)
      differs("value ", name, ": ", value_text(value), " and ", value_text(other->second));
  }
  for (const auto& [name, value] : source_b.manifest.values)
    if (!source_a.manifest.values.contains(name)) differs("value ", name, ": only in ", b);
  for (const auto& tensor : source_a.manifest.tensors) {
    const auto* other = source_b.manifest.find(tensor.name);
    if (!other) {
      differs(tensor.name, ": only in ", a);
      continue;
    }
    const auto found = difference_of(reader_a.read_all(tensor, true), reader_b.read_all(*other, true), tolerance);
    if (!found.empty()) differs(tensor.name, ": ", found);
  }
  for (const auto& tensor : source_b.manifest.tensors)
    if (!source_a.manifest.find(tensor.name)) differs(tensor.name, ": only in ", b);
  out << (differences ? count_text(static_cast<size_t>(differences), "difference") : std::string("equal")) << ": " << a
      << " and " << b << '\n';
  return differences == 0;
}

void convert_checkpoint(const std::string& given, const std::string& to, const ConvertOptions& options,
                        std::ostream& out) {
  const at::NoGradGuard no_grad;
  const auto from = checkpoint_at(given);
  TESSERA_CHECK(options.from_hf.empty() || options.to_hf.empty(), UsageError, "give one of --from-hf and --to-hf");
  TESSERA_CHECK(!fs::exists(to) || (fs::is_directory(to) && fs::is_empty(to)), UsageError, "'", to,
                "' already exists; name a new folder");
  const auto source = dcp::open_source(from);
  const bool renames = !options.prefix.empty() || !options.from_hf.empty() || !options.to_hf.empty();
  if (options.to == "distcp" && !renames) {  // shard by shard, with the shards as they are
    dcp::ShardReader reader(source.folder);
    dcp::write_distcp(source.manifest, to, [&](const auto& tensor, const auto& shard) {
      return reader.read(tensor, shard, /*verify=*/true);
    });
  } else {
    auto tensors = read_tensors(source, options.prefix);
    if (!options.from_hf.empty()) tensors = dcp::from_hugging_face(tensors, hugging_face_model(options, from));
    if (!options.to_hf.empty()) tensors = dcp::to_hugging_face(tensors, hugging_face_model(options, from));
    const auto values = options.prefix.empty() && options.to_hf.empty() ? source.manifest.values : dcp::Values();
    if (options.to == "distcp") {
      std::map<std::string, at::Tensor> by_name(tensors.begin(), tensors.end());
      dcp::write_distcp(manifest_of(tensors, values), to,
                        [&](const auto& tensor, const auto&) { return by_name.at(tensor.name); });
    } else if (options.to == "tessera") {
      const auto world = init({.rank = 0, .world_size = 1});
      StateDict dict;
      for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
      dcp::save(dict, to, values, {.overwrite = true}, world);
      destroy();
    } else {
      fs::create_directories(to);
      write_hugging_face_files(tensors, to, options.max_file_bytes);
    }
  }
  const auto written = dcp::open_source(to).manifest;
  out << "wrote " << to << ": " << count_text(written.tensors.size(), "tensor") << ", "
      << size_text(totals_of(written).bytes) << '\n';
}

}  // namespace tessera::cli

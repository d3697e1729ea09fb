#include "tessera/checkpoint/detail/distcp.h"

#include "tessera/base/detail/mapped_file.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/disk.h"
#include "tessera/checkpoint/detail/pickle.h"
#include "tessera/checkpoint/detail/zip_archive.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModule = "torch.distributed.checkpoint.metadata";
constexpr const char* kFileModule = "torch.distributed.checkpoint.filesystem";
const std::string kSizeClass = "torch Size", kStorageMetadata = c10::str(kModule, " TensorStorageMetadata"),
                  kBytesMetadata = c10::str(kModule, " BytesStorageMetadata"),
                  kMetadataClass = c10::str(kModule, " Metadata");

struct TorchDtype {
  const char* name;     // torch.float32
  const char* storage;  // of torch.save; "": an untyped storage
  c10::ScalarType dtype;
};
constexpr TorchDtype kTorchDtypes[] = {
    {"bfloat16", "BFloat16Storage", c10::kBFloat16},
    {"bool", "BoolStorage", c10::kBool},
    {"float16", "HalfStorage", c10::kHalf},
    {"float32", "FloatStorage", c10::kFloat},
    {"float64", "DoubleStorage", c10::kDouble},
    {"float8_e4m3fn", "", c10::kFloat8_e4m3fn},
    {"float8_e5m2", "", c10::kFloat8_e5m2},
    {"int16", "ShortStorage", c10::kShort},
    {"int32", "IntStorage", c10::kInt},
    {"int64", "LongStorage", c10::kLong},
    {"int8", "CharStorage", c10::kChar},
    {"uint16", "", c10::kUInt16},
    {"uint32", "", c10::kUInt32},
    {"uint64", "", c10::kUInt64},
    {"uint8", "ByteStorage", c10::kByte},
};

const TorchDtype& torch_dtype(c10::ScalarType dtype) {
  for (const auto& row : kTorchDtypes)
    if (row.dtype == dtype) return row;
  TESSERA_FAIL(UsageError, "dtype ", dtype, " cannot be written to a .distcp file");
}

c10::ScalarType parse_torch_dtype(const PickleValue& value) {
  for (const auto& row : kTorchDtypes)
    if (value.is_global(c10::str("torch ", row.name))) return row.dtype;
  TESSERA_FAIL(UsageError, "'", value.text, "' is not a dtype that is read");
}

// torch.Size(...), or a tuple.
Sizes parse_sizes(const PickleValue& value) {
  const auto& tuple = value.is_call(kSizeClass) ? value.item(1).item(0) : value;
  TESSERA_CHECK(tuple.is(PickleValue::Kind::Tuple) || tuple.is(PickleValue::Kind::List), UsageError,
                "sizes are expected");
  Sizes sizes;
  for (const auto* item : tuple.items) {
    TESSERA_CHECK(item->integer() >= 0, UsageError, item->number, " is not a size or offset");
    sizes.push_back(item->integer());
  }
  return sizes;
}

// TensorProperties: a tuple of dtype and others, or the attributes.
c10::ScalarType dtype_of_properties(const PickleValue& properties) {
  const auto& state = properties.item(1);
  return parse_torch_dtype(state.is(PickleValue::Kind::Tuple) ? state.item(0) : properties.attribute("dtype"));
}

SavedTensor parse_tensor_metadata(const std::string& name, const PickleValue& metadata) {
  SavedTensor tensor{
      name, dtype_of_properties(metadata.attribute("properties")), parse_sizes(metadata.attribute("size")), {}};
  for (const auto* chunk : metadata.attribute("chunks").items) {
    Box box{parse_sizes(chunk->attribute("offsets")), parse_sizes(chunk->attribute("sizes"))};
    TESSERA_CHECK(box.offsets.size() == box.sizes.size(), UsageError, "a chunk has ", box.offsets.size(),
                  " offsets and ", box.sizes.size(), " sizes");
    if (box.numel() > 0 || tensor.sizes == box.sizes) tensor.shards.push_back({"", std::move(box), {}});
  }
  return tensor;
}

struct FilePlace {
  std::string file;
  ByteRange range;
};

FilePlace parse_place(const PickleValue& info) {
  const auto* transforms = info.item(1).find("transform_descriptors");
  TESSERA_CHECK(!transforms || transforms->is(PickleValue::Kind::None) || transforms->items.empty(), UsageError,
                "it was written with a transform, such as compression, which is not read");
  FilePlace place{info.attribute("relative_path").string(), {}};
  const int64_t begin = info.attribute("offset").integer(), size = info.attribute("length").integer();
  TESSERA_CHECK(begin >= 0 && size >= 0, UsageError, size, " bytes from byte ", begin, " on are not a range");
  TESSERA_CHECK(place.file.find('/') == std::string::npos, UsageError, "file '", place.file, "' is in another folder");
  place.range = {static_cast<uint64_t>(begin), static_cast<uint64_t>(size)};
  return place;
}

std::span<const std::byte> bytes_in(const MappedFile& file, ByteRange range) {
  const auto all = file.bytes();
  TESSERA_CHECK(range.begin <= all.size() && range.size <= all.size() - range.begin, UsageError, file.path(), " has ",
                all.size(), " bytes, and bytes ", range.begin, " to ", range.begin + range.size,
                " are expected: it is truncated");
  return all.subspan(range.begin, range.size);
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// An object of Python that a Value can hold.
std::optional<Value> parse_object(std::span<const std::byte> archive, const std::string& what) {
  const auto entries = read_zip(archive, what);
  const auto found = entries.find("data.pkl");
  if (found == entries.end()) return std::nullopt;
  try {
    const auto pickle = Pickle::parse(as_text(found->second), what);
    const auto& value = pickle.root();
    if (value.is(PickleValue::Kind::Int) || value.is(PickleValue::Kind::Bool)) return value.number;
    if (value.is(PickleValue::Kind::Real) && std::isfinite(value.real)) return value.real;
    if (value.is(PickleValue::Kind::Text)) return value.text;
  } catch (const UsageError&) {  // an object of another class
  }
  return std::nullopt;
}

// The storage of a tensor, sizes and strides: the arguments of torch._utils._rebuild_tensor_v2 or v3.
struct TensorPickle {
  std::string storage;  // its key: entry data/<key>
  c10::ScalarType dtype;
  int64_t offset;
  Sizes sizes, strides;
};

TensorPickle parse_tensor_pickle(const PickleValue& root) {
  const bool typed = root.is_call("torch._utils _rebuild_tensor_v2");
  TESSERA_CHECK(typed || root.is_call("torch._utils _rebuild_tensor_v3"), UsageError, "it is not a tensor");
  const auto& arguments = root.item(1);
  TESSERA_CHECK(arguments.item(0).is(PickleValue::Kind::PersistentId), UsageError, "it has no storage");
  const auto& storage = arguments.item(0).item(0);
  TensorPickle tensor{storage.item(2).string(), c10::kFloat, arguments.item(1).integer(),
                      parse_sizes(arguments.item(2)), parse_sizes(arguments.item(3))};
  TESSERA_CHECK(
      storage.item(0).string() == "storage" && tensor.offset >= 0 && tensor.sizes.size() == tensor.strides.size(),
      UsageError, "its sizes are damaged");
  if (!typed) {
    tensor.dtype = parse_torch_dtype(arguments.item(6));
    return tensor;
  }
  for (const auto& row : kTorchDtypes)
    if (*row.storage && storage.item(1).is_global(c10::str("torch ", row.storage))) {
      tensor.dtype = row.dtype;
      return tensor;
    }
  TESSERA_FAIL(UsageError, "'", storage.item(1).text, "' is not a storage that is read");
}

// The elements of a storage that a tensor reaches; none if that overflows.
std::optional<int64_t> reach(const TensorPickle& tensor) {
  int64_t end = 0, numel = 1;
  if (__builtin_add_overflow(tensor.offset, 1, &end)) return std::nullopt;
  for (size_t d = 0; d < tensor.sizes.size(); d++) {
    int64_t step = 0;
    const int64_t size = std::max<int64_t>(tensor.sizes[d], 1);  // LibTorch multiplies the others, too
    if (__builtin_mul_overflow(numel, size, &numel) || __builtin_mul_overflow(size - 1, tensor.strides[d], &step) ||
        __builtin_add_overflow(end, step, &end))
      return std::nullopt;
  }
  const bool empty = std::find(tensor.sizes.begin(), tensor.sizes.end(), 0) != tensor.sizes.end();
  return empty ? 0 : end;
}

void pickle_size(PickleWriter& out, const Sizes& sizes) {
  out.global("torch", "Size").begin_tuple().begin_tuple();
  for (const int64_t size : sizes) out.integer(size);
  out.end_tuple().end_tuple().call();
}

// data.pkl of a contiguous tensor.
std::string tensor_pickle(const at::Tensor& tensor) {
  const auto& row = torch_dtype(tensor.scalar_type());
  const bool typed = *row.storage;
  PickleWriter out;
  out.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3").begin_tuple();
  out.begin_tuple().text("storage");
  typed ? out.global("torch", row.storage) : out.global("torch.storage", "UntypedStorage");
  out.text("0").text("cpu").integer(typed ? tensor.numel() : static_cast<int64_t>(tensor.nbytes())).end_tuple();
  out.persistent_id().integer(0).begin_tuple();
  for (const int64_t size : tensor.sizes()) out.integer(size);
  out.end_tuple().begin_tuple();
  for (const int64_t stride : tensor.strides()) out.integer(stride);
  out.end_tuple().boolean(false).global("collections", "OrderedDict").begin_tuple().end_tuple().call();
  if (!typed) out.global("torch", row.name);
  out.end_tuple().call();
  return out.finish();
}

std::string value_pickle(const Value& value) {
  PickleWriter out;
  if (const auto* number = std::get_if<int64_t>(&value)) out.integer(*number);
  if (const auto* real = std::get_if<double>(&value)) out.real(*real);
  if (const auto* text = std::get_if<std::string>(&value)) out.text(*text);
  return out.finish();
}

// One .distcp file: archives one after the other.
class DistcpWriter {
 public:
  explicit DistcpWriter(const std::string& path) : file_(path) {}
  ByteRange add(const std::string& pickle, std::span<const std::byte> data) {
    const ByteRange start{at_, 0};
    const auto bytes = [](std::string_view text) { return std::as_bytes(std::span(text)); };
    std::vector<std::pair<std::string, std::span<const std::byte>>> entries{
        {"data.pkl", bytes(pickle)}, {".format_version", bytes("1")}, {"byteorder", bytes("little")}};
    if (data.data()) entries.emplace_back("data/0", data);
    entries.emplace_back("version", bytes("3\n"));
    write_zip(entries, [this](std::span<const std::byte> part) {
      file_.write(part);
      at_ += part.size();
    });
    return {start.begin, at_ - start.begin};
  }
  void finish() { file_.finish(/*sync=*/true); }

 private:
  NewFile file_;
  uint64_t at_ = 0;
};

struct WrittenItem {
  std::string name;
  std::optional<Sizes> offset;  // of a tensor
  int64_t index = 0;
  FilePlace place;
};

void pickle_tensor_metadata(PickleWriter& out, const SavedTensor& tensor) {
  out.global(kModule, "TensorStorageMetadata").new_object().begin_dict().text("properties");
  out.global(kModule, "TensorProperties").new_object().begin_tuple();
  out.global("torch", torch_dtype(tensor.dtype).name);
  out.global("torch.serialization", "_get_layout").begin_tuple().text("torch.strided").end_tuple().call();
  out.boolean(false);  // requires_grad
  out.global(kModule, "_MEM_FORMAT_ENCODING").begin_tuple().integer(0).end_tuple().call();
  out.boolean(false).end_tuple().set_state();  // pin_memory
  out.text("size");
  pickle_size(out, tensor.sizes);
  out.text("chunks").begin_list();
  for (const auto& shard : tensor.shards) {
    out.global(kModule, "ChunkStorageMetadata").new_object().begin_dict().text("offsets");
    pickle_size(out, shard.box.offsets);
    out.text("sizes");
    pickle_size(out, shard.box.sizes);
    out.end_dict().set_state();
  }
  out.end_list().end_dict().set_state();
}

std::string metadata_pickle(const Manifest& manifest, const std::vector<WrittenItem>& items) {
  PickleWriter out;
  out.global(kModule, "Metadata").new_object().begin_dict().text("state_dict_metadata").begin_dict();
  for (const auto& tensor : manifest.tensors) {
    out.text(tensor.name);
    pickle_tensor_metadata(out, tensor);
  }
  for (const auto& [name, value] : manifest.values) out.text(name).global(kModule, "BytesStorageMetadata").new_object();
  out.end_dict().text("planner_data").begin_dict();  // the path of each name in the state dict
  for (const auto& tensor : manifest.tensors) out.text(tensor.name).begin_tuple().text(tensor.name).end_tuple();
  for (const auto& [name, value] : manifest.values) out.text(name).begin_tuple().text(name).end_tuple();
  out.end_dict().text("storage_data").begin_dict();
  for (const auto& item : items) {
    out.global(kModule, "MetadataIndex").new_object().begin_dict().text("fqn").text(item.name).text("index");
    item.offset ? out.integer(item.index) : out.none();
    if (item.offset) {
      out.text("offset");
      pickle_size(out, *item.offset);
    }
    out.end_dict().set_state();
    out.global(kFileModule, "_StorageInfo").new_object().begin_dict();
    out.text("relative_path").text(item.place.file);
    out.text("offset").integer(static_cast<int64_t>(item.place.range.begin));
    out.text("length").integer(static_cast<int64_t>(item.place.range.size)).end_dict().set_state();
  }
  out.end_dict().text("storage_meta").none().text("version").text("1.0.0").end_dict().set_state();
  return out.finish();
}

}  // namespace

Manifest read_distcp(const std::string& folder) {
  const auto path = (fs::path(folder) / kDistcpMetadata).string();
  const MappedFile file(path, "the metadata");
  const auto pickle = Pickle::parse(as_text(file.bytes()), path);
  Manifest manifest;
  try {
    const auto& root = pickle.root();
    TESSERA_CHECK(root.is_object(kMetadataClass), UsageError, "it is not the Metadata of a checkpoint");
    std::map<std::string, size_t> tensors;
    const auto& dict = root.attribute("state_dict_metadata");
    for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
      const auto& name = dict.item(i).string();
      if (!dict.item(i + 1).is_object(kStorageMetadata)) continue;
      tensors.emplace(name, manifest.tensors.size());
      manifest.tensors.push_back(parse_tensor_metadata(name, dict.item(i + 1)));
    }
    const auto& storage = root.attribute("storage_data");
    for (size_t i = 0; i + 1 < storage.items.size(); i += 2) {
      const auto& index = storage.item(i);
      const auto& name = index.attribute("fqn").string();
      const auto place = parse_place(storage.item(i + 1));
      const auto found = tensors.find(name);
      if (found == tensors.end()) {
        const MappedFile data((fs::path(folder) / place.file).string(), "the values");
        if (auto value = parse_object(bytes_in(data, place.range), data.path())) manifest.values.emplace(name, *value);
        continue;
      }
      const auto offsets = parse_sizes(index.attribute("offset"));
      for (auto& shard : manifest.tensors[found->second].shards)
        if (shard.box.offsets == offsets) shard.file = place.file, shard.range = place.range;
    }
    for (const auto& tensor : manifest.tensors)
      for (const auto& shard : tensor.shards)
        TESSERA_CHECK(shard.range, UsageError, "chunk ", shard.box, " of '", tensor.name, "' is in no file");
  } catch (const UsageError& error) {
    TESSERA_FAIL(UsageError, path, ": ", error.what_without_backtrace());
  }
  for (const auto& tensor : manifest.tensors) check_shards(tensor, path);
  return manifest;
}

at::Tensor read_torch_archive(const std::shared_ptr<const MappedFile>& file, ByteRange range, const std::string& what) {
  const auto entries = read_zip(bytes_in(*file, range), what);
  const auto find = [&](const std::string& name) {
    const auto found = entries.find(name);
    TESSERA_CHECK(found != entries.end(), UsageError, what, ": its archive has no entry '", name, "'");
    return found->second;
  };
  const auto order = entries.find("byteorder");
  TESSERA_CHECK(order == entries.end() || as_text(order->second) == "little", UsageError, what,
                ": it was written on a big-endian machine, which is not read");
  const auto pickle = Pickle::parse(as_text(find("data.pkl")), what);
  try {
    const auto tensor = parse_tensor_pickle(pickle.root());
    const auto data = find("data/" + tensor.storage);
    const auto size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    const auto elements = reach(tensor);
    TESSERA_CHECK(elements && *elements <= static_cast<int64_t>(data.size()) / size, UsageError, "its storage has ",
                  data.size(), " bytes, which are too few for ", c10::IntArrayRef(tensor.sizes), " of ", tensor.dtype);
    const auto options = at::TensorOptions(tensor.dtype);
    if (*elements == 0) return at::empty(tensor.sizes, options);
    const auto* start = data.data() + tensor.offset * size;
    if (reinterpret_cast<uintptr_t>(start) % static_cast<uintptr_t>(size) == 0)
      return at::from_blob(
          const_cast<std::byte*>(start), tensor.sizes, tensor.strides, [file](void*) {}, options);
    auto copy = at::empty({*elements}, options);
    std::memcpy(copy.mutable_data_ptr(), data.data(), static_cast<size_t>(*elements * size));
    return copy.as_strided(tensor.sizes, tensor.strides, tensor.offset);
  } catch (const UsageError& error) {
    TESSERA_FAIL(UsageError, what, ": ", error.what_without_backtrace());
  }
}

void write_distcp(const Manifest& manifest, const std::string& folder,
                  const std::function<at::Tensor(const SavedTensor&, const SavedShard&)>& read) {
  std::map<std::string, std::vector<std::pair<const SavedTensor*, size_t>>> shards_by_file;
  for (const auto& tensor : manifest.tensors)
    for (size_t i = 0; i < tensor.shards.size(); i++) shards_by_file[tensor.shards[i].file].emplace_back(&tensor, i);
  if (shards_by_file.empty()) shards_by_file[""] = {};
  std::error_code error;
  fs::create_directories(folder, error);
  TESSERA_CHECK(!error && fs::is_empty(folder), UsageError, "'", folder,
                "' cannot be created, or is not empty; name a new folder");
  std::vector<WrittenItem> items;
  int64_t number = 0;
  for (const auto& [saved_file, shards] : shards_by_file) {
    const auto name = c10::str("__", number, "_0.distcp");
    DistcpWriter file((fs::path(folder) / name).string());
    if (number++ == 0)
      for (const auto& [key, value] : manifest.values)
        items.push_back({key, {}, 0, {name, file.add(value_pickle(value), {})}});
    for (const auto& [tensor, i] : shards) {
      const auto& shard = tensor->shards[i];
      const auto values = read(*tensor, shard).cpu().contiguous();
      TESSERA_CHECK(values.nbytes() < UINT32_MAX - 65536, UsageError, "'", tensor->name, "' ", shard.box, " has ",
                    values.nbytes(), " bytes; a chunk of a .distcp file has less than 4 GiB: save on more ranks");
      // An empty storage has an entry, too.
      static const std::byte nothing{};
      const auto* data = values.nbytes() ? static_cast<const std::byte*>(values.const_data_ptr()) : &nothing;
      items.push_back({tensor->name,
                       shard.box.offsets,
                       static_cast<int64_t>(i),
                       {name, file.add(tensor_pickle(values), {data, values.nbytes()})}});
    }
    file.finish();
  }
  write_file((fs::path(folder) / kDistcpMetadata).string(), metadata_pickle(manifest, items), /*sync=*/true);
  sync_folder(folder);
}

}  // namespace tessera::dcp

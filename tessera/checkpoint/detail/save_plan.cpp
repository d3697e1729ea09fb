#include "tessera/checkpoint/detail/save_plan.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <unordered_map>

namespace tessera::dcp {
namespace {

std::string shard_prefix(int64_t rank) {
  char text[32];
  std::snprintf(text, sizeof text, "shard-%05lld-", static_cast<long long>(rank + 1));
  return text;
}

std::string file_name(int64_t rank, size_t index, size_t count) {
  char text[64];
  std::snprintf(text, sizeof text, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return shard_prefix(rank) + text;
}

// A box to write (DCP: WriteItem).
struct WriteItem {
  size_t tensor;
  Box box;
  std::vector<int64_t> ranks;  // that have it
  int64_t bytes = 0, writer = -1;
};

struct CollectedItems {
  Manifest manifest;  // without shards
  std::vector<WriteItem> items;
};

CollectedItems collect_items(const std::vector<Manifest>& local_manifests) {
  CollectedItems all;
  if (!local_manifests.empty()) all.manifest.values = local_manifests.front().values;
  std::unordered_map<std::string, std::pair<size_t, int64_t>> tensors;  // index, and the first rank that has it
  std::unordered_map<std::string, size_t> items;                        // by tensor and box
  for (int64_t rank = 0; rank < static_cast<int64_t>(local_manifests.size()); rank++)
    for (const auto& tensor : local_manifests[static_cast<size_t>(rank)].tensors) {
      const auto [found, is_new] = tensors.try_emplace(tensor.name, all.manifest.tensors.size(), rank);
      const auto [index, first] = found->second;
      if (is_new) all.manifest.tensors.push_back({tensor.name, tensor.dtype, tensor.sizes, {}});
      const auto& known = all.manifest.tensors[index];
      TESSERA_CHECK(known.dtype == tensor.dtype && known.sizes == tensor.sizes, UsageError, "'", tensor.name, "' is ",
                    known.dtype, c10::IntArrayRef(known.sizes), " on rank ", first, " and ", tensor.dtype,
                    c10::IntArrayRef(tensor.sizes), " on rank ", rank);
      for (const auto& shard : tensor.shards) {
        const auto [item, new_box] = items.try_emplace(c10::str(index, shard.box), all.items.size());
        if (new_box) {
          const auto size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
          all.items.push_back({index, shard.box, {}, shard.box.numel() * size});
        }
        all.items[item->second].ranks.push_back(rank);
      }
    }
  return all;
}

void choose_writers(std::vector<WriteItem>& items, size_t ranks) {
  std::vector<WriteItem*> order;
  for (auto& item : items) order.push_back(&item);
  std::stable_sort(order.begin(), order.end(),
                   [](const WriteItem* a, const WriteItem* b) { return a->bytes > b->bytes; });
  std::vector<int64_t> bytes(ranks, 0);
  const auto less = [&](int64_t a, int64_t b) { return bytes[static_cast<size_t>(a)] < bytes[static_cast<size_t>(b)]; };
  for (auto* item : order) {
    item->writer = *std::min_element(item->ranks.begin(), item->ranks.end(), less);
    bytes[static_cast<size_t>(item->writer)] += item->bytes;
  }
}

}  // namespace

Manifest plan_save(const std::vector<Manifest>& local_manifests) {
  auto [manifest, items] = collect_items(local_manifests);
  choose_writers(items, local_manifests.size());
  std::map<std::pair<size_t, int64_t>, size_t> boxes;    // number of boxes by tensor and writer
  std::vector<size_t> files(local_manifests.size(), 0);  // number of files by rank
  for (const auto& item : items) {
    auto& count = files[static_cast<size_t>(item.writer)];
    count = std::max(count, ++boxes[{item.tensor, item.writer}]);
  }
  boxes.clear();
  for (auto& item : items)
    manifest.tensors[item.tensor].shards.push_back(
        {file_name(item.writer, boxes[{item.tensor, item.writer}]++, files[static_cast<size_t>(item.writer)]),
         std::move(item.box),
         {}});
  for (const auto& tensor : manifest.tensors) check_shards(tensor, "the local tensors of all ranks");
  return std::move(manifest);
}

bool writes(int64_t rank, const std::string& file) {
  const auto prefix = shard_prefix(rank);
  return file.starts_with(prefix);
}

}  // namespace tessera::dcp

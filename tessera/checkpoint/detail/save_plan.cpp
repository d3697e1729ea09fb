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

// A box of a tensor and the ranks that have it.
struct Work {
  size_t tensor;
  Box box;
  std::vector<int64_t> holders;
  int64_t bytes = 0, writer = -1;
};

struct Collected {
  Manifest manifest;  // without pieces
  std::vector<Work> works;
};

Collected collect(const std::vector<Manifest>& held_by_rank) {
  Collected all;
  if (!held_by_rank.empty()) all.manifest.values = held_by_rank.front().values;
  std::unordered_map<std::string, std::pair<size_t, int64_t>> tensors;  // number, and who had it first
  std::unordered_map<std::string, size_t> works;
  for (int64_t rank = 0; rank < static_cast<int64_t>(held_by_rank.size()); rank++)
    for (const auto& tensor : held_by_rank[static_cast<size_t>(rank)].tensors) {
      const auto [found, is_new] = tensors.try_emplace(tensor.name, all.manifest.tensors.size(), rank);
      const auto [number, first] = found->second;
      if (is_new) all.manifest.tensors.push_back({tensor.name, tensor.dtype, tensor.sizes, {}});
      const auto& known = all.manifest.tensors[number];
      TESSERA_CHECK(known.dtype == tensor.dtype && known.sizes == tensor.sizes, UsageError, "'", tensor.name, "' is ",
                    known.dtype, c10::IntArrayRef(known.sizes), " on rank ", first, " and ", tensor.dtype,
                    c10::IntArrayRef(tensor.sizes), " on rank ", rank);
      for (const auto& piece : tensor.pieces) {
        const auto [work, new_box] = works.try_emplace(c10::str(number, piece.box), all.works.size());
        if (new_box) {
          const auto size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
          all.works.push_back({number, piece.box, {}, piece.box.numel() * size});
        }
        all.works[work->second].holders.push_back(rank);
      }
    }
  return all;
}

void choose_writers(std::vector<Work>& works, size_t ranks) {
  std::vector<Work*> order;
  for (auto& work : works) order.push_back(&work);
  std::stable_sort(order.begin(), order.end(), [](const Work* a, const Work* b) { return a->bytes > b->bytes; });
  std::vector<int64_t> bytes(ranks, 0);
  const auto less = [&](int64_t a, int64_t b) { return bytes[static_cast<size_t>(a)] < bytes[static_cast<size_t>(b)]; };
  for (Work* work : order) {
    work->writer = *std::min_element(work->holders.begin(), work->holders.end(), less);
    bytes[static_cast<size_t>(work->writer)] += work->bytes;
  }
}

}  // namespace

Manifest plan_save(const std::vector<Manifest>& held_by_rank) {
  auto [manifest, works] = collect(held_by_rank);
  choose_writers(works, held_by_rank.size());
  std::map<std::pair<size_t, int64_t>, size_t> boxes;  // of a tensor that a rank writes
  std::vector<size_t> files(held_by_rank.size(), 0);   // of each rank
  for (const auto& work : works) {
    auto& count = files[static_cast<size_t>(work.writer)];
    count = std::max(count, ++boxes[{work.tensor, work.writer}]);
  }
  boxes.clear();
  for (auto& work : works)
    manifest.tensors[work.tensor].pieces.push_back(
        {file_name(work.writer, boxes[{work.tensor, work.writer}]++, files[static_cast<size_t>(work.writer)]),
         std::move(work.box),
         {}});
  for (const auto& tensor : manifest.tensors) check_pieces(tensor, "what the ranks hold");
  return std::move(manifest);
}

bool writes(int64_t rank, const std::string& file) {
  const auto prefix = shard_prefix(rank);
  return file.starts_with(prefix);
}

}  // namespace tessera::dcp

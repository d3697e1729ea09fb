// Time to save and load a checkpoint of 1 GB: 64 float tensors that two processes have sharded on dim 0, on the disk of
// the temporary folder; the best of three. save: dcp::save, which replaces the checkpoint of the time before: it
// computes checksums, syncs every file and renames the folder. It overwrites the files of the checkpoint that the save
// before it has replaced (SaveOptions::reuse_files). save_new: with new files, and the old ones are removed in the
// background: the note says how long that takes, and everything else is measured after it. load: dcp::load of the files
// that were just written, which are in the page cache; it checks all bytes before it changes a tensor. load_unverified:
// the same without checksums, which the peer does not have. async_stall: how long async_save keeps the step from going
// on; plain is the synchronous save. async_staging_stall: the same with the copy in the background, as tessera train
// does it: the time of the call and of wait_staging() after a forward and backward, here matrix products of about 300
// ms; the note says how much longer these take meanwhile, the middle of three. The peer is torch.distributed.checkpoint
// with FileSystemWriter, its default: it overwrites the files of the time before and syncs them, without checksums
// (async_save: with its default stager).
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/process_ranks.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/background_removal.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

namespace tessera::bench {
namespace checkpoint_bench {
namespace {

constexpr int64_t kTensors = 64, kRows = 2048, kColumns = 2048;  // 16 MB each
constexpr int kRepeats = 3;

StateDict one_gigabyte(const DeviceMesh& mesh, double value) {
  StateDict dict;
  for (int64_t i = 0; i < kTensors; i++)
    dict.insert(c10::str("layers.", i, ".weight"),
                full({kRows, kColumns}, value + static_cast<double>(i), mesh, {Shard(0)}));
  return dict;
}

// Milliseconds from the moment that all ranks are here until this rank returns.
template <class Call>
double milliseconds(testing::Rank& me, Call&& call) {
  me.world.group()->barrier().wait();
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void run(int64_t ranks, const EmitRow& emit) {
  run_process_ranks("checkpoint", ranks, emit, [&](testing::Rank& me, const EmitRow& emit) {
    const auto mesh = me.mesh(std::vector<int64_t>{ranks});
    const auto folder = (std::filesystem::temp_directory_path() / "tessera-bench-checkpoint").string();
    const auto dict = one_gigabyte(mesh, 1), loaded = one_gigabyte(mesh, 0);
    double save = 1e9, save_new = 1e9, removal = 1e9, load = 1e9, unverified = 1e9, stall = 1e9, total = 1e9,
           staging_stall = 1e9;
    std::vector<double> slower;
    const auto factor = at::ones({512, 512});
    auto compute = [&, products = 1]() mutable {  // the same number of products in every call
      const auto start = std::chrono::steady_clock::now();
      const auto milliseconds_since = [&] {
        return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
      };
      if (products == 1)
        while (milliseconds_since() < 300) at::mm(factor, factor), products++;
      else
        for (int i = 0; i < products; i++) at::mm(factor, factor);
      return milliseconds_since();
    };
    compute();
    dcp::AsyncSave saving;
    for (int i = 0; i < kRepeats; i++) {
      save_new = std::min(
          save_new, milliseconds(me, [&] { dcp::save(dict, folder, {}, {.overwrite = true, .reuse_files = false}); }));
      if (const double waited = milliseconds(me, [] { dcp::wait_for_removals(); }); i > 0)
        removal = std::min(removal, waited);
      dcp::save(dict, folder, {}, {.overwrite = true});  // leaves the files that the next one overwrites
      save = std::min(save, milliseconds(me, [&] { dcp::save(dict, folder, {}, {.overwrite = true}); }));
      load = std::min(load, milliseconds(me, [&] { dcp::load(loaded, folder); }));
      unverified = std::min(unverified, milliseconds(me, [&] { dcp::load(loaded, folder, {.verify = false}); }));
      for (const auto& [name, tensor] : loaded)
        TESSERA_CHECK(DTensor(tensor).to_local().equal(DTensor(dict.at(name)).to_local()), InternalError, name,
                      " differs after save and load");
      total = std::min(total, milliseconds(me, [&] {
                         stall = std::min(stall, milliseconds(me, [&] {
                                            saving = dcp::async_save(dict, folder, {}, {.overwrite = true},
                                                                     std::move(saving));
                                          }));
                         saving.wait();
                       }));
      me.world.group()->barrier().wait();
      const double alone = compute();
      double beside = 0, waited = 0;
      const double posted = milliseconds(me, [&] {
        saving = dcp::async_save(dict, folder, {}, {.overwrite = true, .async_staging = true}, std::move(saving));
      });
      beside = compute();
      waited = milliseconds(me, [&] { saving.wait_staging(); });
      saving.wait();
      staging_stall = std::min(staging_stall, posted + waited);
      slower.push_back(beside - alone);
    }
    std::sort(slower.begin(), slower.end());
    if (me.rank == 0) {
      std::filesystem::remove_all(folder);
      dcp::remove_left_folders();
      const auto name = [&](const char* variant) { return c10::str("1gb/", ranks, "/fp32/", variant); };
      emit({.name = name("save"), .unit = "ms", .ours = save});
      emit({.name = name("save_new"),
            .unit = "ms",
            .ours = save_new,
            .note = c10::str("the replaced checkpoint is gone after ", static_cast<int64_t>(removal), " ms more")});
      emit({.name = name("load"), .unit = "ms", .ours = load});
      emit({.name = name("load_unverified"), .unit = "ms", .ours = unverified});
      emit({.name = name("async_stall"),
            .unit = "ms",
            .ours = stall,
            .plain = save,
            .note = c10::str(static_cast<int>(1000 * stall / save) / 10.0, " % of a save; complete after ",
                             static_cast<int64_t>(total), " ms")});
      emit({.name = name("async_staging_stall"),
            .unit = "ms",
            .ours = staging_stall,
            .plain = save,
            .note =
                c10::str(static_cast<int>(1000 * staging_stall / save) / 10.0, " % of a save; the step itself takes ",
                         static_cast<int64_t>(slower[kRepeats / 2]), " ms longer")});
    }
  });
}

}  // namespace
}  // namespace checkpoint_bench

void register_checkpoint(BenchRegistry& registry) {
  registry.add({"checkpoint", "time to save and load a checkpoint of 1 GB, and the stall of an asynchronous save",
                [](const EmitRow& emit) { checkpoint_bench::run(2, emit); }});
}

}  // namespace tessera::bench

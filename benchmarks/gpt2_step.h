#pragma once
#include "benchmarks/train_step.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/sizes.h"

#include <string>

// A train step of GPT-2, alone and through each parallelism: forward and backward in bfloat16 autocast, clipping of the
// gradients, and the fused AdamW.
namespace tessera::bench {

struct Gpt2Case {
  models::GPT2Config config;
  at::DeviceType device = at::kCPU;
  int64_t batch = 0, length = 0;
};

// The step of a new model on random tokens. `how` is plain, fsdp (fully_shard), ddp (DistributedDataParallel) or tp
// (parallelize_module); these use `mesh`.
Step gpt2_step(const Gpt2Case& of, const std::string& how, bool compiled, const DeviceMesh& mesh);

}  // namespace tessera::bench
